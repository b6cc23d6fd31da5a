"""Runs of several corpora by the real command: what is read, on how many ranks, and after stops."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest
from support.commands import refusal, run_main
from support.faults import kill_at, stop_at
from support.marks import slow
from support.processes import made_once
from support.shards import CORPORA, make, make_three_corpora
from support.training import (
    SAVES,
    Place,
    assert_ended,
    assert_refused,
    assert_same,
    assert_same_curve,
    assert_well,
    launch,
    records,
    stopped_at,
    train,
    train_straight,
)

from cluster.health import check_recipe
from cluster.panels import format_corpora
from data_prep.common.toml_text import read_toml
from pretraining import evaluate
from pretraining import train as train_entry
from pretraining.checkpoint.record import list_finished
from pretraining.data.corpora import Corpora
from pretraining.processes.ending import Code

MIXED = ["--phases.0.mix", "{ wiki = 0.5, books = 0.3, code = 0.2 }", "--phases.1.mix", "{ wiki = 0.25, code = 0.75 }"]


@dataclasses.dataclass(frozen=True)
class Mixed(Place):
    """A place with three corpora of one vocabulary."""

    def command(self, run: object, *more: object) -> list[str]:
        words = super().command(run, *MIXED, *more)
        at = words.index("--data")
        if "--data" in more:
            return [*words[:at], *words[at + 2 :]]
        return [
            *words[: at + 1],
            *(f"{name}={self.data / name}" for name in ("wiki", "books", "code")),
            *words[at + 2 :],
        ]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_three_corpora(tmp_path_factory.getbasetemp())


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
    """Of 24 sequences of five steps and 12 of three; by validation, where a corpus has examples held out, also if the
    phase reads none of it: the whole is of what it reads."""
    *_, short, last = [line for line in records(straight_mixed) if line["step"] in (5, 8)]
    first_phase, second_phase = read_counts(straight_mixed)
    assert first_phase == {"wiki": 60, "books": 36, "code": 24}
    assert second_phase == {"wiki": 9, "code": 27}
    told = {f"{figure}/{name}" for figure in ("epochs", "pieces", "loss") for name in first_phase}
    assert {name for name in short if "/" in name} == told
    assert {name for name in last if "/" in name} == told - {"loss/books"}
    losses = [last[f"loss/{name}"] for name in second_phase]
    assert min(losses) < last["masked_loss"] < max(losses), "the mean of what is predicted in each"
    assert last["epochs/books"] == short["epochs/books"], "a corpus that is not read any more"
    first, second = records(straight_mixed, "evaluation")
    assert {name for name in first if name.endswith("/books")} >= {"masked_loss/books", "next_loss/books"}
    assert not [name for name in (*first, *second) if name.endswith("/code")]
    assert second["masked_loss/books"] != second["masked_loss"] == second["masked_loss/wiki"], "books are not read"
    assert second["scored_examples"] == 25
    card = (straight_mixed / "export" / "README.md").read_text()
    [trained] = [read_toml(block) for block in re.findall(r"```toml\n(.*?)```", card, re.DOTALL) if "mix" in block]
    assert trained["phases"][0]["mix"] == {"wiki": 0.5, "books": 0.3, "code": 0.2}
    assert "shares" not in trained["phases"][0], "they are in mix"


@pytest.mark.parametrize("step", [slow(3), 5, slow(7)])
def test_a_stopped_run_of_several_corpora_is_the_uninterrupted_one(
    mixed: Mixed, straight_mixed: Path, step: int
) -> None:
    """Within a phase, at the border of two, and after it."""
    command = mixed.command("stopped", *SAVES)
    assert_ended(launch(command, fault=partial(stop_at, step)), Code.STOPPED, f"after step {step}, and saved")
    assert_well(train(command))
    assert_same(mixed.folder / "stopped", straight_mixed)


@pytest.mark.parametrize("ranks", [1, slow(3)])
def test_other_ranks_read_the_same(mixed: Mixed, straight_mixed: Path, ranks: int) -> None:
    mixed.train("other", *SAVES, ranks=ranks)
    assert_same_curve(mixed.folder / "other", straight_mixed, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6])
def test_a_killed_run_of_several_corpora_is_the_uninterrupted_one(
    mixed: Mixed, straight_mixed: Path, step: int
) -> None:
    command = mixed.command("killed", *SAVES)
    assert any(rank.code for rank in launch(command, fault=partial(kill_at, step)).wait())
    assert_well(train(command))
    assert_same(mixed.folder / "killed", straight_mixed)


def test_a_branch_may_bring_another_mixture_or_a_corpus_more(mixed: Mixed, straight_mixed: Path) -> None:
    """For phases that are not begun; with the same mixtures it is the run itself."""
    mixed.train("same", *SAVES, "--branch", f"{straight_mixed}@6")
    assert_same(mixed.folder / "same", straight_mixed)
    alone = ["--data", f"wiki={mixed.data / 'wiki'}", f"code={mixed.data / 'code'}"]
    said = mixed.train("first", *SAVES, "--phases.0.mix", "{ wiki = 1.0 }", "--stop-after", "short", *alone)
    assert "phase short read wiki 100.0% of the sequences" in said
    words = [*SAVES, "--phases.0.mix", "{ wiki = 1.0 }", "--phases.1.mix", "{ books = 0.5, wiki = 0.5 }"]
    said = mixed.train("more", *words, "--branch", mixed.folder / "first")
    assert "changed since then: the fingerprint of books not set -> " in said
    [_, second] = read_counts(mixed.folder / "more")
    assert second == {"wiki": 18, "books": 18}


@pytest.mark.slow
def test_a_corpus_of_a_later_phase_needs_no_length_of_earlier_ones(mixed: Mixed) -> None:
    """Where those are done, also if they read all corpora there were: a branch may bring it."""
    longer = make(mixed.folder / "longer", "--from", mixed.data / "code", "--lengths", 64)
    plain = Place(mixed.data / "code", mixed.recipe, mixed.folder)
    run = plain.command("first", *SAVES, "--stop-after", "short", "--data", f"code={mixed.data / 'code'}")
    assert_well(train(run))
    both = "--data", f"code={mixed.data / 'code'}", f"more={longer}"
    new = plain.command("new", *SAVES, *both)
    assert_refused(new, "phases.0.length = 32: its corpora have no common length for it")
    plain.train("branch", *SAVES, *both, "--branch", mixed.folder / "first")
    assert [sorted(phase) for phase in read_counts(mixed.folder / "branch")] == [["code"], ["code", "more"]]


def test_what_a_run_of_several_corpora_cannot_go_on_with_is_refused(mixed: Mixed, straight_mixed: Path) -> None:
    stopped_at(straight_mixed, mixed.folder / "run", 6)
    wiki, _, code = (f"{name}={mixed.data / name}" for name in CORPORA)
    begun = "--phases.1.mix", "{ wiki = 0.5, code = 0.5 }"
    assert_refused(mixed.command("run", *SAVES, *begun), "phases.1.mix (which is begun) was {code = 0.75, wiki = 0.25}")
    fewer = mixed.command("run", *SAVES, "--data", wiki, code, "--phases.0.mix", "{ wiki = 1.0 }")
    assert_refused(fewer, "was trained on other data (fingerprint of books ")
    for words, fault in (
        (["--phases.0.mix.wiki", "0.7"], "the shares make 1.2; they must make 1"),
        (["--phases.0.mix", "{ wiki = 0.5, web = 0.5 }"], "--data names no web; there is books, code, wiki"),
        (["--phases.0.mix_temperature", "0.3", "--phases.0.mix.wiki", "0.5"], "mix is given too; keep one of them"),
        (
            ["--data", str(mixed.data / "wiki")],
            "code = 0.2}: the corpora have no names",
        ),
        (["--data", wiki, f"books={mixed.data / 'code'}", code], "is the folder of books too"),
    ):
        assert_refused(mixed.command("new", *words), fault)
    assert not (mixed.folder / "new" / "checkpoints").exists()


def test_a_phase_whose_shares_move_is_not_lengthened(mixed: Mixed) -> None:
    """Its sequences go from the first shares to the last; with more steps, what was read would have had others."""
    moves = [*SAVES, "--phases.1.last_mix", "{ books = 1.0 }"]
    mixed.train("moves", *moves)
    [_, second] = read_counts(mixed.folder / "moves")
    assert sum(second.values()) == 36
    assert second["books"] == 18
    stopped_at(mixed.folder / "moves", mixed.folder / "run", 7)
    said = "phases.1.last_mix: the shares move over its 3 steps, of which 2 are done; with 5 steps"
    assert_refused(mixed.command("run", *moves, "--phases.1.steps", "5"), said)
    branch = ["--branch", mixed.folder / "moves"]
    assert_refused(
        mixed.command("new", *moves, "--phases.1.steps", "5", *branch), said.replace("of which 2", "of which 3")
    )


@pytest.mark.slow
def test_a_branch_at_an_earlier_step_is_checked_by_what_is_done_there(mixed: Mixed, straight_mixed: Path) -> None:
    """Names of phases that are done may be gone; a phase that is to come lacks no length without a word."""
    shorter = make(mixed.folder / "shorter", "--from", mixed.data / "code", "--lengths", 32)
    wiki, books = (f"{name}={mixed.data / name}" for name in ("wiki", "books"))
    words = [*SAVES, "--branch", f"{straight_mixed}@5", "--phases.1.mix"]
    mixed.train("less", *words, "{ wiki = 0.5, books = 0.5 }", "--data", wiki, books)
    assert sorted(read_counts(mixed.folder / "less")[1]) == ["books", "wiki"]
    short = mixed.command("short", *words, "{ wiki = 0.5, short = 0.5 }", "--data", wiki, f"short={shorter}")
    assert_refused(short, "phases.1.length = 64: its corpora have no common length for it")


@pytest.mark.parametrize(
    ("words", "fault"),
    {
        ("--phases.0.mix", "{ wiki = 0.9999999, books = 0.0000001 }"): "phases.0: would read nothing of books",
        ("--hours", "1", "--phases.0.last_mix", "{ wiki = 1.0 }"): "the recipe goes by the clock (hours)",
    }.items(),
)
def test_shares_that_cannot_be_kept_are_refused(mixed: Mixed, words: tuple[str, ...], fault: str) -> None:
    assert_refused(mixed.command("new", *words), fault)


def test_corpora_after_two_flags_are_refused(mixed: Mixed) -> None:
    """The last flag alone would count."""
    twice = "--data", f"wiki={mixed.data}", "--data", "books=books"
    assert "--data is given twice" in refusal(train_entry.main, mixed.command("new", *twice))


def test_several_corpora_are_scored_alone_and_shown(
    mixed: Mixed, straight_mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By evaluate.py what each scores by itself, and by status.py what the run has scored."""
    named = [f"{name}={mixed.data / name}" for name in ("wiki", "books")]
    how = ["--length", "64", "--examples", "9", "--json"]
    found = json.loads(run_main(evaluate.main, straight_mixed, "--data", *named, *how))["corpora"]
    for name in ("wiki", "books"):
        alone = json.loads(run_main(evaluate.main, straight_mixed, "--data", mixed.data / name, *how))
        assert alone == found[name]
    scored = records(straight_mixed, "evaluation")[0]
    losses = {name: scored[f"masked_loss/{name}"] + scored[f"next_loss/{name}"] for name in ("wiki", "books")}
    assert [*format_corpora(scored)] == [f"{name} {loss:.4f}" for name, loss in losses.items()]


def test_mixtures_are_checked_before_a_job_trains(corpora: Path, place: Place) -> None:
    there = Corpora.read([f"{name}={corpora / name}" for name in CORPORA])
    given = ["--phases.0.mix", "{ web = 1.0 }"]
    said = refusal(check_recipe, 1e12, place.recipe, given, there, 1, 1)
    assert "phases.0.mix = {web = 1.0}: --data names no web" in said


def read_counts(run: Path) -> list[dict[str, int]]:
    """Reads from the last checkpoint how many sequences of each corpus each phase has read."""
    record = json.loads((list_finished(run)[-1] / "checkpoint.json").read_text())
    read = record["caller"]["progress"]["corpora"]
    return [{name: each["sequences"] for name, each in phase.items()} for phase in read]
