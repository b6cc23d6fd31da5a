"""Estimates the time of a step on a cluster, in plain arithmetic. docs/planning.md has the formulas.

compute    matrix products at the share of peak FLOP/s that encoders reach, then all other operations at memory
           bandwidth; on a GPU the work of the host overlaps with them
sums       of activations among ranks that share a model, which wait for them
stragglers all ranks wait for the slowest, which is slower the more ranks there are
joining    gradients and weights between ranks: rings within a node, rings or trees between nodes
optimizer  memory-bound: the bytes of every parameter, once a step
data       loading that the thread of a rank does not finish in time
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from pretraining.config.settings import Dtype
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective
from pretraining.planning.amount import SequenceStatistics
from pretraining.planning.memory import plan_activations

REACH = 0.53
"""Share of a GPU's peak FLOP/s that the products of an encoder reach: the median over the published single-GPU rows at
length 128 (benchmarks/published.toml; 0.43 to 0.65)."""
TRAFFIC = 4.0
"""Memory accesses per byte of kept activations: written and read in the forward pass, read in the backward pass, and
its gradient written."""
OF_DATASHEET = 0.8
"""Share of datasheet bandwidth that memory and links reach: nccl-tests on a DGX A100 show 235 of 300 GB/s, copies
within its memory 1.6 of 2.0 TB/s."""
LAUNCH, LAUNCHES = 1.1e-3, (0.7e-3, 4e-3)
"""Seconds for the host to launch the kernels of a layer, forward and backward, and their range. The highest was
measured: an H200 waited for a virtual Xeon in steps of large of 101 ms (benchmarks/results/throughput-nvidia-h200.json,
at 512; with it, the seven contests there took 0.90 to 1.09 times the modelled time). A bare launch took 21 us there and
takes about 6 us on usual hosts: 4 ms x 6/21 = 1.1 ms; `make gpu PARTS=host` measures it. The lowest is estimated from
30 launches and 370 calls in Python."""
HIDDEN = 0.5
"""Share of overlapping communication that costs no time: it competes for memory and multiprocessors."""
SLOWEST = 0.01
"""Relative standard deviation of the speed of ranks: the median over the published rows of 1 and of all GPUs of a node,
with long steps (benchmarks/published.toml)."""
BACKWARD = 2 / 3
"""Share of the backward pass in the time of a micro-batch."""
BUCKET_BYTES = 4 * 2**24
"""Size of the buckets in which gradients are joined."""
LOADED_PIECES = 20e6
"""Pieces a second that the loading thread of a rank batches: 18 to 19 million were measured on a core of an EPYC, with
8,192 sequences in a step."""
DEALT = 5e-7
"""Seconds per sequence of the global batch to distribute sequences among ranks: 0.2 to 0.9 us there, with 65,536
sequences."""

SUMS = 4
"""Sums of activations in a layer among ranks that share a model: two forward, two backward; two more if the layer is
computed again."""
SUMS_BESIDES = 2
"""Likewise outside of the layers: of the word embeddings, and of the gradient of the states that the head reads."""
WITHIN = 3.4e-6
"""Seconds of a hop of a collective within a node: NCCL's table for its own choices (tuning.cc, Simple, NVLink)."""


PUBLISHED = (0.83, 1.88)
"""Lowest and highest ratio of published to modelled time among the series of benchmarks/published.toml; each model is
fitted without the series' source (tests/benchmarks/test_published.py). The spread comes mostly from software."""


class NodeNetwork(NamedTuple):
    """The network between nodes."""

    name: str
    bandwidth: float
    """bytes a second of a node, in each direction"""
    latency: float
    """seconds from a rank to one of another node"""


