"""Panels of runs in a terminal: progress and figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cluster.runs import JobNotes, RunStatus, State, format_age
from data_prep.common.codes import explain_code
from data_prep.common.progress import join_first
from pretraining.objectives.declaration import list_loss_curves
from pretraining.reporting.console import draw_progress, format_number

COLOURS = {"queued": "yellow", "starting": "cyan", "running": "green", "done": "blue", "stopped": "yellow"}
"""The colours of states; all others are red."""
GOING_ON = ("queued", "starting", "running", "stopped")
"""States in which the remaining time is shown."""
MARGIN = 2
NAMES = len("ended with") + 2
"""Width of the column of names."""


def build_panel(status: RunStatus, width: int) -> RenderableType:
    """Builds the panel of a run, about ten lines of this width."""
    left = status.last_line.get("seconds_left") if status.state in GOING_ON else None
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, width=NAMES - 2)
    table.add_row("progress", draw_progress("step", status.step, status.total_steps, left, width - MARGIN - NAMES))
    for name, text in describe_run(status).items():
        if text:
            table.add_row(name, Text(text))
    return frame_table(status.run, status.state, status.why, table)


def frame_table(run: str, state: State, why: str, table: Table) -> RenderableType:
    """Puts a table below the name and the state of a run."""
    head = Text.assemble((run, "bold"), "  ", (state, f"bold {COLOURS.get(state, 'red')}"), f"  {why}".rstrip())
    return Group(head, Padding(table, (0, 0, 1, MARGIN), expand=False))


def describe_run(status: RunStatus) -> dict[str, str]:
    """Returns the rows of a panel: texts by name, empty where nothing is known."""
    ended, count, job = status.ended, len(status.rollbacks), status.job
    phase = f"{status.phase} of {status.phases}: {status.phase_name}, length {status.length}"
    return {
        "ended with": f"{explain_code(ended['code'])}: {ended['reason']}" if ended and ended["code"] else "",
        "phase": phase if status.phases else "",
        "loss": "   ".join(format_losses(status.last_line, status.last_evaluation)),
        "by corpus": join_first([*format_corpora(status.last_evaluation)], "   "),
        "speed": "   ".join(format_speed(status.last_line)),
        "written": "   ".join(describe_files(status)),
        "went back": f"{count} × to a checkpoint, the last since {status.rollbacks[-1]}" if count else "",
        "job": f"{job.job} {job.state}" + (f" on {job.nodes}" if job.nodes else f": {job.reason}") if job else "",
        "restarts": describe_restarts(status.notes) if status.notes else "",
    }


def format_losses(line: dict[str, Any], evaluation: dict[str, Any]) -> Iterator[str]:
    """Yields the loss of the last logged step, and that of the last evaluation, summed over the same heads."""
    if line.get("loss") is not None:
        yield f"{line['loss']:.4f}"
    if losses := [evaluation[name] for name in list_loss_curves() if evaluation.get(name) is not None]:
        yield f"validation {sum(losses):.4f} at step {evaluation.get('step', 0):,}"


def format_corpora(evaluation: dict[str, Any]) -> Iterator[str]:
    """Yields the validation loss of each named corpus."""
    for corpus in dict.fromkeys(name.partition("/")[2] for name in evaluation if "/" in name):
        losses = [evaluation.get(f"{name}/{corpus}") for name in list_loss_curves()]
        yield f"{corpus} {sum(loss for loss in losses if loss is not None):.4f}"


def format_speed(line: dict[str, Any]) -> Iterator[str]:
    """Yields the speed of a logged step, worded as in the output of a run."""
    if (pieces := line.get("pieces_per_second")) is not None:
        yield f"{format_number(pieces)} pieces/s"
    if (use := line.get("flops_utilisation")) is not None:
        yield f"use {use:.0%}"
    if (wait := line.get("waiting_for_data")) is not None:
        yield f"wait {wait:.0%}"


def describe_files(status: RunStatus) -> Iterator[str]:
    """Yields the ages of the last line and the last checkpoint."""
    if status.last_line_age is not None:
        yield f"last line {format_age(status.last_line_age)}"
    if status.checkpoint is not None:
        yield f"checkpoint {format_age(status.checkpoint_age or 0.0)}, of step {status.checkpoint:,}"


def describe_restarts(notes: JobNotes) -> str:
    """Describes the restarts of a run by job scripts, and how the start before the last ended."""
    if not notes.restarts:
        return "none"
    before = "an end that was not noted" if notes.code_before is None else explain_code(notes.code_before)
    return f"{notes.restarts}, the last after {before}"
