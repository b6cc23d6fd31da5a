"""The plan of a run as a person reads it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration
from pretraining.config.schedule import PhaseSchedule
from pretraining.objectives.declaration import num_parameters
from pretraining.planning.plan import Plan, known_sum

UNKNOWN = "?"


def render_plan(plan: Plan) -> RenderableType:
    """Lays out a plan: the model, the phases, the memory, and what was assumed."""
    notes = [Padding(f"- {note}", (0, 0)) for note in plan.notes]
    warning: list[RenderableType] = [] if plan.warning is None else ["", Text(f"warning: {plan.warning}")]
    return Group(_model_line(plan), "", _phase_table(plan), "", _memory_table(plan), "", *notes, *warning)


def _model_line(plan: Plan) -> str:
    shape, s = plan.shape, "" if plan.ranks == 1 else "s"
    return (
        f"{num_parameters(shape) / 1e6:,.1f}M parameters: {shape.layers} layers of {shape.hidden}, "
        f"{shape.heads} heads, vocabulary {shape.vocabulary:,}; {plan.dtype} on {plan.ranks} rank{s}, "
        f"ZeRO {plan.recipe.parallel.zero}, {plan.recipe.optimizer.name}"
    )


def _phase_table(plan: Plan) -> Table:
    sizes = "batch = micro x accumulated x ranks"
    table = plain_table("phase", "length", sizes, "steps", "learning rate", "pieces", "a sequence", "epochs", "time")
    for planned in plan.phases:
        phase, about = planned.phase, "~" if planned.phase.micro_batch == "auto" else ""
        table.add_row(
            phase.name,
            _length(phase.length, planned.statistics.stored),
            f"{phase.batch:,} = {about}{planned.micro_batch} x {about}{planned.accumulation} x {plan.ranks}",
            _number(planned.steps),
            _rates(planned.schedule),
            _number(planned.pieces),
            f"{planned.statistics.pieces:.1f}",
            UNKNOWN if planned.epochs is None else f"{planned.epochs:,.2f}",
            _duration(planned.seconds),
        )
    if len(plan.phases) > 1:
        steps = _number(known_sum(planned.steps for planned in plan.phases))
        pieces = _number(known_sum(planned.pieces for planned in plan.phases))
        table.add_row("in all", "", "", steps, "", pieces, "", "", _duration(plan.seconds))
    return table


def _length(length: int, stored: int) -> str:
    return str(length) if length == stored else f"{length} of {stored}"  # cut out of longer examples


def _memory_table(plan: Plan) -> Table:
    title = "memory of a rank, GB, an estimate"
    table = plain_table(title, "weights", "gradients", "optimizer", "on the host", "+ activations", "recomputed")
    for memory in plan.memory:
        name = f"ZeRO {memory.zero}" + (" (this recipe)" if memory.zero == plan.recipe.parallel.zero else "")
        kept, recomputed = (memory.device + size for size in (plan.activations.kept, plan.activations.recomputed))
        amounts = (memory.weights, memory.gradients, memory.optimizer, memory.host, kept, recomputed)
        table.add_row(name, *map(_gigabytes, amounts))
    return table


def plain_table(first: str, *others: str) -> Table:
    """An empty table without lines: names to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rates(schedule: PhaseSchedule) -> str:
    """The first, the highest and the last learning rate of a phase."""
    by_clock = schedule.schedule.by_clock
    places = [place * schedule.length / 1000 for place in range(1001)]
    top = schedule.schedule.warmup - schedule.begin
    places += [top - (0 if by_clock else 1)] if 0 < top <= schedule.length else []
    rates = [schedule.learning_rate(int(place), place) for place in places if place < schedule.length]
    last = schedule.learning_rate(int(schedule.length) - 1, schedule.length)
    return f"{rates[0]:.2g} .. {max(rates):.2g} .. {last:.2g}"


def _number(value: float | None) -> str:
    """A number with a thousand separator, or in millions and billions."""
    if value is None:
        return UNKNOWN
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= 10 * unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e10 else f"{size / 1e9:.2f}"
