"""Renders plans as tables: of a run, of the ZeRO stages on a cluster, and of clusters of other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration
from pretraining.config.schedule import PhaseSchedule
from pretraining.objectives.declaration import num_parameters
from pretraining.planning.plan import PhasePlan, Plan, Target, sum_known

UNKNOWN = "?"
PARTS = ("compute", "sums", "stragglers", "joining", "optimizer", "data")
"""The parts of a step's time."""
TOLD = 0.03
"""Relative difference of times that the model can resolve: about its mean error."""


def render_plan(plan: Plan) -> RenderableType:
    """Renders the plan of a run: the model, the phases, the memory, and the assumptions."""
    notes = [Padding(f"- {note}", (0, 0)) for note in plan.notes]
    warning: list[RenderableType] = [] if plan.warning is None else ["", Text(f"warning: {plan.warning}")]
    return Group(_describe_model(plan.target), "", _phase_table(plan), "", _memory_table(plan), "", *notes, *warning)


def render_cluster(plans: Sequence[Plan], hour_price: float | None) -> RenderableType:
    """Renders the plans of a cluster, first that of the recipe's ZeRO stage: memory, and the parts of a step's time."""
    own, parts = plans[0], list[RenderableType]([_stage_table(plans, hour_price), ""])
    if own.fits:
        parts += [_memory_table(own), "", f"{_name_stage(own.target, own.target.zero)}: {own.range}", ""]
        parts += [_step_table(own), "", *_advise(plans), ""]
    return Group(*parts)


def render_scale(plans: Iterable[Plan], hour_price: float | None) -> RenderableType:
    """Renders the time and cost of a run on other numbers of GPUs."""
    rows = []
    for plan in plans:
        time, price = _format_duration(plan.seconds), _format_price(plan, hour_price)
        rows.append([f"{plan.target.all_ranks:,}", f"{plan.efficiency:.1%}", time, price])
    return _make_table(["GPUs", "efficiency", "time", "cost"], rows)


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Makes a table without lines, the first column left-aligned, the others right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _describe_model(target: Target) -> str:
    shape, ranks, tensor = target.shape, target.all_ranks, target.tensor
    shared = f", {tensor} to a model" if tensor > 1 else ""
    return (
        f"{num_parameters(shape) / 1e6:,.1f}M parameters: {shape.layers} layers of {shape.hidden}, "
        f"{shape.heads} heads, vocabulary {shape.vocabulary:,}; {target.dtype} on {ranks} "
        f"rank{'s' * (ranks > 1)}{shared}, ZeRO {target.zero}, {target.recipe.optimizer.name}"
    )


def _phase_table(plan: Plan) -> Table:
    rows = [_phase_row(planned, plan.target.ranks) for planned in plan.phases]
    if len(plan.phases) > 1:
        steps = _format_number(sum_known(planned.steps for planned in plan.phases))
        pieces = _format_number(sum_known(planned.pieces for planned in plan.phases))
        rows.append(["in all", "", "", steps, "", pieces, "", "", _format_duration(plan.seconds)])
    sizes = f"batch = micro x accumulated x {'data ' * (plan.target.tensor > 1)}ranks"
    columns = ["phase", "length", sizes, "steps", "learning rate", "pieces", "a sequence", "epochs", "time"]
    return _make_table(columns, rows)


def _phase_row(planned: PhasePlan, ranks: int) -> list[str]:
    phase, about = planned.phase, "~" if planned.phase.micro_batch == "auto" else ""
    length, stored = phase.length, planned.statistics.stored
    return [
        phase.name if phase.objective is None else f"{phase.name} ({phase.objective})",
        str(length) if length == stored else f"{length} of {stored}",  # cut out of longer examples
        f"{phase.batch:,} = {about}{planned.micro_batch} x {about}{planned.accumulation} x {ranks}",
        _format_number(planned.steps),
        _format_learning_rates(planned.schedule),
        _format_number(planned.pieces),
        f"{planned.statistics.pieces:.1f}",
        UNKNOWN if planned.epochs is None else f"{planned.epochs:,.2f}",
        _format_duration(planned.seconds),
    ]


