"""The chart of minimal pairs: how often a model is right, by phenomenon and paradigm, beside chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from finetuning.results import GroupScore, PairsResult
from finetuning.tasks.scores import wilson
from pretraining.reporting.figures import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 120
"""Bars that can be read; of more paradigms the phenomena alone are drawn."""
NAMELESS = "(none named)"
"""What the pairs of a phenomenon or paradigm without a name stand under."""
Groups = Mapping[str, Mapping[str, GroupScore]]
"""The scores of paradigms, for each phenomenon."""


def pairs_chart(result: PairsResult, groups: Groups) -> Figure:
    """A bar for every phenomenon, below it those of its paradigms, with the interval that so many pairs leave."""
    bars: list[tuple[str, GroupScore, bool]] = [("all", result, True)]
    for phenomenon, paradigms in groups.items():
        bars += [(phenomenon or NAMELESS, result.phenomena[phenomenon], True)] if [*groups] != [""] else []
        own = [(name or NAMELESS, each, False) for name, each in paradigms.items() if [*paradigms] != [""]]
        bars += own if len(result.paradigms) <= MOST_BARS else []
    names, scores, are_whole = zip(*bars, strict=True)
    right, pairs = (np.array([getattr(score, name) for score in scores], np.float64) for name in ("right", "pairs"))
    shares, (low, high) = right / pairs, wilson(right, pairs)
    places = -np.arange(len(bars))
    figure = new_figure(1.2 + 0.19 * len(bars))
    axes = figure.subplots()
    axes.barh(places, 100 * shares, 0.75, color=[BLUE if whole else GREY for whole in are_whole])
    reach = 100 * np.maximum([shares - low, high - shares], 0)  # at 0 and 1, rounding
    axes.errorbar(100 * shares, places, xerr=reach, fmt="none", ecolor="black", elinewidth=0.8)
    axes.axvline(100 * result.chance, color=ORANGE, linewidth=1.2, linestyle="--", zorder=3)
    for place, share, end in zip(places.tolist(), shares.tolist(), high.tolist(), strict=True):
        axes.text(100 * end + 1, place, f"{100 * share:.1f}", va="center", fontsize=7)
    shown = [name.replace("_", " ").replace("$", r"\$") for name in names]
    axes.set_yticks(places, shown, fontsize=7)
    for label, whole in zip(axes.get_yticklabels(), are_whole, strict=True):
        label.set_fontweight("bold" if whole else "normal")
    axes.set(
        xlim=(0, 110), ylim=(0.6 - len(bars), 0.6), xlabel="% of pairs whose good sentence is likelier (lines: 95%)"
    )
    axes.set_xticks(range(0, 101, 10))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    axes.set_title(f"{result.model}: minimal pairs (dashed: chance)", fontsize=10)
    return figure
