"""Plans as a person reads them: that of a run, and that of a cluster with what to take and other clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration
from pretraining.config.schedule import PhaseSchedule
from pretraining.objectives.declaration import num_parameters
from pretraining.planning.cost import StepTime
from pretraining.planning.plan import Plan, Target, known_sum, name_numbers
from pretraining.planning.sweep import Choice, Option

UNKNOWN = "?"
BAR = 40
"""Letters of a bar that is a whole step."""
PARTS = {"compute": "█", "stragglers": "▓", "joining": "▒", "optimizer": "░", "data": "·"}
"""What a step's time goes to, and how a bar shows it."""
TOLD = 0.03
"""Share by which times must differ for the model to tell: about its mean error."""
COLUMNS = 6
"""Micro-batches that the table of memory shows."""


def render_plan(plan: Plan) -> RenderableType:
    """Lays out a plan: the model, the phases, the memory, and what was assumed."""
    notes = [Padding(f"- {note}", (0, 0)) for note in plan.notes]
    warning: list[RenderableType] = [] if plan.warning is None else ["", Text(f"warning: {plan.warning}")]
    return Group(_model_line(plan), "", _phase_table(plan), "", _memory_table(plan), "", *notes, *warning)


def _model_line(plan: Plan) -> str:
    target, shape = plan.target, plan.target.shape
    numbers = name_numbers(target.recipe, target.dtype)
    return (
        f"{num_parameters(shape) / 1e6:,.1f}M parameters: {shape.layers} layers of {shape.hidden}, "
        f"{shape.heads} heads, vocabulary {shape.vocabulary:,}; {numbers} on {target.ranks} "
        f"rank{'s' * (target.ranks > 1)}, ZeRO {target.recipe.parallel.zero}, {target.recipe.optimizer.name}"
    )


