"""Plans a run without training: `train.py --check` prints the plan.

Plain arithmetic without PyTorch, so that a login node without a GPU suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from data_prep.common.progress import duration
from data_prep.shards import Manifest
from pretraining.config.schedule import PhaseSchedule, build_schedules
from pretraining.config.settings import Dtype, Phase, Recipe, count_micro_batches
from pretraining.data.corpora import Corpora
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import configure_objective
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning import amount, cost, memory
from pretraining.planning.amount import SequenceStatistics
from pretraining.planning.cost import Cluster, MicroBatch, StepTime, StepTraffic

USEFUL_SHARE, USEFUL_RANGES = 0.5, {True: (0.132, 0.77), False: (0.194, 0.696)}
"""Share of the measured FLOP/s that a run reaches, if nothing better is known, and the lowest and highest median of the
contests of Cloze in benchmarks/results/throughput-*.json: True on CPUs, False on GPUs."""


@dataclass(frozen=True)
class Target:
    """A run to plan, and the ranks that train it."""

    recipe: Recipe
    corpora: Corpora | None
    dtype: Dtype
    room: memory.Room
    ranks: int
    """ranks that read different data: without those that share a model with them"""
    cluster: Cluster | None = None
    """speed of the ranks; None if unknown"""
    where: str = ""
    """the cluster in words"""
    flops_per_second: float | None = None
    """measured FLOP/s of a rank, from which the hours follow without a cluster"""
    note: str | None = None
    """what slows this machine down"""
    watts: float | None = None
    """power of a rank's GPU; None if unknown"""

    @property
    def manifest(self) -> Manifest | None:
        """What all corpora have in common; None without data."""
        return None if self.corpora is None else self.corpora.common

    @property
    def tensor(self) -> int:
        """Ranks that share a model."""
        return self.recipe.parallel.tensor

    @property
    def all_ranks(self) -> int:
        """All ranks, with those that share a model."""
        return self.ranks * self.tensor

    @property
    def zero(self) -> int:
        """The ZeRO stage; in 16 bits the engine takes ZeRO 1 in place of 0."""
        return max(self.recipe.parallel.zero, int(self.dtype != "fp32"))

    @property
    def stages(self) -> list[Target]:
        """The run under each ZeRO stage that there is: 0 only in fp32, no 3 for ranks that share a model."""
        stages = range(self.dtype != "fp32", 4 if self.tensor == 1 else 3)
        return [self.change_section("parallel", zero=zero) for zero in stages]

    @property
    def shape(self) -> Shape:
        """The sizes of the model in the phase in which it has most parameters."""
        return max(map(self.shape_in, self.recipe.phases), key=memory.count_rank_parameters)

    def shape_in(self, phase: Phase) -> Shape:
        """Computes the sizes of the model in a phase, with its heads."""
        return self.recipe.in_phase(phase).shape(self.manifest)

    def change_section(self, section: str, **values: Any) -> Target:
        """Returns the run with other values in a section of its recipe."""
        settings = getattr(self.recipe, section).model_copy(update=values)
        return replace(self, recipe=self.recipe.model_copy(update={section: settings}))

    def plan_memory(self) -> memory.Memory:
        """Plans a rank's memory, without activations."""
        parallel, options = self.recipe.parallel, self.recipe.deepspeed.get("zero_optimization")
        settings = (self.zero, parallel.offload, options, find_optimizer(self.recipe.optimizer), self.tensor)
        graphs = self.recipe.compute.graphs == "auto" and not self.room.on_cpu
        planned = memory.plan_memory(self.shape, self.dtype, self.ranks, *settings, graphs)
        if not parallel.same_bits or self.zero != 1:
            return planned
        parameters = memory.count_rank_parameters(self.shape)
        wider = 4.0 * parameters * (1 + 1 / self.ranks)  # sums have 8 bytes, and a rank's share of them is in fp32 too
        return planned._replace(gradients=planned.gradients + wider)

    def heaviest(self, phase: Phase) -> memory.Heaviest:
        compute, objective = self.recipe.compute, configure_objective(self.recipe.in_phase(phase).objective)
        parts = () if self.corpora is None else phase.mixture(self.corpora).corpora.parts
        manifests: list[Manifest | None] = [part.manifest for part in parts] or [None]
        most = max(amount.most_predictions(objective, phase.length, each) for each in manifests)
        settings = (self.dtype, phase.length, most, compute.checkpoint_activations, self.tensor)
        return memory.Heaviest(self.shape_in(phase), *settings)

    def bytes_needed(self, phase: Phase, micro_batch: int) -> float:
        """Estimates the bytes of a rank with a micro-batch of full sequences."""
        return self.plan_memory().device + self.heaviest(phase).activations(micro_batch, self.room.on_cpu)

    def sizes(self, phase: Phase) -> list[int]:
        """Lists the possible micro-batches."""
        share, heaviest = phase.batch // self.ranks, self.heaviest(phase)
        if not self.recipe.parallel.same_bits:
            return heaviest.sizes(share, self.room.on_cpu)
        return [size for size in heaviest.sizes(phase.batch, self.room.on_cpu) if size <= max(share, 1)]

    def fits(self, phase: Phase, micro_batch: int) -> bool:
        """Whether a micro-batch of full sequences probably fits into the memory of a rank."""
        return self.bytes_needed(phase, micro_batch) <= self.room.usable

    def find_work(
        self, phase: Phase, average: SequenceStatistics, micro_batch: int, tensor: int
    ) -> tuple[MicroBatch, StepTraffic]:
        """Finds the work of a micro-batch of average sequences, and the exchange of a step, on a rank, of `tensor` that
        share a model."""
        shape = self.shape_in(phase)
        recompute, traffic = self.recipe.compute.checkpoint_activations, find_optimizer(self.recipe.optimizer).traffic
        work = MicroBatch.from_average(shape, self.dtype, micro_batch, average, recompute, tensor)
        exchange = StepTraffic.for_stage(memory.count_rank_parameters(shape, tensor), self.zero, self.dtype, traffic)
        return work, exchange._replace(gradient_bytes=8) if self.recipe.parallel.same_bits else exchange


