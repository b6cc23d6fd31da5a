"""Estimates the memory that a rank needs, and which micro-batches fit into it.

Bytes for each parameter, with 16-bit weights; in fp32, 4 instead of 2:

    weights     2      divided by ZeRO 3, which holds up to `stage3_max_live_parameters` of them whole at a time
    gradients   4      their sums in fp32, divided by ZeRO 2 and 3. In fp16 ZeRO 1 also has those of a micro-batch, 2.
                Without ZeRO a CUDA graph of the optimizer's step has a copy, 4
    optimizer   12     fp32 weights and what the optimizer keeps, such as two averages; divided by ZeRO 1, 2 and 3

and temporarily, at the peak of a step, for gradients:

    ZeRO 0, 1   the word embeddings' gradient twice, from the lookup and from the loss over the vocabulary; or later,
                if that is more, an fp32 bucket of ZeRO 0, or the optimizer's copy of its part under ZeRO 1
    ZeRO 2      a bucket of `reduce_bucket_size` in 16 bits, its copy, and the fp32 buffer that is sent; in fp32 the
                bucket, and the word embeddings' gradient three times, before sums are allocated
    ZeRO 3      three such buckets in fp32

tests/pretraining/planning/test_memory_peaks.py compares this with the peaks of an allocator. In fp32 without ZeRO the
weights are the fp32 weights; ZeRO keeps a copy of its part all the same. In 16 bits without ZeRO the engine takes ZeRO
1, since DeepSpeed would add the gradients up in 16 bits.

Ranks that share a model (`parallel.tensor`) each have a part of the matrices, of the word embeddings and their
gradient, of the logits, and of activations: of queries, keys, values, attention's result and the inner layer. All of
them have whole what norms and dropout read and write.

The heaviest micro-batch decides: full sequences with the most predictions of the data. Real text fills less, so what
fits once fits in every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import count_parameters
from pretraining.config.settings import Dtype, Offload, list_divisors
from pretraining.mesh.cuts import VOCABULARY_SHARE
from pretraining.model.shape import Shape
from pretraining.objectives.costs import Pass
from pretraining.objectives.declaration import find_objective, num_parameters
from pretraining.optimizers.declaration import DEFAULT, Optimizer, optimizers
from pretraining.planning.amount import HALF_WAY, PREDICTED_SHARE

LIVE, BUCKET = 1e9, 5e8
"""Defaults of DeepSpeed, in parameters; the engine uses no bucket larger than the model."""
MARGIN = 0.05
"""Share of a GPU's memory that is left free, for its fragments and for the buffers between ranks."""
HOST_MARGIN = 0.5
"""Share of a machine's memory that is left free for other programs; a process that takes too much is killed."""
CPU_PIECES = 4096
"""Pieces of a micro-batch beyond which a CPU is hardly faster: a core makes 8,400 a second of mini with 1,024, 11,700
with 4,096, and 12,300 with 65,536, at length 128 in bf16."""
GPU_ELEMENTS = 2**31 - 1
"""Kernels number the elements of a tensor with 32 bits."""


class Memory(NamedTuple):
    """Bytes that a rank needs under a ZeRO stage, without activations."""

    zero: int
    weights: float
    gradients: float
    optimizer: float
    """The optimizer's own fp32 weights, and its state."""
    host: float = 0.0
    """The part of weights, gradients and optimizer that is offloaded to the host's memory."""

    @property
    def device(self) -> float:
        """Bytes that stay on the device."""
        return self.weights + self.gradients + self.optimizer - self.host


class Activations(NamedTuple):
    """Bytes that the activations of a micro-batch take."""

    kept: float
    """bytes if all layers keep activations for the backward pass"""
    recomputed: float
    """bytes if they are computed again, layer by layer (`compute.checkpoint_activations`)"""