def _phase_table(plan: Plan) -> Table:
    sizes = "batch = micro x accumulated x ranks"
    table = _plain_table("phase", "length", sizes, "steps", "learning rate", "pieces", "a sequence", "epochs", "time")
    for planned in plan.phases:
        phase, about = planned.phase, "~" if planned.phase.micro_batch == "auto" else ""
        table.add_row(
            phase.name,
            _length(phase.length, planned.statistics.stored),
            f"{phase.batch:,} = {about}{planned.micro_batch} x {about}{planned.accumulation} x {plan.target.ranks}",
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
    table = _plain_table(title, "weights", "gradients", "optimizer", "on the host", "+ activations", "recomputed")
    for memory in plan.memory:
        kept, recomputed = (memory.device + size for size in (plan.activations.kept, plan.activations.recomputed))
        amounts = (memory.weights, memory.gradients, memory.optimizer, memory.host, kept, recomputed)
        table.add_row(_stage(plan.target, memory.zero), *map(_gigabytes, amounts))
    return table


def _stage(target: Target, zero: int) -> str:
    return f"ZeRO {zero}" + " (this recipe)" * (zero == target.recipe.parallel.zero)


def _plain_table(first: str, *others: str) -> Table:
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


def render_cluster(target: Target, options: Sequence[Option], hour_price: float | None) -> RenderableType:
    """Lays out the plan of a cluster: memory, the ZeRO stages beside each other, and where a step's time goes."""
    parts: list[RenderableType] = []
    for number in range(len(target.recipe.phases)):
        parts += [_needs_table(target, number), ""]
    parts += [_option_table(target, options, hour_price), ""]
    if options[0].fits:
        parts += [f"{_stage(target, options[0].zero)}: {_range(target, options[0])}", ""]
        parts += [_step_table(options[0].choices), *_bars(options[0].choices), "", *_advice(options), ""]
    return Group(*parts)


def _range(target: Target, option: Option) -> str:
    """How long a run may take by what the model has been compared with."""
    assert target.cluster is not None
    return target.cluster.margin.tell(option.seconds - option.seconds_by_clock, option.seconds_by_clock)


def _needs_table(target: Target, number: int) -> Table:
    """What a rank needs in a phase, for every ZeRO stage and the micro-batches around what fits."""
    phase = target.recipe.phases[number]
    sizes = _shown_sizes(target, number)
    table = _plain_table(f"{phase.name}: GB a GPU", "state", *(f"micro-batch {size}" for size in sizes))
    for zero in range(4):
        needed = [target.bytes_needed(phase, zero, size) for size in sizes]
        cells = (f"{each / 1e9:,.1f}" + ("" if each <= target.room.usable else " !") for each in needed)
        table.add_row(_stage(target, zero), f"{target.memory(zero).device / 1e9:,.1f}", *cells)
    return table


def _shown_sizes(target: Target, number: int) -> list[int]:
    """The micro-batches around the largest that fits under any stage, a factor of two apart or more."""
    phase = target.recipe.phases[number]
    spaced: list[int] = []
    for size in target.sizes(phase):
        if not spaced or size >= 2 * spaced[-1]:
            spaced.append(size)
    fitting = [
        size for size in spaced if any(target.bytes_needed(phase, z, size) <= target.room.usable for z in range(4))
    ]
    return spaced[max(0, len(fitting) - COLUMNS + 1) :][:COLUMNS]


def _option_table(target: Target, options: Iterable[Option], hour_price: float | None) -> Table:
    """The fastest choices of every ZeRO stage."""
    table = _plain_table(
        "fastest of each", "micro x accumulated", "GB a GPU", "sequences/s", "efficiency", "time", "cost"
    )
    for option in options:
        if not option.fits:
            table.add_row(_stage(target, option.zero), "does not fit", *[""] * 5)
            continue
        table.add_row(
            _stage(target, option.zero),
            *("\n".join(column) for column in zip(*map(_numbers, option.choices), strict=True)),
            duration(option.seconds),
            _price(option.seconds, target.ranks, hour_price),
        )
    return table


def _numbers(choice: Choice) -> tuple[str, ...]:
    return (
        f"{choice.micro_batch} x {choice.accumulation}",
        f"{choice.bytes_needed / 1e9:,.1f}",
        f"{choice.sequences_per_second:,.0f}",
        f"{choice.efficiency:.1%}",
    )


def _advice(options: Sequence[Option]) -> Iterator[str]:
    """The recipe's own stage in words of the command line, and another where that is faster by what can be told."""
    own, *others = options
    yield f"to take: {_words(own)}"
    faster = min((option for option in others if option.fits), key=lambda option: option.step_seconds, default=own)
    if faster.step_seconds < (1 - TOLD) * own.step_seconds:
        yield f"faster by {1 - faster.step_seconds / own.step_seconds:.0%}: {_words(faster)}"


def _words(option: Option) -> str:
    sizes = (f"--phases.{number}.micro_batch {choice.micro_batch}" for number, choice in enumerate(option.choices))
    return f"--parallel.zero {option.zero} {' '.join(sizes)}"


def _step_table(choices: Iterable[Choice]) -> Table:
    """Where the time of a step goes, in each phase."""
    table = _plain_table("seconds of a step", *PARTS, "in all", "steps", "phase takes")
    for choice in choices:
        parts = [getattr(choice.step, name) for name in PARTS]
        cells = [f"{seconds:.4f}" for seconds in (*parts, choice.step.total)]
        table.add_row(choice.phase.name, *cells, f"{choice.steps:,.0f}", duration(choice.seconds))
    return table


def _bars(choices: Iterable[Choice]) -> Iterator[str]:
    """The parts of a step as bars, one for each phase."""
    for choice in choices:
        yield f"{choice.phase.name:<12} {_bar(choice.step)}"
    yield " " * 13 + "  ".join(f"{letter} {name}" for name, letter in PARTS.items())


def render_scale(others: Iterable[Option], hour_price: float | None) -> RenderableType:
    """Lays out what a run takes on other numbers of GPUs."""
    table = _plain_table("GPUs", "efficiency", "time", "cost")
    for other in others:
        price = _price(other.seconds, other.ranks, hour_price)
        table.add_row(f"{other.ranks:,}", f"{other.efficiency:.1%}", duration(other.seconds), price)
    return table


def _bar(step: StepTime) -> str:
    """The parts of a step side by side; a part that is little still shows, where it is 1% at least."""
    shown = ""
    for name, letter in PARTS.items():
        share = getattr(step, name) / step.total
        shown += letter * (max(1, round(BAR * share)) if share >= 0.01 else 0)
    return shown


def _price(seconds: float, ranks: int, hour_price: float | None) -> str:
    """The price of so many GPUs for so long; nothing where none is given."""
    return "" if hour_price is None else f"{seconds / 3600 * ranks * hour_price:,.0f}"