@dataclass(frozen=True)
class PhasePlan:
    """The figures of a phase with a micro-batch. Those that follow from the speed are None if it is unknown."""

    phase: Phase
    micro_batch: int
    accumulation: int
    """Micro-batches that a rank accumulates in a step."""
    schedule: PhaseSchedule
    statistics: SequenceStatistics
    steps: float | None
    seconds: float | None
    step: StepTime | None = None
    """Time of a step on the cluster, if the speed follows from it."""
    efficiency: float = 1.0
    """Throughput of a rank, as a share of that of a single rank."""

    @property
    def sequences(self) -> float | None:
        return None if self.steps is None else self.steps * self.phase.batch

    @property
    def pieces(self) -> float | None:
        """Real pieces, without padding."""
        return None if self.sequences is None else self.sequences * self.statistics.pieces

    @property
    def epochs(self) -> float | None:
        """Number of times that the text is read, each time from another duplicate if there are several."""
        examples = self.statistics.examples
        return None if self.sequences is None or not examples else self.sequences / examples

    @property
    def step_seconds(self) -> float:
        """Seconds of a step on a cluster."""
        assert self.step is not None
        return self.step.total


@dataclass(frozen=True)
class Plan:
    """A run with a micro-batch for every phase."""

    target: Target
    phases: tuple[PhasePlan, ...]
    """The phases in which at least one sequence fits."""

    @property
    def notes(self) -> Iterator[str]:
        """The assumptions: on the objective, the data, the speed, and the memory."""
        target, room, flops = self.target, self.target.room, self.target.flops_per_second
        for phase in {each.objective: each for each in target.recipe.phases}.values():
            yield from configure_objective(target.recipe.in_phase(phase).objective).list_notes(target.shape_in(phase))
        if target.corpora is not None and target.corpora.is_named:
            yield from amount.describe_mixtures(target.recipe, target.corpora, [phase.steps for phase in self.phases])
        if target.manifest is None:
            pieces = target.shape.vocabulary
            yield f"no --data: a vocabulary of {pieces:,} and full sequences are assumed; real text takes less time"
        if target.cluster is not None:
            yield f"hours for {target.where}: docs/planning.md"
            if self.fits:
                yield self.range
        elif flops is not None:
            tflops = f"{flops / 1e12:,.4g} TFLOP/s"
            measured = "{:.0%} to {:.0%} were measured".format(*USEFUL_RANGES[room.on_cpu])
            yield f"hours from a matrix throughput of {tflops} a rank, {USEFUL_SHARE:.0%} of it useful; {measured}"
        else:
            yield "hours: unknown, as the run will be on other machines; name the GPUs, as in --gpu h100-80"
        if target.note is not None:
            yield target.note
        yield "memory is an estimate for the model: fragments, buffers and the kernels' own memory come on top"
        where, found = f"a GPU of {room.size / 1e9:.0f} GB", "by trial"
        if room.on_cpu:
            process = f"{memory.PROCESS / 1e9:.1f} GB"
            yield f"the process takes some {process} besides the model: Python, PyTorch and its libraries"
            where, found = f"a CPU and {room.size / 1e9:.1f} GB a rank; for a GPU: --gpu h100-80", "anew"
        if any(planned.phase.micro_batch == "auto" for planned in self.phases):
            yield f'a micro-batch with ~ is "auto", an estimate for {where}; the run finds {found} what fits'

    @property
    def warning(self) -> str | None:
        """A warning if the text is read too often."""
        return amount.warn_of_disproportion(
            self.target.recipe, self.target.corpora, [each.steps for each in self.phases]
        )

    @property
    def fits(self) -> bool:
        """Whether every phase has a micro-batch that fits."""
        fitting = [each for each in self.phases if self.target.fits(each.phase, each.micro_batch)]
        return len(fitting) == len(self.target.recipe.phases)

    @property
    def memories(self) -> list[memory.Memory]:
        """A rank's memory under each ZeRO stage."""
        return [each.plan_memory() for each in self.target.stages]

    @property
    def activations(self) -> memory.Activations:
        """Activations of the phase that needs the most, with the usual number of predictions in full sequences."""
        target, found = self.target, []
        for each in self.phases:
            full = amount.measure_phase(target.recipe, each.phase, None)
            usual = replace(target.heaviest(each.phase), predictions=full.predictions)
            found.append(usual.plan(each.micro_batch, target.room.on_cpu))
        return max(found, key=lambda activations: activations.kept)

    @property
    def seconds(self) -> float | None:
        """Seconds of all phases; None if the speed is unknown."""
        return sum_known(phase.seconds for phase in self.phases)

    @property
    def span(self) -> tuple[float, float, float] | None:
        """Seconds of the planned steps: least, planned and most; None if unknown."""
        seconds, (least, most), steps = self.seconds, cost.PUBLISHED, [each.steps or 0.0 for each in self.phases]
        if seconds is None or not all(steps) or not self.fits:
            return None
        if self.target.cluster is None:
            quick, slow = (USEFUL_SHARE / share * seconds for share in USEFUL_RANGES[self.target.room.on_cpu][::-1])
            return quick, seconds, slow
        hosts = [self.change_host(launch).phases for launch in cost.LAUNCHES]
        quick, slow = (sum(n * each.step_seconds for n, each in zip(steps, host, strict=True)) for host in hosts)
        return min(least * seconds, quick), seconds, max(most * seconds, slow)

    @property
    def range(self) -> str:
        """Range of the time on the cluster, from comparisons of the model with published runs, and by the speed of the
        host if that may bound a step."""
        least, most = cost.PUBLISHED
        said = f"published runs of other software took {least:.2f} to {most:.2f} times the modelled time"
        quick, slow = (self.change_host(launch).step_seconds for launch in cost.LAUNCHES)
        if slow > quick:
            said += f"; steps take {quick:.3g} to {slow:.3g} s by the speed of the host, here {self.step_seconds:.3g}"
        if self.target.recipe.hours is not None:
            return f"the clock ends it, after as many fewer or more steps: {said}"
        low, _, high = map(duration, self.span or ())
        return f"from {low} to {high}: {said}"

    def change_host(self, launch: float) -> Plan:
        """Returns the plan for hosts that need these seconds for a layer."""
        assert self.target.cluster is not None
        target = replace(self.target, cluster=replace(self.target.cluster, launch=launch))
        phases = (plan_phase(target, number, each.micro_batch) for number, each in enumerate(self.phases))
        return Plan(target, tuple(phases))

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of every phase together, on the cluster."""
        return sum(phase.step_seconds for phase in self.phases)

    @property
    def efficiency(self) -> float:
        """Efficiency of all phases, weighted by their time."""
        return sum((phase.seconds or 0.0) * phase.efficiency for phase in self.phases) / (self.seconds or math.inf)


def build_plan(target: Target) -> Plan:
    """Plans a run with the micro-batches of its recipe; where that has "auto", with the largest that fits."""
    phases = []
    for number, phase in enumerate(target.recipe.phases):
        micro_batch = phase.micro_batch
        if micro_batch == "auto":  # 1 where none fits, which the run will report
            micro_batch = memory.find_largest_that_fits(target.sizes(phase), partial(target.fits, phase)) or 1
        phases.append(plan_phase(target, number, micro_batch))
    return Plan(target, tuple(phases))


def plan_phase(target: Target, number: int, micro_batch: int) -> PhasePlan:
    """Plans a phase with `micro_batch` sequences in a micro-batch.

    Its hours follow from the model of the cluster, or else from the FLOP/s of one rank and the share that is useful.
    """
    phase, schedule = target.recipe.phases[number], build_schedules(target.recipe)[number]
    statistics = amount.measure_phase(target.recipe, phase, target.corpora)
    speed, step, efficiency = None, None, 1.0
    uneven = target.recipe.parallel.same_bits
    accumulation = count_micro_batches(phase, target.ranks, number, micro_batch, uneven)
    if target.cluster is not None:
        own, whole = (target.find_work(phase, statistics, micro_batch, tensor) for tensor in (target.tensor, 1))
        step = cost.estimate_step(target.cluster, *own, accumulation)
        efficiency = cost.find_efficiency(target.cluster, *own, accumulation, whole)
        speed = 1 / step.total
    elif target.flops_per_second is not None:
        speed = target.all_ranks * target.flops_per_second * USEFUL_SHARE / statistics.flops / phase.batch
    steps: float | None = schedule.steps
    seconds = None if steps is None or speed is None else steps / speed
    if steps is None:  # by the clock
        steps, seconds = None if speed is None else schedule.length * speed, schedule.length
    return PhasePlan(phase, micro_batch, accumulation, schedule, statistics, steps, seconds, step, efficiency)


def sum_known(values: Iterable[float | None]) -> float | None:
    """Sums values; None if one of them is None."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
