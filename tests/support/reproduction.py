"""A stand-in for the commands of a table: it leaves at once what they would leave, with scores that a test decides."""

from __future__ import annotations

import functools
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import measure, reproduce
from benchmarks.reproduce import Reproduce, make
from benchmarks.reproduction import commands, results
from benchmarks.reproduction.declaration import ScaleName
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import write_json

find_commit = functools.cache(measure.find_commit)
"""Returns the commit; asks Git once, where each command of a table would ask."""

Scoring = Callable[[str, int], float | None]
"""The score of a restart of a command, of its words; None where it fails."""


def by_words(words: str, seed: int) -> float:
    """Scores by which BERT is above left-to-right, and both above fresh weights; no two seeds are alike."""
    low = 0.2 * ("--from-scratch" in words) + 0.1 * ("ltr" in words)
    trained = re.search(r"-seed-(\d)", words)
    return 0.8 - low + 0.001 * (seed + (int(trained[1]) - 1 if trained else 0))


@dataclass
class StandIn:
    """Takes the place of `follow`."""

    score: Scoring = by_words
    fails: Mapping[str, str] = field(default_factory=dict)
    """What commands say that fail, by what is in their words."""
    losses: Callable[[str], tuple[float, float]] = lambda words: (9.0, 5.0)
    """The losses of a pre-training at its start and its end."""
    ran: list[str] = field(default_factory=list)
    """The folders that were made, below that of the scale."""
    killed_at: int = -1
    """The number of the command that a Ctrl-C ends."""

    def __call__(
        self, command: Sequence[str], log: Path, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
    ) -> int:
        """Does what the command would."""
        out = Path(command[-1])
        words = " ".join(command).replace(f"{out.parents[1]}/", "")  # alike in all folders
        out.mkdir(parents=True, exist_ok=True)
        if len(self.ran) == self.killed_at:
            self.killed_at = -1
            raise KeyboardInterrupt
        self.ran.append("/".join(out.parts[-2:]))
        for part, said in self.fails.items():
            if part in words:
                say(f"error: {said}")
                return 2
        script = next(Path(word).name for word in command if word.endswith(".py"))
        makers = {"shard.py": shards, "train.py": self._train, "fetch.py": task, "run_pairs.py": self._pairs}
        makers.get(script, self._tune)(words, out)
        return 0

    def _train(self, words: str, out: Path) -> None:
        first, last = self.losses(words)
        lines = [{"kind": "step", "step": 1, "loss": first}, {"kind": "step", "step": 9, "loss": last}]
        lines.append({"kind": "evaluation", "step": 9, "loss": last, "perplexity": 2.0**last, "phase": 0})
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_json(out / "export" / "config.json", {})

    def _tune(self, words: str, out: Path) -> None:
        parts = words.split()
        seeds = int(parts[parts.index("--seeds") + 1])
        runs: dict[str, Any] = {}
        for seed in range(1, seeds + 1):
            value = self.score(words, seed)
            scores = dict.fromkeys(SPLITS, dict.fromkeys(FIGURES, value))
            found = {"failed": "what it computes is no number"} if value is None else {"scores": scores}
            run = {"settings": {"seed": seed}, "metric": "accuracy", "score": value, "degenerate": value == 0.5}
            runs[f"lr1-seed{seed}"] = {**run, **found}
        write_json(out / "results.json", {"task": {"metric": "accuracy", "runs": runs}})

    def _pairs(self, words: str, out: Path) -> None:
        value = self.score(words, 0) or 0.0
        share = {"accuracy": value, "spread": 0.002, "right": round(67_000 * value), "pairs": 67_000}
        about = {"model": "m", "checksum": "c", "data": "blimp", "data_sha256": "s", "chance": 0.5, "equal": 7}
        took = {"too_long": 0, "seconds": 1.0, "scored_now": 67_000, "dtype": "fp32", "device": "cpu", "threads": 1}
        groups = {"phenomena": {"binding": share}, "paradigms": {}}
        write_json(out / "results.json", {**share, **about, **took, **groups, "torch": "2"})


FIGURES = ("accuracy", "f1", "spearman", "matthews", "exact", "exact_match")
SPLITS = ("dev", "dev_matched", "dev_mismatched")
"""Figures of all tasks, of which a task has some, and the splits that a column may show."""


def shards(words: str, out: Path) -> None:
    """Leaves data."""
    write_json(out / "manifest.json", {"words": words})


def task(words: str, out: Path) -> None:
    """Leaves a task."""
    if "demo" not in words:
        raise UserError(words)
    (out / "package.toml").write_text("")


LACKING = "data/glue: not there; fetch it"


class Place:
    """A folder of tables, in which a stand-in runs their commands."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.shown = ""
        self.lacks: set[str] = set()
        patch.setattr(os, "fsync", lambda descriptor: None)  # which waits for the disk, file by file
        patch.setattr(measure, "find_commit", find_commit)
        patch.setattr(reproduce, "count_ranks", lambda wanted: 1)
        patch.setattr(commands, "find_missing", lambda column: LACKING if column.title in self.lacks else "")

    def make(self, name: str, stand_in: StandIn, scale: ScaleName = "demo", **more: Any) -> int:
        """Makes a table; returns the exit code."""
        self.patch.setattr(reproduce, "follow", stand_in)
        wanted = Reproduce(name, scale, out=self.folder, **more)
        console = Console(file=io.StringIO(), width=250)
        code = make(wanted, console)
        self.shown = console.file.getvalue()  # type: ignore[attr-defined]
        return code

    def complete(
        self, name: str, stand_in: StandIn | None = None, scale: ScaleName = "demo", fails: bool = False
    ) -> results.TableResult:
        """Makes a table to its end, of which some runs may fail; returns what was kept of it."""
        assert self.make(name, stand_in or StandIn(), scale) == (Code.CURE if fails else Code.DONE)
        return read_result(self.folder / f"{name}-{scale}.json")

    def clone(self, *kept: Path) -> Place:
        """Another folder, in which nothing but these results is."""
        other = Place(self.folder / "clone", self.patch)
        other.folder.mkdir()
        for path in kept:
            (other.folder / path.name).write_bytes(path.read_bytes())
        return other


def read_result(path: Path) -> results.TableResult:
    """The table in a file of results."""
    return results.TableResult.model_validate(measure.read_results(path), strict=False)
