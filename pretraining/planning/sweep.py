"""What to recommend for a cluster: every ZeRO stage with every micro-batch that fits, and the fastest of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining.config.conflicts import find_faults
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Dtype, Phase, Recipe, divisors
from pretraining.data.statistics import measure_sequences, most_predictions
from pretraining.model.shape import Shape
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning.cost import Cluster, StepTime
from pretraining.planning.fitting import Heaviest, Room
from pretraining.planning.memory import Memory, plan_memory
from pretraining.planning.plan import model_step
from pretraining.planning.site import MOST_RANKS

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Choice:
    """A phase with one micro-batch under one ZeRO stage."""

    phase: Phase
    micro_batch: int
    accumulation: int
    bytes_needed: float
    """of a rank's memory, with full sequences"""
    step: StepTime
    efficiency: float
    seconds: float
    """of the whole phase; one by the clock takes its time on any cluster"""
    steps: float

    @property
    def sequences_per_second(self) -> float:
        return self.phase.batch / self.step.total


@dataclass(frozen=True)
class Option:
    """A ZeRO stage: the fastest choice for every phase, or none where not even one sequence fits."""

    zero: int
    memory: Memory
    choices: tuple[Choice, ...]
    fits: bool
    """whether every phase has one"""

    @property
    def seconds(self) -> float:
        return sum(choice.seconds for choice in self.choices)

    @property
    def step_seconds(self) -> float:
        """Those of a step of every phase together."""
        return sum(choice.step.total for choice in self.choices)

    @property
    def efficiency(self) -> float:
        """That of all phases together, each for as long as it takes."""
        return sum(choice.seconds * choice.efficiency for choice in self.choices) / self.seconds


@dataclass(frozen=True)
class Target:
    """What is planned, and for which ranks."""

    recipe: Recipe
    manifest: Manifest | None
    dtype: Dtype
    cluster: Cluster
    room: Room

    @property
    def shape(self) -> Shape:
        return self.recipe.shape(self.manifest)

    def memory(self, zero: int) -> Memory:
        """What a rank needs besides activations."""
        options, offload = self.recipe.deepspeed.get("zero_optimization"), self.recipe.parallel.offload
        optimizer = find_optimizer(self.recipe.optimizer)
        return plan_memory(self.shape, self.dtype, self.cluster.ranks, zero, offload, options, optimizer)

    def heaviest(self, phase: Phase) -> Heaviest:
        shape, recompute = self.shape, self.recipe.compute.checkpoint_activations
        most = most_predictions(shape, phase.length, self.manifest)
        return Heaviest(shape, self.dtype, phase.length, most, recompute)

    def bytes_needed(self, phase: Phase, zero: int, micro_batch: int) -> float:
        """What a rank needs with so many full sequences."""
        return self.memory(zero).device + self.heaviest(phase).activations(micro_batch, self.room.on_cpu)

    def sizes(self, phase: Phase) -> list[int]:
        """The micro-batches that there can be."""
        return self.heaviest(phase).sizes(phase.batch // self.cluster.ranks, self.room.on_cpu)


def sweep(target: Target) -> list[Option]:
    """All ZeRO stages that the recipe could have, its own first."""
    return [
        find_option(target, target.recipe.parallel.zero),
        *(find_option(target, zero) for zero in other_stages(target)),
    ]


def other_stages(target: Target) -> Iterator[int]:
    """The ZeRO stages that the recipe could have besides its own."""
    for zero in STAGES:
        if zero != target.recipe.parallel.zero and not find_faults(with_stage(target.recipe, zero)):
            yield zero


def with_stage(recipe: Recipe, zero: int) -> Recipe:
    """The recipe under another ZeRO stage."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"zero": zero})})


def find_option(target: Target, zero: int) -> Option:
    """The fastest that fits under a ZeRO stage."""
    choices = [_fastest(target, number, zero) for number in range(len(target.recipe.phases))]
    found = tuple(choice for choice in choices if choice is not None)
    return Option(zero, target.memory(zero), found, len(found) == len(choices))


def _fastest(target: Target, number: int, zero: int) -> Choice | None:
    """The fastest micro-batch of a phase that fits, of equals the largest."""
    phase = target.recipe.phases[number]
    sizes = [size for size in target.sizes(phase) if target.bytes_needed(phase, zero, size) <= target.room.usable]
    choices = [choose(target, number, zero, size) for size in sizes]
    return min(choices, key=lambda choice: (round(choice.step.total, 9), -choice.micro_batch), default=None)


def choose(target: Target, number: int, zero: int, micro_batch: int) -> Choice:
    """One micro-batch, with its time."""
    recipe, phase = target.recipe, target.recipe.phases[number]
    schedule = build_schedules(recipe)[number]
    accumulation = phase.batch // (micro_batch * target.cluster.ranks)
    statistics = measure_sequences(target.shape, phase.length, target.manifest)
    step, share = model_step(
        target.cluster, recipe, target.shape, target.dtype, statistics, micro_batch, accumulation, zero
    )
    steps = schedule.steps if schedule.steps is not None else schedule.length / step.total
    needed = target.bytes_needed(phase, zero, micro_batch)
    return Choice(phase, micro_batch, accumulation, needed, step, share, steps * step.total, steps)


@dataclass(frozen=True)
class Scaled:
    """The recipe's own stage on another number of nodes."""

    ranks: int
    seconds: float
    efficiency: float
    """of all phases together"""


def scale(target: Target) -> list[Scaled]:
    """The same run on one rank of the cluster, on a node, on 2 of them, on 4 and so on, and on the cluster itself."""
    own = target.cluster
    sizes = {(1, 1), (own.nodes, own.per_node)}
    sizes |= {(2**power, own.per_node) for power in range(14) if 2**power * own.per_node <= MOST_RANKS}
    found = []
    for nodes, per_node in sorted(sizes, key=math.prod):
        other = replace(target, cluster=replace(own, nodes=nodes, per_node=per_node))
        if any(phase.batch % other.cluster.ranks for phase in target.recipe.phases):
            continue
        option = find_option(other, target.recipe.parallel.zero)
        if option.fits:
            found.append(Scaled(other.cluster.ranks, option.seconds, option.efficiency))
    return found


def check_batches(recipe: Recipe, nodes: int, per_node: int) -> None:
    """UserError where the batches of a recipe do not divide among so many GPUs: it says which numbers of nodes do."""
    ranks = nodes * per_node
    for phase in recipe.phases:
        if phase.batch % ranks:
            raise UserError(
                f"{ranks:,} GPUs: phase {phase.name} has a batch of {phase.batch:,}, which does not divide among them; "
                + _nodes_that_divide(recipe, nodes, per_node)
            )


def _nodes_that_divide(recipe: Recipe, nodes: int, per_node: int) -> str:
    """The numbers of nodes on either side that all batches divide among."""
    fitting = [
        count
        for count in divisors(recipe.phases[0].batch)
        if all(phase.batch % (count * per_node) == 0 for phase in recipe.phases)
    ]
    below = max((count for count in fitting if count < nodes), default=None)
    above = min((count for count in fitting if count > nodes and count * per_node <= MOST_RANKS), default=None)
    found = [f"--nodes {count}" for count in (below, above) if count is not None]
    if not found:
        return f"no number of nodes with {per_node} GPUs fits; take another --gpus-per-node"
    return f"{' or '.join(found)} would, or another batch (--phases.N.batch)"
