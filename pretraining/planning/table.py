"""The plan of a run as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from data_prep.common.progress import duration
from pretraining.config.schedule import PhaseSchedule
from pretraining.planning.plan import Plan


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
    rates = [schedule.learning_rate(int(place), place) for place in places if place < schedule.length]
    last = schedule.learning_rate(int(schedule.length) - 1, schedule.length)
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
