"""What a run will be, worked out without training: `train.py --check` prints it.

Arithmetic alone, in plain Python: a login node without a GPU will do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from data_prep.common.errors import UserError
from data_prep.common.progress import duration
from data_prep.shards import Manifest
from pretraining.config.overrides import load_recipe
from pretraining.config.schedule import PhaseSchedule, build_schedules
from pretraining.config.settings import Phase, Recipe, micro_batches
from pretraining.model.shape import Shape

Dtype = Literal["bf16", "fp16", "fp32"]
VOCABULARY = 30522
"""of the published models; assumed where there is no data"""
PREDICTED = 0.15
"""share of the pieces that is predicted, where there is no data"""
USEFUL_SHARE = 0.5
"""of the measured matrix rate: what a run reaches, where nothing better is known"""


@dataclass(frozen=True)
class Text:
    """What a sequence of a length is on average."""

    examples: float
    """of one duplicate; 0 where there is no data"""
    duplicates: int
    pieces: float
    """of a sequence, real"""
    predictions: float
    flops: float
    """of a sequence, forward and backward"""


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


def load_recipe_and_data(
    path: Path,
    overrides: Sequence[str] = (),
    data: Path | None = None,
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> tuple[Recipe, Manifest | None]:
    """Both, checked against each other; every fault of them is reported at once."""
    manifest, faults = None, []
    if data is not None:
        try:
            manifest = Manifest.read(data)
        except UserError as error:
            faults.append(f"--data {error}")
    lengths = {shards.length for shards in manifest.sets() if not shards.validation} if manifest else None
    try:
        recipe = load_recipe(path, overrides, ranks=ranks, device=device, lengths=lengths)
    except UserError as error:
        raise UserError("\n".join([str(error), *faults])) from None
    if faults:
        raise UserError("\n".join(faults))
    return recipe, manifest


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
        rate = None  # sequences a second
        if pieces_per_second is not None:
            rate = pieces_per_second / text.pieces
        elif flops_per_second is not None:
            rate = ranks * flops_per_second * useful_share / text.flops
        steps, seconds = _duration(phase, schedule, rate)
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


def _duration(phase: Phase, schedule: PhaseSchedule, rate: float | None) -> tuple[float | None, float | None]:
    """Steps and seconds of a phase, as far as sequences a second are known."""
    if schedule.steps is None:
        return (None if rate is None else schedule.length * rate / phase.batch), schedule.length
    return schedule.steps, (None if rate is None else schedule.steps * phase.batch / rate)


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


def measure_text(shape: Shape, length: int, manifest: Manifest | None) -> Text:
    """From the counts of the manifest; without one, full sequences."""
    sets = [] if manifest is None else [each for each in manifest.content["sets"] if _trains(each, length)]
    examples = sum(each["examples"] for each in sets)
    if not examples:
        predictions = PREDICTED * length
        flops = shape.flops([length], 0) + shape.flops([], 1) * predictions
        return Text(0.0, 0, length, predictions, flops)
    counts = [sum(column) for column in zip(*(each["histogram"] for each in sets), strict=True)]
    predictions = sum(each["masked"] for each in sets)
    flops = sum(count * shape.flops([size], 0) for size, count in enumerate(counts) if count)
    return Text(
        examples=examples / len(sets),
        duplicates=len(sets),
        pieces=sum(each["pieces"] for each in sets) / examples,
        predictions=predictions / examples,
        flops=(flops + shape.flops([], 1) * predictions) / examples,
    )


def _trains(content: dict[str, Any], length: int) -> bool:
    return bool(content["length"] == length and not content["validation"])


# Memory. Per parameter, in bytes, with 16-bit weights (in fp32: 4 instead of 2, and no gradients but those in fp32):
#   weights     2      divided by ZeRO 3, which holds up to `stage3_max_live_parameters` of them whole at a time
#   gradients   2 + 4  those of a micro-batch, and the fp32 ones that they are added to; both divided by ZeRO 2 and 3,
#                      the first in buckets of `reduce_bucket_size`. In bf16, ZeRO 1 adds each as soon as it is there
#   optimizer   12     fp32 weights and two fp32 averages; divided by ZeRO 1, 2 and 3
# In fp32 without ZeRO the weights are the fp32 weights; ZeRO keeps a copy of its part all the same. In 16 bits without
# ZeRO the engine takes ZeRO 1, since DeepSpeed would add the gradients up in 16 bits.

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


def render_plan(plan: Plan) -> RenderableType:
    """The plan as a person reads it."""
    return Group(_model_line(plan), "", _phase_table(plan), "", _memory_table(plan), "", *_note_lines(plan))


def _model_line(plan: Plan) -> str:
    s, s_ranks = plan.shape, "" if plan.ranks == 1 else "s"
    return (
        f"{plan.parameters / 1e6:,.1f}M parameters: {s.layers} layers of {s.hidden}, {s.heads} heads, "
        f"vocabulary {s.vocabulary:,}; {plan.dtype} on {plan.ranks} rank{s_ranks}, ZeRO {plan.recipe.parallel.zero}, "
        f"{plan.recipe.optimizer.name}"
    )


def _phase_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("phase", "length", "batch = micro x accumulated x ranks", "steps", "learning rate", "pieces"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for name in ("a sequence", "epochs", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in plan.phases:
        phase = each.phase
        table.add_row(
            phase.name,
            str(phase.length),
            f"{phase.batch:,} = {phase.micro_batch} x {each.accumulation} x {plan.ranks}",
            _number(each.steps),
            _rates(each.schedule),
            _number(each.pieces),
            f"{each.text.pieces:.1f}",
            "?" if each.epochs is None else f"{each.epochs:,.2f}",
            "?" if each.seconds is None else duration(each.seconds),
        )
    if len(plan.phases) > 1:
        steps, pieces = [each.steps for each in plan.phases], [each.pieces for each in plan.phases]
        time = "?" if plan.seconds is None else duration(plan.seconds)
        table.add_row("in all", "", "", _number(_sum(steps)), "", _number(_sum(pieces)), "", "", time)
    return table


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _rates(schedule: PhaseSchedule) -> str:
    """First, highest and last rate of a phase."""
    by_clock = schedule.schedule.by_clock
    places = [place * schedule.length / 1000 for place in range(1001)]
    top = schedule.schedule.warmup - schedule.begin
    places += [top - (0 if by_clock else 1)] if 0 < top <= schedule.length else []
    rates = [schedule.rate(int(place), place) for place in places if place < schedule.length]
    last = schedule.rate(int(schedule.length) - 1, schedule.length)
    return f"{rates[0]:.2g} .. {max(rates):.2g} .. {last:.2g}"


def _number(value: float | None) -> str:
    """With a thousand separator, or in millions and billions."""
    if value is None:
        return "?"
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= 10 * unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f}"


def _memory_table(plan: Plan) -> Table:
    title = "memory of a rank, GB, an estimate"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (title, "weights", "gradients", "optimizer", "on the host", "+ activations"):
        table.add_column(name, justify="left" if name == title else "right", no_wrap=True)
    table.add_column("recomputed", justify="right", no_wrap=True)
    kept, recomputed = plan.activations.kept, plan.activations.checkpointed
    for each in plan.memory:
        name = f"ZeRO {each.zero}" + (" (this recipe)" if each.zero == plan.recipe.parallel.zero else "")
        amounts = (each.weights, each.gradients, each.optimizer, each.host)
        table.add_row(name, *map(_gigabytes, (*amounts, each.total + kept, each.total + recomputed)))
    return table


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e10 else f"{size / 1e9:.2f}"


def _note_lines(plan: Plan) -> list[RenderableType]:
    return [Padding(f"- {note}", (0, 0)) for note in plan.notes]
