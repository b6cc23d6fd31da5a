"""What a run will be, worked out without training: `train.py --check` prints it.

Arithmetic alone, in plain Python: a login node without a GPU will do.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_prep.shards import Manifest
from pretraining.config.schedule import PhaseSchedule, build_schedules
from pretraining.config.settings import Dtype, Phase, Recipe, micro_batches
from pretraining.data.statistics import Text, measure_text
from pretraining.model.shape import Shape
from pretraining.planning.memory import Activations, Memory, plan_activations, plan_memory

VOCABULARY = 30522
"""of the published models; assumed where there is no data"""
USEFUL_SHARE = 0.5
"""of the measured matrix rate: what a run reaches, where nothing better is known"""


@dataclass(frozen=True)
class PhasePlan:
    """One phase, in numbers."""

    phase: Phase
    accumulation: int
    """micro-batches of a rank in a step"""
    schedule: PhaseSchedule
    text: Text
    steps: float | None
    """None where the clock decides and the speed is not known"""
    seconds: float | None
    """None where the speed is not known"""

    @property
    def sequences(self) -> float | None:
        return None if self.steps is None else self.steps * self.phase.batch

    @property
    def pieces(self) -> float | None:
        """Real ones."""
        return None if self.sequences is None else self.sequences * self.text.pieces

    @property
    def flops(self) -> float | None:
        return None if self.sequences is None else self.sequences * self.text.flops

    @property
    def epochs(self) -> float | None:
        """Readings of the text; each is of another duplicate until all were read."""
        return None if self.sequences is None or not self.text.examples else self.sequences / self.text.examples


@dataclass(frozen=True)
class Plan:
    """All that `--check` says."""

    shape: Shape
    parameters: int
    ranks: int
    dtype: Dtype
    recipe: Recipe
    phases: tuple[PhasePlan, ...]
    memory: tuple[Memory, ...]
    """for each ZeRO stage"""
    activations: Activations
    notes: tuple[str, ...]
    """what was assumed"""

    @property
    def seconds(self) -> float | None:
        """Of all phases."""
        known = [phase.seconds for phase in self.phases if phase.seconds is not None]
        return sum(known) if len(known) == len(self.phases) else None


def build_plan(
    recipe: Recipe,
    *,
    ranks: int,
    dtype: Dtype,
    manifest: Manifest | None = None,
    pieces_per_second: float | None = None,
    flops_per_second: float | None = None,
    useful_share: float = USEFUL_SHARE,
) -> Plan:
    """The plan of a run.

    Hours follow from the throughput of all ranks in real pieces a second, or else from the matrix rate of one rank and
    the share of it that useful operations reach.
    """
    shape = recipe.model.shape(manifest.vocabulary_size if manifest else VOCABULARY)
    phases = []
    for number, (phase, schedule) in enumerate(zip(recipe.phases, build_schedules(recipe), strict=True)):
        text = measure_text(shape, phase.length, manifest)
        sequences_per_second = None
        if pieces_per_second is not None:
            sequences_per_second = pieces_per_second / text.pieces
        elif flops_per_second is not None:
            sequences_per_second = ranks * flops_per_second * useful_share / text.flops
        steps, seconds = _duration(phase, schedule, sequences_per_second)
        phases.append(PhasePlan(phase, micro_batches(phase, ranks, number), schedule, text, steps, seconds))
    return Plan(
        shape=shape,
        parameters=shape.num_parameters(),
        ranks=ranks,
        dtype=dtype,
        recipe=recipe,
        phases=tuple(phases),
        memory=tuple(plan_memory(recipe, shape, dtype, ranks, zero) for zero in range(4)),
        activations=max((plan_activations(shape, dtype, phase) for phase in recipe.phases), key=lambda each: each.kept),
        notes=tuple(_notes(manifest, pieces_per_second, flops_per_second, useful_share)),
    )


def _duration(
    phase: Phase, schedule: PhaseSchedule, sequences_per_second: float | None
) -> tuple[float | None, float | None]:
    """Steps and seconds of a phase, as far as sequences a second are known."""
    if schedule.steps is None:
        return (
            None if sequences_per_second is None else schedule.length * sequences_per_second / phase.batch
        ), schedule.length
    return schedule.steps, (
        None if sequences_per_second is None else schedule.steps * phase.batch / sequences_per_second
    )


def _notes(
    manifest: Manifest | None, pieces_per_second: float | None, flops_per_second: float | None, useful_share: float
) -> list[str]:
    notes = []
    if manifest is None:
        notes.append(
            f"no --data: a vocabulary of {VOCABULARY:,} and full sequences are assumed; real text fills less of them"
        )
    if pieces_per_second is not None:
        notes.append(f"hours from {pieces_per_second:,.0f} real pieces a second on all ranks, as given")
    elif flops_per_second is not None:
        rate = f"{flops_per_second / 1e12:,.3g}" if flops_per_second < 1e15 else f"{flops_per_second / 1e12:,.0f}"
        notes.append(f"hours from a matrix rate of {rate} TFLOP/s a rank, {100 * useful_share:.0f}% of it useful")
    else:
        notes.append("hours: give the throughput, --pieces-per-second")
    notes.append("memory is an estimate: fragments, buffers and the kernels' own memory come on top")
    return notes


# Memory. Per parameter, in bytes, with 16-bit weights (in fp32: 4 instead of 2, and no gradients but those in fp32):
#   weights     2      divided by ZeRO 3, which holds up to `stage3_max_live_parameters` of them whole at a time
#   gradients   2 + 4  those of a micro-batch, and the fp32 ones that they are added to; both divided by ZeRO 2 and 3,
#                      the first in buckets of `reduce_bucket_size`. In bf16, ZeRO 1 adds each as soon as it is there
#   optimizer   12     fp32 weights and two fp32 averages; divided by ZeRO 1, 2 and 3
# In fp32 without ZeRO the weights are the fp32 weights; ZeRO keeps a copy of its part all the same. In 16 bits without
# ZeRO the engine takes ZeRO 1, since DeepSpeed would add the gradients up in 16 bits.
