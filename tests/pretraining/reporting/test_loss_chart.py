"""The chart of a run of pre-training: what it shows of both phases."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pretraining.objectives.declaration import list_loss_curves
from pretraining.reporting import figures
from pretraining.reporting.figures import draw_chart
from pretraining.reporting.metrics_file import Logged


def record(step: int, **figures: float) -> Logged:
    phase = 1 if step < 80 else 2
    return Logged.from_record(
        {"step": step, "phase": phase, "masked_loss": 9.0 - step / 20, "loss_scale": None, **figures}
    )


@pytest.mark.parametrize("pairs", [True, False])
def test_losses_of_both_phases_stand_beside_those_of_validation(pairs: bool) -> None:
    more = {"next_loss": 0.5} if pairs else {}
    trained = [record(step, **more) for step in range(1, 101)]
    figure = draw_chart(trained, [record(50, **more), record(100, **more)], "mini $", list_loss_curves())
    figure.canvas.draw()
    assert [axes.get_ylabel() for axes in figure.axes] == ["masked-word loss", "next-sentence loss"][: 1 + pairs]
    raw, smoothed, validation, *phases = figure.axes[0].lines
    assert np.asarray(raw.get_ydata()).tolist() == [9.0 - step / 20 for step in range(1, 101)]
    assert len(np.asarray(smoothed.get_ydata())) == 100
    assert (np.asarray(validation.get_xdata()).tolist(), validation.get_label()) == ([50.0, 100.0], "validation")
    assert [np.asarray(line.get_xdata())[0] for line in phases] == [0, 79]


def test_a_leap_does_not_press_the_rest_together_and_what_is_no_number_is_left_out() -> None:
    leaps = {501: {"masked_loss": 500.0}, 502: {"masked_loss": float("nan")}}
    trained = [record(step, **leaps.get(step, {})) for step in range(1, 1001)]
    axes = draw_chart(trained, [], "run", list_loss_curves()).axes[0]
    assert axes.get_ylim()[1] < 100
    assert len(np.asarray(axes.lines[0].get_ydata())) == 999


def test_training_does_not_load_matplotlib() -> None:
    code = "import sys, pretraining.reporting.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert figures.WIDTH * figures.DPI == 1200
