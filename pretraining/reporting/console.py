"""How records look on the console: a line in files and pipes, a panel that changes in place in a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration
from pretraining.reporting.records import EvaluationRecord, StepRecord


def step_line(record: StepRecord, total: int) -> str:
    """One line, for files and pipes: at most 140 columns for the numbers that runs have. `total` is 0 by the clock."""
    parts = [
        f"{record.step:>{len(str(total))}}/{total}" if total else f"{record.step:>6}",
        f"loss {record.loss:.4f}",
        f"masked {record.masked:.4f} {record.masked_accuracy:5.1%}",
        f"next {record.next_sentence:.4f} {record.next_sentence_accuracy:5.1%}",
        f"rate {record.learning_rate:.2e}",
        *_optional(record),
        f"{number(record.pieces_per_second)} pieces/s",
        *([] if record.utilisation is None else [f"use {record.utilisation:.0%}"]),
        f"wait {record.waiting:.0%}",
        *([] if record.seconds_left is None else [f"{duration(record.seconds_left)} left"]),
    ]
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord) -> str:
    return (
        f"validation {record.step}: masked {record.masked:.4f} {record.masked_accuracy:.1%}"
        f"  perplexity {record.perplexity:.2f}  next {record.next_sentence:.4f} {record.next_sentence_accuracy:.1%}"
    )


def _optional(record: StepRecord) -> list[str]:
    """Gradient norm and loss scale, where there are any."""
    norm = [] if record.gradient_norm is None else [f"norm {record.gradient_norm:.2f}"]
    return norm + ([] if record.loss_scale is None else [f"scale {record.loss_scale:g}"])


def _panel(record: StepRecord, total: int, phases: int, width: int) -> Group:
    """Three lines that change in place, for terminals of 80 columns and more."""
    head = Table.grid(padding=(0, 1))
    left = "" if record.seconds_left is None else f"{duration(record.seconds_left)} left"
    phase = f"phase {record.phase} of {phases}  " if phases > 1 else ""
    if total:
        title = f"{phase}step {record.step:,} of {total:,}"
        bar = ProgressBar(total, record.step, width=max(10, min(40, width - len(title) - len(left) - 10)))
        head.add_row(title, bar, f"{record.step / total:.0%}", left)
    else:
        head.add_row(f"{phase}step {record.step:,} ", left)
    losses = (
        f"  loss {record.loss:.4f}   masked {record.masked:.4f} ({record.masked_accuracy:.1%} right)"
        f"   next {record.next_sentence:.4f} ({record.next_sentence_accuracy:.1%} right)"
    )
    speed = [
        f"rate {record.learning_rate:.2e}",
        *_optional(record),
        f"{number(record.pieces_per_second)} pieces/s",
        *([] if record.utilisation is None else [f"use {record.utilisation:.0%}"]),
        f"wait {record.waiting:.0%}",
        f"{record.memory / 1e9:.1f} GB",
    ]
    return Group(head, _cropped(losses), _cropped("  " + "  ".join(speed)))


def _cropped(line: str) -> Text:
    return Text(line, no_wrap=True, overflow="ellipsis")


def number(value: float) -> str:
    """Three figures and a unit: 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            value /= size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{value:.0f}"