def plan_memory(
    shape: Shape,
    dtype: Dtype,
    ranks: int,
    zero: int,
    offload: Offload = "none",
    zero_options: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    tensor: int = 1,
    graphs: bool = False,
) -> Memory:
    """Plans a rank's memory under a ZeRO stage; `zero_options` are the recipe's own settings of DeepSpeed's ZeRO.

    `tensor` ranks share a model; `ranks` have the same part of it. `graphs`: whether the optimizer's step is a CUDA
    graph.
    """
    optimizer = optimizer or optimizers()[DEFAULT]
    size, stage = (4, zero) if dtype == "fp32" else (2, max(zero, 1))
    parameters = count_rank_parameters(shape, tensor)
    part = parameters / ranks
    options = zero_options or {}
    live = min(parameters, _read_number(options, "stage3_max_live_parameters", LIVE))
    bucket = _read_number(options, "reduce_bucket_size", min(parameters, BUCKET))
    weights = size * (parameters if stage < 3 else part + live)
    state = (4 + optimizer.state_bytes) * part if stage else optimizer.state_bytes * parameters
    if optimizer.whole_matrices:  # one at a time is gathered whole; the word embeddings are the largest
        state += (8 + optimizer.state_bytes) * shape.padded_vocabulary * shape.hidden
    accumulated = 4 * (part if stage > 1 else parameters * (1 + (graphs and not stage)))
    embeddings = pad_vocabulary(shape, tensor) * shape.hidden / tensor
    gradients = _plan_gradients(embeddings, dtype, stage, parameters, part, bucket)
    moved = state + accumulated * (stage > 1) + size * part * (offload == "all" and stage == 3)
    return Memory(zero, weights, gradients + accumulated, state, moved if offload != "none" and zero else 0.0)


def _plan_gradients(words: float, dtype: Dtype, stage: int, parameters: float, part: float, bucket: float) -> float:
    """Plans the bytes of gradients besides their sums, at the peak of a step; `words`: numbers of their embeddings."""
    size = 4 if dtype == "fp32" else 2
    if stage == 3:
        return 12 * bucket
    if stage == 2:
        return 4 * bucket + max(12 * words - 4 * part, 0.0) if dtype == "fp32" else 8 * bucket
    if dtype == "fp16":
        return 2 * parameters
    return max(2 * size * words, 4 * (bucket if stage == 0 else part))


@cache
def count_rank_parameters(shape: Shape, tensor: int = 1) -> int:
    """Counts the parameters of a rank, including the padding of the vocabulary; `tensor` ranks share a model."""
    padded = replace(shape, vocabulary=pad_vocabulary(shape, tensor))
    kind, heads = find_architecture(shape.architecture), find_objective(shape).heads(shape)
    declared = [*kind.weights(padded), *(each for name in heads for each in kind.heads(padded).get(name, []))]
    divided = count_parameters(weight for weight in declared if weight.cut != "whole")
    return num_parameters(padded) - divided * (tensor - 1) // tensor


def pad_vocabulary(shape: Shape, tensor: int = 1) -> int:
    """Counts the rows of the word embeddings with those that pad them, on all ranks that share a model."""
    return shape.padded_vocabulary + (-shape.padded_vocabulary % (VOCABULARY_SHARE * tensor) if tensor > 1 else 0)


def _read_number(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name)
    return float(value) if isinstance(value, int | float) else default


def plan_activations(
    shape: Shape,
    dtype: Dtype,
    sequences: int,
    length: float,
    fused_attention: bool = True,
    predictions: float | None = None,
    seen: float | None = None,
    by_kernels: bool = True,
    tensor: int = 1,
) -> Activations:
    """Plans for a micro-batch of full sequences. Fused attention keeps no probabilities; that of a CPU does.

    `predictions`: number of predictions of a sequence (default: the objective's without a recipe). `seen`: number of
    its last states that the heads read (default: the objective's). `by_kernels`: whether our kernels compute: PyTorch's
    operations also keep dropout masks, a byte per element, and three tensors of the size of the logits, not one.
    `tensor` ranks share the model.
    """
    size, h, objective = 4 if dtype == "fp32" else 2, shape.hidden, find_objective(shape)
    if predictions is None:
        predictions = objective.predictions(length, PREDICTED_SHARE * length, HALF_WAY)
    passes = [Pass(shape, seen)] if seen is not None else objective.passes(shape, 1, length, predictions)
    planned = (_plan_pass(each, size, sequences, length, fused_attention, by_kernels, tensor) for each in passes)
    kept, inputs, layers = zip(*planned, strict=True)
    asked, at_once = sequences * predictions, objective.logits_at_once
    # our kernels put the gradient of logits where these were, but not those of a share of the vocabulary
    in_place = by_kernels and dtype != "fp16" and tensor == 1
    heads = asked * 4 * size * h + sequences * size * sum(each.kept for each in passes)
    if at_once is None:  # logits as computed, in fp32, and their gradients
        heads += asked * shape.vocabulary / tensor * (size if in_place else size + 4 + 4)
    else:  # logits in fp32, twice while summed; and gradients, including those of weights, for the backward pass
        logits = min(asked, at_once) * shape.vocabulary * (size if in_place else 8)
        heads += asked * size * h + (logits + 4 * pad_vocabulary(shape, tensor) * (h + 1)) / tensor
    return Activations(kept=sum(kept) + heads, recomputed=sum(inputs) + max(*layers, heads))