def _memory_table(plan: Plan) -> Table:
    rows, activations = [], plan.activations
    for memory in plan.memories:
        kept, recomputed = (memory.device + size for size in activations)
        amounts = (memory.weights, memory.gradients, memory.optimizer, memory.host, kept, recomputed)
        rows.append([_name_stage(plan.target, memory.zero), *map(_format_gigabytes, amounts)])
    title = "memory of a rank, GB, an estimate"
    return _make_table([title, "weights", "gradients", "optimizer", "on the host", "+ activations", "recomputed"], rows)


def _name_stage(own: Target, zero: int) -> str:
    return f"ZeRO {zero}" + " (this recipe)" * (zero == own.zero)


def _format_learning_rates(schedule: PhaseSchedule) -> str:
    """Formats the first, the highest and the last learning rate of a phase."""
    by_clock = schedule.schedule.by_clock
    places = [place * schedule.length / 1000 for place in range(1001)]
    top = schedule.schedule.warmup - schedule.begin
    places += [top - (0 if by_clock else 1)] if 0 < top <= schedule.length else []
    learning_rates = [schedule.learning_rate(int(place), place) for place in places if place < schedule.length]
    last = schedule.learning_rate(int(schedule.length) - 1, schedule.length)
    return f"{learning_rates[0]:.2g} .. {max(learning_rates):.2g} .. {last:.2g}"


def _format_number(value: float | None) -> str:
    """Formats a number with thousands separators, or in millions or billions."""
    if value is None:
        return UNKNOWN
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= 10 * unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f}"


def _format_duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _format_gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e10 else f"{size / 1e9:.2f}"


def _stage_table(plans: Sequence[Plan], hour_price: float | None) -> Table:
    """Makes a table of the fastest micro-batches of every ZeRO stage."""
    columns, rows = ["micro x accumulated", "GB a GPU", "sequences/s", "efficiency"], []
    for plan in plans:
        cells = ["does not fit"]
        if plan.fits:
            choices = zip(*(_list_choice(plan, each) for each in plan.phases), strict=True)
            cells = [*map("\n".join, choices), _format_duration(plan.seconds), _format_price(plan, hour_price)]
        rows.append([_name_stage(plans[0].target, plan.target.zero), *cells])
    return _make_table(["fastest of each", *columns, "time", "cost"], rows)


def _list_choice(plan: Plan, planned: PhasePlan) -> tuple[str, ...]:
    return (
        f"{planned.micro_batch} x {planned.accumulation}",
        f"{plan.target.bytes_needed(planned.phase, planned.micro_batch) / 1e9:,.1f}",
        f"{planned.phase.batch / planned.step_seconds:,.0f}",
        f"{planned.efficiency:.1%}",
    )


def _advise(plans: Sequence[Plan]) -> Iterator[str]:
    """Returns the options for the recipe's own stage, and for another if that is clearly faster."""
    own, *others = plans
    yield f"to take: {_write_flags(own)}"
    faster = min((plan for plan in others if plan.fits), key=lambda plan: plan.step_seconds, default=own)
    if faster.step_seconds < (1 - TOLD) * own.step_seconds:
        yield f"faster by {1 - faster.step_seconds / own.step_seconds:.0%}: {_write_flags(faster)}"


def _write_flags(plan: Plan) -> str:
    sizes = (f"--phases.{number}.micro_batch {planned.micro_batch}" for number, planned in enumerate(plan.phases))
    return f"--parallel.zero {plan.target.zero} {' '.join(sizes)}"


def _step_table(plan: Plan) -> Table:
    """Makes a table of the parts of a step's time in each phase."""
    rows, names = [], [name for name in PARTS if name != "sums" or plan.target.tensor > 1]
    for planned in plan.phases:
        parts = [getattr(planned.step, name) for name in names]
        cells = [f"{seconds:.4f}" for seconds in (*parts, planned.step_seconds)]
        rows.append([planned.phase.name, *cells, f"{planned.steps or 0:,.0f}", _format_duration(planned.seconds)])
    return _make_table(["seconds of a step", *names, "in all", "steps", "phase takes"], rows)


def _format_price(plan: Plan, hour_price: float | None) -> str:
    """Formats the price of all GPUs for the time of a plan; empty without a price per hour."""
    return "" if hour_price is None else f"{(plan.seconds or 0) / 3600 * plan.target.all_ranks * hour_price:,.0f}"
