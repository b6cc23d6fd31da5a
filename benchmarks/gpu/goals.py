"""What a run of `make gpu` is to reach on one H200, and from where each figure is; compared when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Measurement = Mapping[str, Any]
OURS = "this project's own"
MLPERF_PIECES = 254
"""Real pieces of a sequence of MLPerf's corpus, on average."""


@dataclass(frozen=True)
class Goal:
    """A figure that a part measures, and what it is to be."""

    part: str
    what: str
    find: Callable[[Measurement], float | None]
    """Takes the figure from what the part has measured."""
    least: float | None = None
    most: float | None = None
    """Where neither is given, the figure is told, and compared with nothing."""
    source: str = ""

    @property
    def wanted(self) -> str:
        if self.least is not None:
            return f">= {self.least:,}"
        return "" if self.most is None else f"<= {self.most:.2g}"

    def judge(self, value: float | None, dry: bool) -> str:
        """How the figure compares."""
        wanted = self.least if self.least is not None else self.most
        if wanted is None:
            return ""
        if dry:
            return "dry: not compared"
        if value is None:
            return "not measured"
        missing = wanted - value if self.least is not None else value - wanted
        if missing <= 0:
            return "met"
        return f"missed by {missing:.3g}" + (f" ({missing / wanted:.0%})" if wanted else "")


def _contest(measured: Measurement) -> Measurement:
    [found] = measured["contests"].values()
    return found  # type: ignore[no-any-return]


def _speed(name: str) -> Callable[[Measurement], float]:
    return lambda measured: float(_contest(measured)["sides"]["cloze"][name]["median"])


def _ratio(measured: Measurement) -> float:
    times = _contest(measured)["times_as_fast_as"]
    found = times.get("transformers") or next(iter(times.values()))  # on a CPU there are two of transformers
    return float(found["median"])


SEQUENCES, PIECES = _speed("sequences_per_second"), _speed("real_pieces_per_second")
NVIDIA = f"{OURS}; NVIDIA's DeepLearningExamples publishes 580 for an A100 in fp16"
MLPERF = f"MLPerf Training 4.0: 1,042 sequences/s a GPU on 8 H200 in FP8, {MLPERF_PIECES} real pieces each"
FASTER = f"{OURS}: what makes it worth to change over"
TIMES = "times as fast as transformers"
SIZES = {f"{size}-{length}": f"{size} at {length}" for size in ("base", "large") for length in (128, 512)}
GOALS = (
    Goal("tests", "tests that pass", lambda found: found["passed"], least=1, source=OURS),
    Goal("tests", "tests that fail", lambda found: found["failed"], most=0, source=OURS),
    Goal("throughput-large-128", "large at 128, sequences/s", SEQUENCES, least=2050, source=NVIDIA),
    Goal("throughput-large-512", "large at 512, real pieces/s", PIECES, least=1042 * MLPERF_PIECES, source=MLPERF),
    Goal("throughput-large-512", "large at 512, sequences/s", SEQUENCES),
    Goal("throughput-base-128", "base at 128, sequences/s", SEQUENCES),
    Goal("throughput-base-512", "base at 512, sequences/s", SEQUENCES),
    *(Goal(f"throughput-{name}", f"{told}, {TIMES}", _ratio, least=1.5, source=FASTER) for name, told in SIZES.items()),
    Goal("deterministic", "a deterministic step, times a usual one's", _ratio),
)


def goal_lines(parts: Mapping[str, Any], dry: bool) -> list[str]:
    """What was to be reached, what was measured, and whether it is enough: a line for each goal."""
    lines = [f"{'goal':44} {'wanted':>12} {'measured':>12}"]
    for goal in GOALS:
        measured = parts.get(goal.part, {}).get("measured")
        value = None if measured is None else goal.find(measured)
        shown = "-" if value is None else f"{value:,.6g}"
        source = f"  ({goal.source})" if goal.source else ""
        lines.append(f"{goal.what:44} {goal.wanted:>12} {shown:>12}  {goal.judge(value, dry)}{source}".rstrip())
    return lines
