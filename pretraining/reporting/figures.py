"""Size, colours and files of all charts, and the chart of the losses of a run. The colours suit readers with red-green
colour blindness.

Matplotlib is imported when the first chart is drawn, so that training does not wait for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.files import replacing
from data_prep.common.toml_text import read_toml
from pretraining.reporting.metrics_file import METRICS, Logged, read_evaluations, read_step_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 8.0, 150  # inches, and dots an inch: to be read at 800 dots across
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#B0B0B0"


def new_figure(height: float) -> Figure:
    """Makes an empty figure with room for labels, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="compressed")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure atomically. Letters that the font lacks become boxes."""
    with warnings.catch_warnings(), replacing(path) as file:
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})


def draw(path: Path, make: Callable[[], Figure | None]) -> list[str]:
    """Saves the figure that `make` returns, if any. Never raises: returns a line on the error, such as a missing
    font."""
    try:
        if (figure := make()) is not None:
            save(figure, path)
    except Exception as error:
        return [f"{path}: not drawn: {type(error).__name__}: {error}"]
    return []


def smooth(values: Array, window: int) -> Array:
    """Computes the moving average over the last `window` values."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    means: Array = (sums[ends] - sums[begins]) / (ends - begins)
    return means


TRIAL = 20
"""Logged steps from which on a finished run is drawn automatically; with fewer it was a trial."""


def draw_losses(run: Path, called: Mapping[str, str], least: int = 1) -> str:
    """Draws the losses of a run with at least `least` logged steps into its folder; returns a line on the result and
    never raises. `called`: names of the losses with their labels."""
    path = run / "loss.png"
    try:
        trained, scored = read_step_records(run / METRICS), list(read_evaluations(run / METRICS))
        if len(trained) < least:
            return f"{path}: not drawn: {len(trained)} logged steps, at least {least} are needed"
        save(draw_chart(trained, scored, run.name, called, read_lengths(run / "recipe.toml")), path)
    except Exception as error:  # a font, a full disk, a broken Matplotlib: the model is worth more than a chart
        return f"{path}: not drawn: {type(error).__name__}: {error}"
    return f"{path}: the losses of training and validation"


def read_lengths(recipe: Path) -> list[int]:
    """Reads the lengths of the phases of a recipe; none if it cannot be read."""
    with suppress(OSError, ValueError, KeyError):
        return [phase["length"] for phase in read_toml(recipe.read_text(encoding="utf-8"))["phases"]]
    return []


def draw_chart(
    trained: Sequence[Logged],
    scored: Sequence[Logged],
    title: str,
    called: Mapping[str, str],
    lengths: Sequence[int] = (),
) -> Figure:
    """Draws each loss of the model in a plot of its own, with a line for each phase and, if there is room, its
    length above."""
    names = [name for name in called if any(name in logged.figures for logged in trained)] or [*called][:1]
    figure = new_figure(0.6 + 2.6 * len(names))
    plots = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    phases, held_out, labelled = _split_phases(trained), _split_phases(scored), -math.inf
    for axes, name in zip(plots, names, strict=True):
        for phase in sorted({*phases, *held_out}):
            of_phase = ([logged.figures for logged in each.get(phase, [])] for each in (phases, held_out))
            _draw_phase(axes, *(read_column(records, "step", name) for records in of_phase))
        axes.set(ylabel=called[name])
        axes.grid(alpha=0.3)
    for phase, records in [*phases.items()] if len(phases) > 1 else []:
        middle = (records[0].step + records[-1].step) / 2
        if middle - labelled > 0.1 * trained[-1].step:  # the width of a label
            text, labelled = f"length {lengths[phase - 1]}" if phase <= len(lengths) else f"phase {phase}", middle
            plots[0].text(middle, 1.01, text, ha="center", transform=plots[0].get_xaxis_transform(), fontsize=8)
    lines, labels = plots[0].get_legend_handles_labels()
    shown = dict(zip(labels, lines, strict=True))  # each label once
    plots[0].legend(shown.values(), shown, frameon=False)
    plots[-1].set(xlabel="step")
    figure.suptitle(title.replace("$", r"\$"), fontsize=11)
    return figure


def _draw_phase(axes: Axes, trained: tuple[Array, Array], scored: tuple[Array, Array]) -> None:
    """Draws the losses of one phase, which those of another length cannot be compared with."""
    (steps, losses), (marked, held_out) = trained, scored
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.6)
    style: dict[str, Any] = {"color": BLUE, "marker": "." if len(steps) == 1 else "", "linewidth": 1.6}
    axes.plot(steps, smooth(losses, 1 + len(losses) // 100), label="training, smoothed", **style)
    if len(marked):
        style = {"color": ORANGE, "marker": "o", "markersize": 4, "linewidth": 1.2}
        axes.plot(marked, held_out, label="validation", zorder=3, **style)


def _split_phases(records: Iterable[Logged]) -> dict[int, list[Logged]]:
    """Splits records by the number of their phase."""
    phases: dict[int, list[Logged]] = {}
    for each in records:
        phases.setdefault(int(each.figures.get("phase", 1)), []).append(each)
    return phases


def read_column(records: Sequence[Mapping[str, Any]], along: str, name: str) -> tuple[Array, Array]:
    """Returns the finite values of a figure in the records that have it, and their places along the axis."""
    pairs = [(record[along], record[name]) for record in records if record.get(name) is not None]
    found = np.array([pair for pair in pairs if math.isfinite(pair[1])], np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
