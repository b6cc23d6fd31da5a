"""What a run will be, worked out without training: `train.py --check` prints it.

This is arithmetic alone, in plain Python: a login node without a GPU will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from data_prep.shards import Manifest
from pretraining.config.schedule import PhaseSchedule, build_schedules
from pretraining.config.settings import VOCABULARY, Dtype, Phase, Recipe, count_micro_batches
from pretraining.data.statistics import SequenceStatistics, measure_sequences, most_predictions
from pretraining.model.shape import Shape
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning.amount import disproportion
from pretraining.planning.cost import Cluster, MicroBatch, Sharing, StepTime, efficiency, step_time
from pretraining.planning.fitting import Heaviest, Room, fits_by_estimate, largest_that_fits
from pretraining.planning.memory import Activations, Memory, count_parameters, plan_activations, plan_memory

USEFUL_SHARE = 0.5
"""How much of the measured matrix rate a run reaches, where nothing better is known."""


@dataclass(frozen=True)
class PhasePlan:
    """One phase, in numbers. What follows from the speed is None where that is not known."""

    phase: Phase
    micro_batch: int
    """The recipe's own, or an estimate of what fits where that is "auto"."""
    accumulation: int
    """Micro-batches that a rank accumulates in a step."""
    schedule: PhaseSchedule
    statistics: SequenceStatistics
    steps: float | None
    seconds: float | None
    step: StepTime | None = None
    """Where the time of a step goes, on a cluster that is known."""
    efficiency: float | None = None
    """What a rank of it gets done, as a share of what one alone does."""

    @property
    def sequences(self) -> float | None:
        return None if self.steps is None else self.steps * self.phase.batch

    @property
    def pieces(self) -> float | None:
        """Real pieces, without padding."""
        return None if self.sequences is None else self.sequences * self.statistics.pieces

    @property
    def flops(self) -> float | None:
        return None if self.sequences is None else self.sequences * self.statistics.flops

    @property
    def epochs(self) -> float | None:
        """How often the text is read; another duplicate of it every time, until all were read."""
        examples = self.statistics.examples
        return None if self.sequences is None or not examples else self.sequences / examples


@dataclass(frozen=True)
class Plan:
    """All that `--check` says."""

    shape: Shape
    ranks: int
    dtype: Dtype
    recipe: Recipe
    phases: tuple[PhasePlan, ...]
    memory: tuple[Memory, ...]
    """A rank's memory under ZeRO 0, 1, 2 and 3."""
    activations: Activations
    """Those of the phase that needs most."""
    notes: tuple[str, ...]
    """What was assumed."""
    warning: str | None = None
    """What is out of proportion."""

    @property
    def seconds(self) -> float | None:
        """What all phases take; None where the speed is not known."""
        return known_sum(phase.seconds for phase in self.phases)


