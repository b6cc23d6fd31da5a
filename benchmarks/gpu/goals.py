"""The goals of `make gpu` on one H200, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.contests import OURS

Measurement = Mapping[str, Any]
OWN = "this project's own"
MLPERF_PIECES = 254
"""Real pieces of a sequence of MLPerf's corpus, on average."""
VOCABULARY, ALIKE = 30_522, 0.1
"""The vocabulary of goals in pieces a second, and the tolerance for easier data."""


@dataclass(frozen=True)
class Goal:
    """A figure that a part measures, and its target."""

    part: str
    what: str
    path: tuple[str, ...]
    """The keys that lead to the figure in what the part has measured; `*` is the first key there."""
    least: float | None = None
    most: float | None = None
    """If neither is given, the figure is only printed."""
    source: str = ""
    length: float | None = None
    """The mean length of sequences that the goal assumes, with a vocabulary of 30,522."""

    def find(self, measured: Any) -> float | None:
        """Returns the figure; None where the part has not measured it."""
        for key in self.path:
            if not isinstance(measured, Mapping):
                return None
            measured = next(iter(measured.values()), None) if key == "*" else measured.get(key)
        return None if measured is None else float(measured)

    @property
    def target(self) -> str:
        if self.least is not None:
            return f">= {self.least:,}"
        return "" if self.most is None else f"<= {self.most:.2g}"

    def describe_ease(self, measured: Measurement) -> str:
        """Describes data that makes the goal easier: shorter sequences, or a smaller vocabulary."""
        if self.length is None:
            return ""
        [contest] = measured["contests"].values()
        length, words = contest["mean_length"], contest["vocabulary"]
        told = [f"sequences have {length:g} pieces, not {self.length:g}"] * (length < (1 - ALIKE) * self.length)
        told += [f"the vocabulary has {words:,}, not {VOCABULARY:,}"] * (words < (1 - ALIKE) * VOCABULARY)
        return "; ".join(told)

    def judge(self, value: float | None, dry: bool) -> str:
        """Compares the figure with the target."""
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


CONTEST = ("contests", "*")
PIECES, SEQUENCES, SHARE = (
    (*CONTEST, "sides", OURS, name, "median")
    for name in ("real_pieces_per_second", "sequences_per_second", "share_of_ceiling")
)
MEAN_LENGTH = (*CONTEST, "mean_length")


def _ratio(other: str) -> tuple[str, ...]:
    """The keys of how many times as fast as another side ours is."""
    return (*CONTEST, "times_as_fast_as", other, "median")


COMPILED, PLAIN_PEER, PEER = "cloze, compiled", "transformers", "transformers, compiled"
AT_128 = f"{OWN}: the estimate for its products, attention and half of the memory traffic"
AT_512 = f"{OWN}; MLPerf Training 4.0: 1,042 sequences/s a GPU on 8 H200 in FP8, {MLPERF_PIECES} real pieces each"
FASTER = f"{OWN}: what makes a change worthwhile"
NVIDIA = "NVIDIA's DeepLearningExamples publishes 580 for an A100 in fp16, on data about 100 pieces long"
T4 = "NVIDIA publishes 2.2 for a T4, with TensorRT"
BASE, P50 = ("models", "base"), ("sides", "cloze bf16", "p50_ms")
GOALS = (
    Goal("smoke", "ways to train that work", ("passed",), least=1, source=OWN),
    Goal("smoke", "ways to train that fail", ("failed",), most=0, source=OWN),
    Goal("large-128", "large at 128, real pieces/s", PIECES, least=255_000, source=AT_128, length=100),
    Goal("large-128", "large at 128, share of the products' rate", SHARE),
    Goal("large-128", "large at 128, sequences/s", SEQUENCES, source=NVIDIA),
    Goal("large-128", "large at 128, pieces of a sequence", MEAN_LENGTH),
    Goal("large-128", "large at 128, plain: times as fast as compiled", _ratio(COMPILED)),
    Goal("large-512", "large at 512, real pieces/s", PIECES, least=230_000, source=AT_512, length=MLPERF_PIECES),
    Goal("large-512", "large at 512, share of the products' rate", SHARE),
    Goal("large-512", "large at 512, pieces of a sequence", MEAN_LENGTH),
    Goal("large-512", "large at 512, plain: times as fast as compiled", _ratio(COMPILED)),
    Goal("auto-128", "large at 128, as many as fit: real pieces/s", PIECES, least=255_000, source=AT_128, length=100),
    Goal(
        "auto-512",
        "large at 512, as many as fit: real pieces/s",
        PIECES,
        least=230_000,
        source=AT_512,
        length=MLPERF_PIECES,
    ),
    Goal("tests-kernels", "tests of kernels that pass", ("passed",), least=1, source=OWN),
    Goal("tests-kernels", "tests of kernels that fail", ("failed",), most=0, source=OWN),
    Goal("peer-128", "large at 128, transformers compiled: times", _ratio(PEER), least=1.5, source=FASTER),
    Goal("peer-128", "large at 128, transformers: times", _ratio(PLAIN_PEER)),
    Goal("peer-512", "large at 512, transformers compiled: times", _ratio(PEER), least=2.5, source=FASTER),
    Goal("peer-512", "large at 512, transformers: times", _ratio(PLAIN_PEER)),
    Goal("trainer", "a run of large by its command, real pieces/s", ("first", "pieces_per_second")),
    Goal("trainer", "share of its time that it waits for data", ("first", "waiting_for_data"), most=0.01, source=OWN),
    Goal("lamb", "a step with LAMB, times one with AdamW", _ratio("cloze, LAMB")),
    Goal("base-128", "base at 128, real pieces/s", PIECES, least=700_000, source=AT_128, length=100),
    Goal("base-128", "base at 128, transformers compiled: times", _ratio(PEER)),
    Goal(
        "fine-tuning",
        "fine-tuning of base, the Trainer in autocast: times",
        ("models", "*", "contests", "demo-dynamic", "against", "autocast", "training", "times_as_fast", "median"),
    ),
    Goal("inference", "base, 1 x 384: milliseconds", (*BASE, "1 x 384", *P50), most=2.2, source=T4),
    Goal("inference", "base, 1 x 128: milliseconds", (*BASE, "1 x 128", *P50)),
    Goal("deterministic", "a deterministic step, times a usual one's", _ratio("cloze, deterministic")),
    Goal("tests-others", "other tests that fail", ("failed",), most=0, source=OWN),
)


def format_goals(parts: Mapping[str, Any], dry: bool) -> list[str]:
    """Formats a line for each goal: target, figure, and verdict."""
    lines = [f"{'goal':48} {'wanted':>12} {'measured':>12}"]
    for goal in GOALS:
        measured = parts.get(goal.part, {}).get("measured")
        value = None if measured is None else goal.find(measured)
        shown = "-" if value is None else f"{value:,.6g}"
        ease = goal.describe_ease(measured) if measured is not None and not dry else ""
        told = "; ".join(filter(None, [goal.judge(value, dry), ease]))
        source = f"  ({goal.source})" if goal.source else ""
        lines.append(f"{goal.what:48} {goal.target:>12} {shown:>12}  {told}{source}".rstrip())
    return lines
