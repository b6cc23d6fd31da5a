"""How long a step takes on a cluster: a model of its parts, in plain arithmetic. docs/planning.md has the formulas.

compute    matrix products at the share of the matrix rate that encoders reach, and what is no product at the speed
           of memory: a roofline of two parts, one after the other; the host's work is hidden on a GPU, if it is less
stragglers all wait for the slowest rank, which is the slower the more there are
joining    gradients and weights between ranks: rings within a node, rings or trees between nodes
optimizer  memory-bound: the bytes of every parameter, once a step
data       what the loading thread of a rank does not have ready in time
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from data_prep.common.progress import duration
from pretraining.config.settings import Dtype
from pretraining.model.shape import Shape
from pretraining.planning.memory import plan_activations

REACH = 0.53
"""Share of a GPU's matrix rate that the products of an encoder reach: the median of what follows from the published
single-GPU rows at 128 (benchmarks/published.toml; from 0.43 to 0.65)."""
TRAFFIC = 4.0
"""How often a byte of activations that is kept goes through memory: written and read on the way forward, read on the
way back, and its gradient written."""
OF_DATASHEET = 0.8
"""Share of the bandwidth on a datasheet that is reached, of memory and of links: nccl-tests on a DGX A100 show 235 of
300 GB/s, and copies within its memory 1.6 of 2.0 TB/s."""
LAUNCH = 4e-3
"""Seconds in which the host gives a GPU the work of a layer, forward and backward: a step of large took 101 ms with so
few pieces that an H200 waited (benchmarks/results/throughput-nvidia-h200.json, at 512), beside a virtual Xeon. By this
model the seven contests there take 0.90 to 1.09 times what it says."""
HIDDEN = 0.5
"""Share of the communication that overlaps with computing that costs nothing: both take memory and multiprocessors."""
SLOWEST = 0.01
"""How much slower a rank is than the mean, as a standard deviation: the median of what follows from the published rows
of 1 and of all GPUs of a node, with long steps (benchmarks/published.toml)."""
BACKWARD = 2 / 3
"""Share of the time of a micro-batch that its backward pass takes."""
BUCKET_BYTES = 4 * 2**24
"""Gradients are joined in buckets of so many bytes."""
LOADED_PIECES = 20e6
"""Pieces a second that the loading thread of a rank makes batches of: 18 to 19 million were measured on a core of an
EPYC, with 8,192 sequences in a step."""
DEALT = 5e-7
"""Seconds for each sequence of the global batch, whose length every rank knows and deals out: 0.2 to 0.9 us there, with
65,536 of them."""

WITHIN = 3.4e-6
"""Seconds of a hop of a collective within a node: NCCL's table for its own choices (tuning.cc, Simple, NVLink)."""


PUBLISHED = (0.83, 1.88)
"""Lowest and highest ratio of published to modelled time among the series of benchmarks/published.toml; each model is
fitted without the series' source (tests/benchmarks/test_published.py). The spread comes mostly from software."""


def describe_range(seconds: float, by_clock: float) -> str:
    """The range of a plan's time: of `seconds` that follow from the speed, and of those that the clock decides."""
    least, most = PUBLISHED
    said = f"published runs of other software took {least:.2f} to {most:.2f} times as long as this model says"
    if not seconds:
        return f"the clock ends it, after as many fewer or more steps: {said}"
    low, high = (duration(times * seconds + by_clock) for times in (least, most))
    return f"from {low} to {high}: {said}"


@dataclass(frozen=True)
class Device:
    """What a rank computes with."""

    products: float
    """operations a second that the products of an encoder reach"""
    bandwidth: float
    """bytes a second that work which is no product moves"""
    launch: float = LAUNCH
    """seconds of the host for a layer of a micro-batch"""


@dataclass(frozen=True)
class Network:
    """What joins nodes."""

    name: str
    bandwidth: float
    """bytes a second of a node, in each direction"""
    latency: float
    """seconds from a rank to one of another node"""


@dataclass(frozen=True)
class Cluster:
    """Ranks with a device each, so many to a node."""

    device: Device
    nodes: int = 1
    per_node: int = 1
    link: float = math.inf
    """bytes a second between the ranks of a node, in each direction"""
    network: Network | None = None
    """what joins the nodes"""
    jitter: float = SLOWEST

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def alone(self) -> Cluster:
        """A cluster of one of its ranks."""
        return replace(self, nodes=1, per_node=1)

    def scatter_seconds(self, size: float) -> float:
        """Sums so many bytes over all ranks, and leaves each its part of the sum; gathering takes as long.

        Within a node the parts go round a ring, and then each rank's part between the nodes, at the same time: through
        all ports of a node goes all of it once. Trees have shorter ways than rings where nodes are many.
        """
        buckets, seconds = max(1.0, size / BUCKET_BYTES), 0.0
        if self.per_node > 1:
            share = (self.per_node - 1) / self.per_node
            seconds += share * size / (OF_DATASHEET * self.link) + buckets * (self.per_node - 1) * WITHIN
        if self.nodes > 1:
            assert self.network is not None
            share = (self.nodes - 1) / self.nodes
            hops = min(self.nodes - 1, math.ceil(math.log2(self.nodes)))
            seconds += share * size / (OF_DATASHEET * self.network.bandwidth) + buckets * hops * self.network.latency
        return seconds

    @property
    def waiting(self) -> float:
        """How far the slowest rank is behind the mean, as a share of its time: the largest of as many normal draws."""
        return self.jitter * math.sqrt(2 * math.log(self.ranks))