def build_plan(
    recipe: Recipe,
    *,
    ranks: int,
    dtype: Dtype,
    room: Room,
    manifest: Manifest | None = None,
    pieces_per_second: float | None = None,
    flops_per_second: float | None = None,
    useful_share: float = USEFUL_SHARE,
    cluster: Cluster | None = None,
    assumed: Sequence[str] = (),
) -> Plan:
    """Plans a run.

    Hours follow from the real pieces a second of all ranks, or else from the model of the cluster, or else from the
    matrix rate of one rank and the share of it that useful operations reach. `assumed`: by the caller, for the notes.
    """
    shape = recipe.shape(manifest)
    offload, zero_options = recipe.parallel.offload, recipe.deepspeed.get("zero_optimization")
    optimizer = find_optimizer(recipe.optimizer)
    memory = tuple(plan_memory(shape, dtype, ranks, zero, offload, zero_options, optimizer) for zero in range(4))
    phases = []
    for number, (phase, schedule) in enumerate(zip(recipe.phases, build_schedules(recipe), strict=True)):
        statistics = measure_sequences(shape, phase.length, manifest)
        micro_batch = phase.micro_batch
        if micro_batch == "auto":
            most = most_predictions(shape, phase.length, manifest)
            heaviest = Heaviest(shape, dtype, phase.length, most, recipe.compute.checkpoint_activations)
            micro_batch = _estimate(heaviest, memory[recipe.parallel.zero], room, phase.batch // ranks)
        accumulation = count_micro_batches(phase, ranks, number, micro_batch)
        modelled: tuple[StepTime, float] | tuple[()] = ()
        if cluster is not None and pieces_per_second is None:
            modelled = model_step(cluster, recipe, shape, dtype, statistics, micro_batch, accumulation)
        speed = 1 / modelled[0].total if modelled else None
        if pieces_per_second is not None:
            speed = pieces_per_second / statistics.pieces / phase.batch
        elif flops_per_second is not None and not modelled:
            speed = ranks * flops_per_second * useful_share / statistics.flops / phase.batch
        steps, seconds = _steps_and_seconds(schedule, speed)
        phases.append(PhasePlan(phase, micro_batch, accumulation, schedule, statistics, steps, seconds, *modelled))
    rate = None if cluster else flops_per_second
    notes = (*_notes(manifest, pieces_per_second, rate, useful_share, assumed), *_guesses(phases, room))
    activations = _most_activations(phases, shape, dtype, room)
    warning = disproportion(recipe, manifest, [phase.steps for phase in phases])
    return Plan(shape, ranks, dtype, recipe, tuple(phases), memory, activations, notes, warning)


def _most_activations(phases: Iterable[PhasePlan], shape: Shape, dtype: Dtype, room: Room) -> Activations:
    """Those of the phase that needs most; a CPU's attention keeps its probabilities."""
    needed = (
        plan_activations(shape, dtype, each.micro_batch, each.phase.length, fused_attention=not room.on_cpu)
        for each in phases
    )
    return max(needed, key=lambda activations: activations.kept)


def model_step(
    cluster: Cluster,
    recipe: Recipe,
    shape: Shape,
    dtype: Dtype,
    statistics: SequenceStatistics,
    micro_batch: int,
    accumulation: int,
    zero: int | None = None,
) -> tuple[StepTime, float]:
    """Models a step of a phase on a cluster, under the recipe's ZeRO stage or another: its time, and its efficiency."""
    recompute = recipe.compute.checkpoint_activations
    work = MicroBatch.of(
        shape, dtype, micro_batch, statistics.pieces, statistics.flops, recompute, cluster.device.runs_ahead
    )
    stage = recipe.parallel.zero if zero is None else zero
    sharing = Sharing.of(count_parameters(shape), stage, dtype, find_optimizer(recipe.optimizer).traffic)
    return step_time(cluster, work, sharing, accumulation), efficiency(cluster, work, sharing, accumulation)


def _estimate(heaviest: Heaviest, memory: Memory, room: Room, share: int) -> int:
    """The largest micro-batch that probably fits; one sequence where not even that does, which the run will say."""
    sizes = heaviest.sizes(share, room.on_cpu)
    return largest_that_fits(sizes, lambda size: fits_by_estimate(heaviest, memory, room, size)) or 1


def _guesses(phases: Iterable[PhasePlan], room: Room) -> Iterator[str]:
    """What was estimated in place of the micro-batches that a run finds, and for which memory."""
    if room.on_cpu:
        yield "activations are those of a CPU, whose attention keeps its probabilities"
    if any(planned.phase.micro_batch == "auto" for planned in phases):
        where, found = f"a GPU of {room.size / 1e9:.0f} GB", "by trial"
        if room.on_cpu:
            where, found = f"a CPU and {room.size / 1e9:.1f} GB a rank; for a GPU: --gpu h100-80", "anew"
        yield f'a micro-batch with ~ is "auto", an estimate for {where}; the run finds {found} what fits'


def _steps_and_seconds(schedule: PhaseSchedule, steps_per_second: float | None) -> tuple[float | None, float | None]:
    """How long a phase is; what is not given follows from the speed, as far as that is known."""
    if schedule.steps is None:
        return None if steps_per_second is None else schedule.length * steps_per_second, schedule.length
    return schedule.steps, None if steps_per_second is None else schedule.steps / steps_per_second


def _notes(
    manifest: Manifest | None,
    pieces_per_second: float | None,
    flops_per_second: float | None,
    useful_share: float,
    assumed: Sequence[str],
) -> Iterator[str]:
    if manifest is None:
        yield f"no --data: a vocabulary of {VOCABULARY:,} and full sequences are assumed; real text fills less of them"
    if pieces_per_second is not None:
        yield f"hours from {pieces_per_second:,.0f} real pieces a second on all ranks, as given"
    elif flops_per_second is not None:
        rate = f"{flops_per_second / 1e12:,.3g}" if flops_per_second < 1e15 else f"{flops_per_second / 1e12:,.0f}"
        yield f"hours from a matrix rate of {rate} TFLOP/s a rank, {100 * useful_share:.0f}% of it useful"
    elif not assumed:
        yield "hours: give the throughput, --pieces-per-second"
    yield from assumed
    yield "memory is an estimate: fragments, buffers and the kernels' own memory come on top"


def known_sum(values: Iterable[float | None]) -> float | None:
    """The sum; None where one of the values is not known."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
