"""The plan of a cluster as a person reads it: memory, where a step's time goes, what to take, and other clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from data_prep.common.progress import duration
from pretraining.planning.cost import StepTime
from pretraining.planning.sweep import Choice, Option, Scaled, Target
from pretraining.planning.table import plain_table

BAR = 40
"""Letters of a bar that is a whole step."""
PARTS = {"compute": "█", "stragglers": "▓", "joining": "▒", "optimizer": "░", "data": "·"}
"""What a step's time goes to, and how a bar shows it."""
TOLD = 0.03
"""A difference that the model can tell: about its mean error."""
COLUMNS = 6
"""Micro-batches that the table of memory shows."""


def render_cluster(target: Target, options: Sequence[Option], hour_price: float | None) -> RenderableType:
    """Lays out all of it: memory, the stages beside each other, and the recipe's own with its time."""
    parts: list[RenderableType] = []
    for number in range(len(target.recipe.phases)):
        parts += [_memory_table(target, number), ""]
    parts += [_option_table(target, options, hour_price), ""]
    if options[0].fits:
        parts += [_step_table(options[0].choices), *_bars(options[0].choices), "", *_advice(options), ""]
    return Group(*parts)


def _memory_table(target: Target, number: int) -> Table:
    """What a rank needs in a phase, for every ZeRO stage and the micro-batches around what fits."""
    phase = target.recipe.phases[number]
    sizes = _shown_sizes(target, number)
    table = plain_table(f"{phase.name}: GB a GPU", "state", *(f"micro-batch {size}" for size in sizes))
    for zero in range(4):
        needed = [target.bytes_needed(phase, zero, size) for size in sizes]
        cells = (f"{each / 1e9:,.1f}" + ("" if each <= target.room.usable else " !") for each in needed)
        own = " (this recipe)" if zero == target.recipe.parallel.zero else ""
        table.add_row(f"ZeRO {zero}{own}", f"{target.memory(zero).device / 1e9:,.1f}", *cells)
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
    """The best of every stage."""
    table = plain_table(
        "fastest of each", "micro x accumulated", "GB a GPU", "sequences/s", "efficiency", "time", "cost"
    )
    for option in options:
        own = " (this recipe)" if option.zero == target.recipe.parallel.zero else ""
        if not option.fits:
            table.add_row(f"ZeRO {option.zero}{own}", "does not fit", *[""] * 5)
            continue
        table.add_row(
            f"ZeRO {option.zero}{own}",
            *("\n".join(column) for column in zip(*map(_numbers, option.choices), strict=True)),
            duration(option.seconds),
            cost(option.seconds, target.cluster.ranks, hour_price),
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
    table = plain_table("seconds of a step", *PARTS, "in all", "steps", "phase takes")
    for choice in choices:
        parts = [getattr(choice.step, name) for name in PARTS]
        cells = [f"{seconds:.4f}" for seconds in (*parts, choice.step.total)]
        table.add_row(choice.phase.name, *cells, f"{choice.steps:,.0f}", duration(choice.seconds))
    return table


def _bars(choices: Iterable[Choice]) -> Iterator[str]:
    """The same as bars."""
    for choice in choices:
        yield f"{choice.phase.name:<12} {bar(choice.step)}"
    yield " " * 13 + "  ".join(f"{letter} {name}" for name, letter in PARTS.items())


def render_scale(others: Iterable[Scaled], hour_price: float | None) -> RenderableType:
    """The same run on other numbers of GPUs."""
    table = plain_table("GPUs", "efficiency", "time", "cost")
    for other in others:
        price = cost(other.seconds, other.ranks, hour_price)
        table.add_row(f"{other.ranks:,}", f"{other.efficiency:.1%}", duration(other.seconds), price)
    return table


def bar(step: StepTime) -> str:
    """The parts of a step side by side; a part that is little still shows, where it is 1% at least."""
    shown = ""
    for name, letter in PARTS.items():
        share = getattr(step, name) / step.total
        shown += letter * (max(1, round(BAR * share)) if share >= 0.01 else 0)
    return shown


def cost(seconds: float, ranks: int, hour_price: float | None) -> str:
    """The price of so many GPUs for so long; nothing where none is given."""
    return "" if hour_price is None else f"{seconds / 3600 * ranks * hour_price:,.0f}"
