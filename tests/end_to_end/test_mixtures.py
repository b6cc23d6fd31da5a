"""Runs of several corpora by the real command: what is read, on how many ranks, and after stops."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import write_wiki
from support.faults import stop_at
from support.processes import made_once
from support.shards import make
from support.training import (
    SAVES,
    Place,
    assert_ended,
    assert_same,
    assert_well,
    records,
    train,
    train_straight,
)

from pretraining.processes.ending import Code

NAMES = ("wiki", "books", "code")
MIXED = ["--phases.0.mix", "{ wiki = 0.5, books = 0.3, code = 0.2 }", "--phases.1.mix", "{ wiki = 0.25, code = 0.75 }"]


@dataclasses.dataclass(frozen=True)
class Mixed(Place):
    """A place with three corpora of one vocabulary."""

    def command(self, run: object, *more: object) -> list[str]:
        words = super().command(run, *MIXED, *more)
        at = words.index("--data")
        return [
            *words[: at + 1],
            *(f"{name}={self.data / name}" for name in ("wiki", "books", "code")),
            *words[at + 2 :],
        ]


def make_corpora(folder: Path) -> None:
    """Makes three folders of shards of one vocabulary; the last has no examples held out."""
    given: list[object] = []
    for seed, name in enumerate(NAMES, 3):
        text = write_wiki(folder / f"{name}-text", documents=250 * (6 - seed), seed=seed)
        words = ["--lengths", 32, 64, "--duplicates", 2, "--shard-size", "64KB"]
        words += ["--validation", 0.05 if name != "code" else 0]
        make(folder / name, "--docs", text, *words, *(given or ["--vocab-size", 300]))
        given = ["--vocab", folder / "wiki"]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory.getbasetemp(), "corpora", make_corpora)


@pytest.fixture
def mixed(place: Place, corpora: Path) -> Mixed:
    return Mixed(corpora, place.recipe, place.folder)


@pytest.fixture(scope="session")
def straight_mixed(shared: Place, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three corpora that nothing happens to, with all its checkpoints."""
    mixed = Mixed(corpora, shared.recipe, shared.folder)
    made = partial(train_straight, mixed)
    return made_once(tmp_path_factory.getbasetemp(), "straight mixed", lambda run: made(run, *SAVES))


def test_each_corpus_is_read_and_told_by_its_share(straight_mixed: Path) -> None:
    """Of 24 sequences of five steps and 12 of three; by validation, where a corpus has examples held out."""
    *_, short, last = [line for line in records(straight_mixed) if line["step"] in (5, 8)]
    state = json.loads((straight_mixed / "checkpoints" / "step-00000008" / "checkpoint.json").read_text())
    read = state["caller"]["progress"]["corpora"]
    assert [{name: each["sequences"] for name, each in phase.items()} for phase in read] == [
        {"wiki": 60, "books": 36, "code": 24},
        {"wiki": 9, "code": 27},
    ]
    assert {name for name in short if "/" in name} == {f"{a}/{b}" for a in ("epochs", "pieces") for b in read[0]}
    assert {name for name in last if "/" in name} == {f"{a}/{b}" for a in ("epochs", "pieces") for b in read[1]}
    first, second = records(straight_mixed, "evaluation")
    assert {name for name in first if name.endswith("/books")} >= {"masked_loss/books", "next_loss/books"}
    assert not [name for name in (*first, *second) if name.endswith("/code")]
    assert second["scored_examples"] == 25
    card = (straight_mixed / "export" / "README.md").read_text()
    assert "[data.corpora.books]" in card or "[corpora.books" in card


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_stopped_run_of_several_corpora_is_the_uninterrupted_one(
    mixed: Mixed, straight_mixed: Path, step: int
) -> None:
    """Within a phase, at the border of two, and after it."""
    command = mixed.command("stopped", *SAVES)
    assert_ended(train_until(command, step), Code.STOPPED, f"after step {step}, and saved")
    assert_well(train(command))
    assert_same(mixed.folder / "stopped", straight_mixed)


def train_until(command: Sequence[str], step: int) -> Any:
    from support.training import launch

    return launch(command, fault=partial(stop_at, step))
