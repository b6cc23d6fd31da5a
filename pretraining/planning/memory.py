"""How much memory a rank needs under each ZeRO stage: arithmetic, an estimate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pretraining.config.settings import Dtype, Phase, Recipe
from pretraining.data.statistics import PREDICTED
from pretraining.model.shape import Shape


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank under a ZeRO stage, without activations: an estimate."""

    zero: int
    weights: float
    gradients: float
    optimizer: float
    """fp32 weights and both averages"""
    host: float = 0.0
    """of these, what is offloaded to the host's memory"""

    @property
    def total(self) -> float:
        """On the device."""
        return self.weights + self.gradients + self.optimizer - self.host


@dataclass(frozen=True)
class Activations:
    """Bytes of the largest micro-batch, all its sequences full: an estimate."""

    phase: str
    kept: float
    """all layers' activations kept for the backward pass"""
    checkpointed: float
    """compute.checkpoint_activations: computed again, layer by layer"""


LIVE, BUCKET = 1e9, 5e8  # parameters: DeepSpeed's defaults


def plan_memory(recipe: Recipe, shape: Shape, dtype: Dtype, ranks: int, zero: int) -> Memory:
    """Of one rank under a ZeRO stage; with the recipe's offload where the stage has it."""
    size, stage = (4, zero) if dtype == "fp32" else (2, max(zero, 1))
    parameters = dataclasses.replace(shape, vocabulary=shape.padded_vocabulary).num_parameters()
    part = parameters / ranks
    live = min(parameters, _given(recipe, "stage3_max_live_parameters", LIVE))
    bucket = min(parameters, _given(recipe, "reduce_bucket_size", BUCKET))
    weights = size * (parameters if stage < 3 else part + live)
    optimizer = (12 * part) if stage else 8 * parameters
    if stage > 1:
        gradients, accumulated = size * bucket, 4 * part
    else:
        gradients, accumulated = 2 * parameters if dtype == "fp16" else 0, 4 * parameters
    host = 0.0
    if recipe.parallel.offload != "none" and zero:
        host = optimizer + (accumulated if stage > 1 else 0)
    if recipe.parallel.offload == "all" and stage == 3:
        host += size * part
    return Memory(zero, weights, gradients + accumulated, optimizer, host)


def _given(recipe: Recipe, name: str, default: float) -> float:
    """A number among the recipe's own settings of DeepSpeed's ZeRO."""
    value = recipe.deepspeed.get("zero_optimization", {}).get(name)
    return float(value) if isinstance(value, int | float) else default


def plan_activations(shape: Shape, dtype: Dtype, phase: Phase) -> Activations:
    """Of a micro-batch of full sequences, with fused attention, which keeps no probabilities."""
    size = 4 if dtype == "fp32" else 2
    pieces, h = phase.micro_batch * phase.length, shape.hidden
    # kept of a layer: its input, q k v, attention's result, the sum before and the output of the first norm, the sum
    # before the second, and the inner layer before and after GELU; and a byte for each of the two dropouts
    layer = pieces * (size * (8 * h + 2 * shape.intermediate) + 2 * h)
    embeddings = pieces * (3 * size * h + h)
    predictions = PREDICTED * pieces
    logits = predictions * shape.vocabulary * (size + 4 + 4)  # as computed, in fp32, and their gradients
    heads = predictions * 4 * size * h + logits
    return Activations(
        phase=phase.name,
        kept=embeddings + shape.layers * layer + heads,
        checkpointed=embeddings + shape.layers * pieces * size * h + max(layer, heads),
    )