@dataclass(frozen=True)
class MicroBatch:
    """The work of a micro-batch on a rank."""

    sequences: int
    flops: float
    """operations of its matrix products, forward and backward"""
    traffic: float
    """bytes through memory for all else"""
    pieces: float
    layers: int

    @classmethod
    def from_shape(
        cls,
        shape: Shape,
        dtype: Dtype,
        sequences: int,
        pieces: float,
        flops: float,
        recompute: bool = False,
        predictions: float | None = None,
    ) -> MicroBatch:
        """So many sequences, with the pieces, operations and predictions of the average one."""
        # with masks, as in the software whose published speeds the model is fitted to
        kept = plan_activations(shape, dtype, sequences, pieces, predictions=predictions, by_kernels=False).kept
        again = 4 / 3 if recompute else 1.0
        return cls(sequences, again * sequences * flops, again * TRAFFIC * kept, sequences * pieces, shape.layers)

    def seconds(self, device: Device) -> float:
        """How long a device computes it."""
        arithmetic = self.flops / device.products + self.traffic / device.bandwidth
        return max(arithmetic, device.launch * self.layers)


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange in a step, and what the optimizer of each moves."""

    parameters: float
    zero: int
    weight_bytes: int
    """bytes of a weight in the type that computes"""
    optimizer_bytes: float
    """bytes through memory for a parameter in a step"""
    gradient_bytes: int = 4
    """bytes of a gradient on its way between ranks"""
    hides: bool = True
    """whether gradients are joined while the backward pass runs"""

    @classmethod
    def for_stage(cls, parameters: float, zero: int, dtype: Dtype, optimizer_bytes: float) -> Exchange:
        """What the engine exchanges: under ZeRO 1 it joins gradients while the last backward pass runs, but in fp16."""
        stage = zero if dtype == "fp32" else max(zero, 1)
        size = 4 if dtype == "fp32" else 2
        hides = stage == 3 or (stage == 1 and dtype != "fp16")
        return cls(parameters, stage, size, optimizer_bytes, hides=hides)

    def joining(self, cluster: Cluster, accumulation: int, backward: float) -> float:
        """Seconds of a step in which ranks exchange and do not compute; `backward` are those of a backward pass.

        Without ZeRO all get all sums; otherwise each gets its part, and then all get all weights. ZeRO 2 and 3 join the
        gradients of every micro-batch; ZeRO 3 gathers the weights for every pass, and none afterwards.
        """
        gradients = cluster.scatter_seconds(self.gradient_bytes * self.parameters)
        weights = cluster.scatter_seconds(self.weight_bytes * self.parameters)
        hidden = HIDDEN if self.hides else 0.0

        def seen(seconds: float) -> float:
            return seconds - hidden * min(seconds, backward)

        if self.zero == 0:
            return seen(2 * gradients)
        if self.zero == 3:
            return accumulation * seen(gradients + 2 * weights)
        return (accumulation if self.zero == 2 else 1) * seen(gradients) + weights

    def optimizer(self, cluster: Cluster) -> float:
        """Seconds of the optimizer: ZeRO divides its work among the ranks."""
        share = self.parameters / (cluster.ranks if self.zero else 1)
        return share * self.optimizer_bytes / cluster.device.bandwidth


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, by what they go to."""

    compute: float
    stragglers: float
    joining: float
    optimizer: float
    data: float

    @property
    def total(self) -> float:
        return self.compute + self.stragglers + self.joining + self.optimizer + self.data


def estimate_step(cluster: Cluster, work: MicroBatch, exchange: Exchange, accumulation: int) -> StepTime:
    """How long a step of so many micro-batches on every rank takes."""
    one = work.seconds(cluster.device)
    compute = accumulation * one
    waiting = compute * cluster.waiting
    joining = exchange.joining(cluster, accumulation, BACKWARD * one) if cluster.ranks > 1 else 0.0
    optimizer = exchange.optimizer(cluster)
    loading = accumulation * (work.pieces / LOADED_PIECES + DEALT * cluster.ranks * work.sequences)
    return StepTime(compute, waiting, joining, optimizer, max(0.0, loading - compute - waiting - joining - optimizer))


def find_efficiency(cluster: Cluster, work: MicroBatch, exchange: Exchange, accumulation: int) -> float:
    """What a rank gets done, as a share of what one alone does that computes the whole batch."""
    alone = estimate_step(cluster.alone, work, exchange, accumulation * cluster.ranks)
    return alone.total / cluster.ranks / estimate_step(cluster, work, exchange, accumulation).total
