"""Size, colours and files of all charts. The colours suit readers with red-green colour blindness.

Matplotlib is imported when the first chart is drawn, so that training does not wait for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.files import replacing

if TYPE_CHECKING:
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
