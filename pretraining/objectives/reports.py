"""The report of an objective on totals of training, and the names of all losses in charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from pretraining.objectives.declaration import Objective, objectives


class TrainingReport(TypedDict):
    """The fields of a record of training that an objective fills."""

    loss: float
    learns: dict[str, float]
    said: list[str]


def report_figures(objective: Objective, totals: Mapping[str, float], width: int = 0) -> TrainingReport:
    """Computes the loss and the figures of these totals; shares take at least `width` columns on the console."""
    figures = objective.measure(totals)
    return {"loss": objective.total(figures), "learns": figures, "said": objective.describe_figures(figures, width)}


def list_loss_curves() -> dict[str, str]:
    """Lists the figures that are parts of a loss, with their names in charts."""
    every = [figure for objective in objectives().values() for figure in objective.figures]
    return {figure.name: figure.curve for figure in every if figure.curve is not None}