def _plan_pass(
    asked: Pass, size: int, sequences: int, length: float, fused_attention: bool, by_kernels: bool, tensor: int
) -> tuple[float, float, float]:
    """Plans a pass whose numbers of pieces are those of one sequence; `size` is that of a number.

    Returns the bytes of all activations; of those of the embeddings with the inputs of the layers; and of a layer's.
    """
    shape, pieces = asked.shape, asked.share * (sequences * length)
    kept = find_architecture(shape.architecture).layer_memory(shape)
    before, behind = (
        size * (whole - (1 - 1 / tensor) * divided)
        for whole, divided in zip((kept.before, kept.behind), kept.divided, strict=True)
    )
    behind += (not by_kernels) * kept.masks
    layer = pieces * (before + behind)
    # of the last layer, the states that the heads read: selected from its input and from attention's result, and beyond
    last = pieces * before + sequences * asked.needed * (size * kept.chosen + behind)
    if not fused_attention:
        layer, last = (each + pieces * size * shape.heads / tensor * length for each in (layer, last))
    embeddings = pieces * (size * kept.embeddings + (not by_kernels) * shape.hidden)
    inputs = embeddings + shape.layers * pieces * size * shape.hidden
    return embeddings + (shape.layers - 1) * layer + last, inputs, layer


PROCESS = 0.8e9
"""Bytes of a process on a CPU besides its model: Python, PyTorch and its libraries. Runs of the demo held 0.9 GB, of
which the model was 0.1."""


class Room(NamedTuple):
    """The memory of a rank that a micro-batch must fit into."""

    size: float
    """bytes of the GPU, or this rank's part of those of the machine"""
    on_cpu: bool = False

    @property
    def usable(self) -> float:
        """Bytes that a rank may use."""
        return (1 - (HOST_MARGIN if self.on_cpu else MARGIN)) * self.size


@dataclass(frozen=True)
class Heaviest:
    """The heaviest micro-batches of a phase: full sequences with the most predictions."""

    shape: Shape
    dtype: Dtype
    length: int
    predictions: float
    """predictions of a sequence"""
    recompute: bool
    """whether activations are computed again (`compute.checkpoint_activations`)"""
    tensor: int = 1
    """ranks that share the model (`parallel.tensor`)"""

    def sizes(self, share: int, on_cpu: bool) -> list[int]:
        """Lists the possible micro-batches, the smallest first: divisors of a rank's share of the batch."""
        widest = max(3 * self.shape.hidden, self.shape.intermediate)
        in_chunks = find_objective(self.shape).logits_at_once is not None
        logits = 0 if in_chunks else self.predictions * self.shape.padded_vocabulary
        elements = max(self.length * widest, logits)  # of a sequence
        limit = CPU_PIECES // self.length if on_cpu else GPU_ELEMENTS // elements
        return [size for size in list_divisors(share) if size <= max(limit, 1)]

    def plan(self, sequences: int, on_cpu: bool) -> Activations:
        """Estimates the bytes of the activations of a micro-batch."""
        inputs = (self.shape, self.dtype, sequences, self.length, not on_cpu, self.predictions)
        return plan_activations(*inputs, tensor=self.tensor)

    def activations(self, sequences: int, on_cpu: bool) -> float:
        """Estimates the bytes that the activations of a micro-batch take under the recipe."""
        planned = self.plan(sequences, on_cpu)
        return planned.recomputed if self.recompute else planned.kept


def find_largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Finds the largest of the sorted sizes that fits, by bisection; None if none does."""
    count = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None