@dataclass(frozen=True)
class Cluster:
    """Nodes with `per_node` ranks each, and a device per rank."""

    products: float
    """FLOP/s that the products of an encoder reach on a rank"""
    memory_bandwidth: float
    """bytes a second of a rank for all other operations"""
    nodes: int
    per_node: int
    link: float
    """bytes a second between the ranks of a node, in each direction"""
    network: NodeNetwork
    launch: float = LAUNCH
    """seconds of the host per layer of a micro-batch"""
    jitter: float = SLOWEST

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def select_data_ranks(self, tensor: int) -> Cluster:
        """Selects the ranks that hold the same part of a model that `tensor` neighbouring ranks share. The ports of a
        node are divided among those with different parts."""
        inside = min(tensor, self.per_node)
        network = self.network._replace(bandwidth=self.network.bandwidth / inside)
        nodes = self.nodes // -(-tensor // self.per_node)
        return replace(self, nodes=nodes, per_node=self.per_node // inside, network=network)

    def select_tensor_ranks(self, tensor: int) -> Cluster:
        """Selects neighbouring ranks that share a model."""
        return replace(self, nodes=-(-tensor // self.per_node), per_node=min(tensor, self.per_node))

    def scatter_seconds(self, size: float) -> float:
        """Estimates a reduce-scatter of `size` bytes over all ranks; an all-gather takes as long.

        Within a node in a ring, then between nodes with all ranks of a node at once, so that all bytes pass its ports
        once. With many nodes trees have fewer hops than rings.
        """
        buckets, seconds = max(1.0, size / BUCKET_BYTES), 0.0
        if self.per_node > 1:
            share = (self.per_node - 1) / self.per_node
            seconds += share * size / (OF_DATASHEET * self.link) + buckets * (self.per_node - 1) * WITHIN
        if self.nodes > 1:
            share = (self.nodes - 1) / self.nodes
            hops = min(self.nodes - 1, math.ceil(math.log2(self.nodes)))
            seconds += share * size / (OF_DATASHEET * self.network.bandwidth) + buckets * hops * self.network.latency
        return seconds

    @property
    def waiting(self) -> float:
        """Relative delay of the slowest rank: the expected maximum of as many normal draws as there are ranks."""
        return self.jitter * math.sqrt(2 * math.log(self.ranks))


@dataclass(frozen=True)
class MicroBatch:
    """The work of a micro-batch on one rank."""

    sequences: int
    flops: float
    """FLOPs of its matrix products, forward and backward"""
    traffic: float
    """bytes through memory for all other operations"""
    pieces: float
    layers: int
    """layers of all passes through encoders"""
    tensor: int
    """ranks that share the model"""
    sums: float
    """sums of activations among these, if they are several"""
    sum_bytes: float
    """bytes of each"""

    @classmethod
    def from_average(
        cls,
        shape: Shape,
        dtype: Dtype,
        sequences: int,
        average: SequenceStatistics,
        recompute: bool = False,
        tensor: int = 1,
        fused_attention: bool = True,
    ) -> MicroBatch:
        """Computes the work of `sequences` of the average size on a rank, of `tensor` that share the model."""
        pieces, predictions = average.pieces, average.predictions
        # with dropout masks, as in the software whose published speeds the model is fitted to
        sizes = (shape, dtype, sequences, pieces, fused_attention, predictions)
        kept = plan_activations(*sizes, by_kernels=False, tensor=tensor).kept
        again = 4 / 3 if recompute else 1.0
        flops = again * sequences * average.flops / tensor
        layers = sum(each.shape.layers for each in find_objective(shape).passes(shape, sequences, pieces, predictions))
        sums, size = (SUMS + 2 * recompute) * layers + SUMS_BESIDES, 4 if dtype == "fp32" else 2
        pieces *= sequences
        return cls(sequences, flops, again * TRAFFIC * kept, pieces, layers, tensor, sums, size * pieces * shape.hidden)

    def seconds(self, cluster: Cluster) -> float:
        """Estimates how long a rank computes it."""
        arithmetic = self.flops / cluster.products + self.traffic / cluster.memory_bandwidth
        return max(arithmetic, cluster.launch * self.layers)

    def sum_seconds(self, cluster: Cluster) -> float:
        """Estimates how long the sums take, which nothing hides."""
        return self.sums * 2 * cluster.select_tensor_ranks(self.tensor).scatter_seconds(self.sum_bytes)


class StepTraffic(NamedTuple):
    """The bytes that ranks exchange in a step, and those that their optimizers read and write."""

    parameters: float
    zero: int
    weight_bytes: int
    """bytes of a weight in the precision of the computation"""
    optimizer_bytes: float
    """bytes through memory per parameter and step"""
    gradient_bytes: int = 4
    """bytes of a gradient between ranks"""
    hides: bool = True
    """whether gradients are joined during the backward pass"""

    @classmethod
    def for_stage(cls, parameters: float, zero: int, dtype: Dtype, optimizer_bytes: float) -> StepTraffic:
        """Describes the engine's exchange: ZeRO 1 joins gradients during the last backward pass, except in fp16."""
        stage = zero if dtype == "fp32" else max(zero, 1)
        size = 4 if dtype == "fp32" else 2
        return cls(parameters, stage, size, optimizer_bytes, hides=stage == 3 or (stage == 1 and dtype != "fp16"))

    def joining(self, cluster: Cluster, accumulation: int, backward: float) -> float:
        """Estimates the seconds of a step in exchanges without computing; `backward`: seconds of a backward pass.

        Without ZeRO gradients are all-reduced; otherwise they are reduce-scattered, and the weights all-gathered.
        ZeRO 2 and 3 join the gradients of every micro-batch; ZeRO 3 gathers the weights for every pass instead.
        """
        gradients = cluster.scatter_seconds(self.gradient_bytes * self.parameters)
        weights = cluster.scatter_seconds(self.weight_bytes * self.parameters)
        hidden = HIDDEN if self.hides else 0.0

        def subtract_hidden(seconds: float) -> float:
            return seconds - hidden * min(seconds, backward)

        if self.zero == 0:
            return subtract_hidden(2 * gradients)
        if self.zero == 3:
            return accumulation * subtract_hidden(gradients + 2 * weights)
        return (accumulation if self.zero == 2 else 1) * subtract_hidden(gradients) + weights

    def optimizer(self, cluster: Cluster) -> float:
        """Estimates the seconds of the optimizer, whose work ZeRO divides among the ranks."""
        share = self.parameters / (cluster.ranks if self.zero else 1)
        return share * self.optimizer_bytes / cluster.memory_bandwidth


class StepTime(NamedTuple):
    """The seconds of a step, by part."""

    compute: float
    stragglers: float
    joining: float
    optimizer: float
    data: float
    sums: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def estimate_step(cluster: Cluster, work: MicroBatch, exchange: StepTraffic, accumulation: int) -> StepTime:
    """Estimates the time of a step of `accumulation` micro-batches on every rank."""
    one = work.seconds(cluster)
    compute = accumulation * one
    waiting, sums = compute * cluster.waiting, accumulation * work.sum_seconds(cluster)
    readers = cluster.select_data_ranks(work.tensor)
    joining = exchange.joining(readers, accumulation, BACKWARD * one) if readers.ranks > 1 else 0.0
    optimizer = exchange.optimizer(readers)
    loading = accumulation * (work.pieces / LOADED_PIECES + DEALT * readers.ranks * work.sequences)
    rest = loading - compute - waiting - joining - optimizer - sums
    return StepTime(compute, waiting, joining, optimizer, max(0.0, rest), sums)


def find_efficiency(
    cluster: Cluster,
    work: MicroBatch,
    exchange: StepTraffic,
    accumulation: int,
    whole: tuple[MicroBatch, StepTraffic] | None = None,
) -> float:
    """Finds the throughput of a rank as a share of that of a single rank with the whole batch, and with the `whole`
    model where ranks share one."""
    one, many = cluster.select_tensor_ranks(1), accumulation * cluster.ranks // work.tensor
    alone = estimate_step(one, *(whole or (work, exchange)), many)
    return alone.total / cluster.ranks / estimate_step(cluster, work, exchange, accumulation).total
