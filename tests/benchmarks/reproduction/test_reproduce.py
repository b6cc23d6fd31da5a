"""Every table is made at toy scale, with commands that leave at once what the real ones would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import assert_refusal
from support.reproduction import LACKING, Place, StandIn, by_words

from benchmarks import reproduce
from benchmarks.reproduce import Reproduce, make
from benchmarks.reproduction import results
from benchmarks.reproduction.declaration import list_tables, load_table
from benchmarks.reproduction.outcomes import describe_divergence, read_ending
from benchmarks.reproduction.results import build_tables
from data_prep.common.files import write_json


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder of the test's own."""
    return Place(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", list_tables())
def test_every_table_is_made(place: Place, name: str) -> None:
    found, table = place.complete(name), load_table(name, "demo")
    rows = {row.name: row for row in found.rows}
    for row in table.rows:
        for column in table.list_columns(row):
            cell = rows[row.name].cells[column]
            is_measured = table.columns[column].is_tuned or not (row.fresh or row.backward)
            assert len(cell.values) == (cell.wanted if is_measured else 0), (row, column)
    papers = {row.name: row.paper for row in table.table.rows if row.paper}
    assert {row.name: row.paper for row in found.rows if row.paper} == papers
    assert table.title in place.shown


def verdicts(found: results.TableResult, claim: str) -> dict[str, str]:
    """What was found of a claim, by columns."""
    return {each.column: each.finding for each in found.verdicts if each.claim == claim}


def test_claims_are_judged_and_columns_without_signal_claim_nothing(place: Place) -> None:
    """Fresh weights are fine-tuned once, whatever the pre-trainings."""

    def only_sentences(words: str, seed: int) -> float:
        return 0.5 + 0.01 * seed if "stsb" in words else by_words(words, seed)

    found = place.complete("table5", StandIn(score=only_sentences), "tiny")
    left = verdicts(found, "left-to-right is worse on all")
    assert left == {"stsb": "nothing is claimed", "sst2": "holds", "blimp": "holds"}
    assert found.signals["stsb"].startswith("no signal: BERT")
    assert not found.signals["sst2"]
    assert verdicts(found, "No NSP hurts QNLI, MNLI and SQuAD")["blimp"] == "not sure"
    assert "a BiLSTM on top helps SQuAD" not in {each.claim for each in found.verdicts}
    assert any("SQuAD 1.1 F1: left out" in note for note in found.notes)
    commands = [run.command for run in found.runs.values() if "--from-scratch" in run.command]
    assert len(commands) == len({*commands}) == 2, "one for each task"
    scratch = {row.name: row for row in found.rows}["from scratch"].cells["stsb"]
    assert len({*scratch.values}) == scratch.wanted == 3
    assert scratch.spread
    told = {"MNLI-m, QNLI, MRPC: STS-B in its place", "from scratch: 3 fine-tunings of fresh weights"}
    assert told <= {*found.notes}


def test_claims_on_one_pre_training_a_row_are_of_these_models_alone(place: Place) -> None:
    def score(words: str, seed: int) -> float:
        return by_words(words, seed) - 0.05 * ("bilstm" in words)

    found = place.complete("table5", StandIn(score=score))
    assert verdicts(found, "left-to-right is worse on all")["demo"] == "holds of these two models"
    assert verdicts(found, "a BiLSTM on top hurts GLUE")["demo"] == "holds of this model"
    assert "holds" not in {each.finding for each in found.verdicts}
    assert "holds of these two models" in place.shown


def test_nothing_is_claimed_of_models_that_say_the_same_of_every_item(place: Place) -> None:
    def score(words: str, seed: int) -> float:
        return 0.5 if "ltr" in words else by_words(words, seed)

    found = place.complete("table5", StandIn(score=score))
    [verdict] = [each for each in found.verdicts if each.worse == "LTR & No NSP" and each.column == "demo"][:1]
    assert (verdict.finding, verdict.why) == ("nothing is claimed", "one answer for all: degenerate")


def test_without_fresh_weights_a_signal_is_that_above_guessing_or_is_not_checked(place: Place) -> None:
    def guessing(words: str, seed: int) -> float:
        return 0.503 if "run_pairs" in words else by_words(words, seed)

    table = load_table("table5", "demo")
    rows = tuple(row for row in table.table.rows if not row.fresh)
    without = table._replace(table=table.table.model_copy(update={"rows": rows}))
    place.patch.setattr(reproduce, "load_table", lambda name, scale: without)
    found = place.complete("table5")
    assert found.signals == {"demo": "not checked", "blimp": ""}
    assert all(each.why.endswith("; signal not checked") for each in found.verdicts if each.column == "demo")
    other = place.clone().complete("table5", StandIn(score=guessing))
    assert other.signals["blimp"] == "no signal: BERT 50.3, guessing 50.0"


def test_a_run_that_diverged_is_shown_and_not_averaged_away(place: Place) -> None:
    def losses(words: str) -> tuple[float, float]:
        return (9.0, 9.5) if "ltr" in words and "--seed 12346" in words else (9.0, 5.0)

    found = place.complete("table5", StandIn(losses=losses), "tiny")
    cell = next(row for row in found.rows if row.name == "LTR & No NSP").cells["sst2"]
    assert (len(cell.values), cell.wanted) == (2, 3)
    assert cell.notes == ["diverged: its loss was 9.00 at the start, and is 9.50 at the end"]
    assert cell.text.replace(results.NO_BREAK, " ").endswith("(2 of 3) diverged")
    assert set(verdicts(found, "left-to-right is worse on all").values()) == {"nothing is claimed"}
    assert "diverged: its loss was 9.00 at the start" in place.shown
    again = StandIn(losses=losses)
    place.complete("table5", again, "tiny")
    assert again.ran == []  # going on is of no use


def test_a_run_or_a_restart_that_fails_is_told_in_its_own_words_and_the_rest_goes_on(place: Place) -> None:
    def score(words: str, seed: int) -> float | None:
        return None if seed == 2 and "bilstm" in words else 0.5 if "--from-scratch" in words else by_words(words, seed)

    stand_in = StandIn(score=score, fails={"next_sentences": "splits do not add up"})
    found = place.complete("table5", stand_in, fails=True)
    cells = {row.name: row.cells["demo"] for row in found.rows}
    assert cells["No NSP"].values == []
    assert "splits do not add up" in cells["No NSP"].notes[0]
    assert "splits do not add up" in place.shown
    assert cells["+ BiLSTM"].notes == ["failed: seed 2: what it computes is no number"]
    assert [len(cells[name].values) for name in ("BERT", "+ BiLSTM")] == [4, 3]
    assert cells["from scratch"].text.replace(results.NO_BREAK, " ") == "50.0 ± 0.0 (4) one answer for all"
    mended = StandIn()
    place.complete("table5", mended)
    assert len(mended.ran) == 3  # the pre-training, its task, its pairs
    assert all("next-sentences" in name for name in mended.ran)


def test_data_of_a_task_that_is_missing_is_said_and_the_rest_is_planned_and_runs(place: Place) -> None:
    place.lacks = {"STS-B", "BLiMP"}
    stand_in = StandIn()
    assert place.make("table5", stand_in, "mini", plan=True) == 0
    assert f"STS-B: no data: {LACKING}\n" in place.shown
    assert re.search(r"84 runs are left: [1-9]", place.shown)
    assert re.search(r" base seed 1 +to do  ", place.shown), "text is there, so that models can be pre-trained"
    found = place.complete("table5", stand_in, "mini")
    assert found.rows[0].cells["stsb"].notes == [f"no data: {LACKING}"]
    assert len(found.rows[0].cells["sst2"].values) == 3
    assert not any(name.startswith("pairs/") or "stsb" in name for name in stand_in.ran)
    assert f"STS-B: no data: {LACKING}" in found.notes


def test_a_plan_says_what_is_left_and_shares_together_make_the_table(place: Place) -> None:
    stand_in = StandIn()
    assert place.make("table5", stand_in, plan=True) == 0
    assert "13 runs are left" in place.shown
    assert stand_in.ran == []
    for number in (1, 2):
        assert place.make("table5", stand_in, share=f"{number}/2") == 0
    assert not (place.folder / "table5-demo.json").exists()
    place.complete("table5", stand_in)
    assert len(stand_in.ran) == len({*stand_in.ran}) == 13
    assert place.make("table5", stand_in, plan=True) == 0
    assert "0 runs are left" in place.shown


def test_a_plan_takes_what_was_measured_whatever_the_seed(place: Place) -> None:
    place.complete("table5", scale="tiny")
    notes = place.folder / "made" / "tiny" / "notes" / "train"
    for note in notes.glob("base-seed-1-*"):
        write_json(note, {**json.loads(note.read_text()), "seconds": 3600.0})
    for note in notes.glob("base-seed-[23]-*"):
        note.unlink()
    (place.folder / "table5-tiny.json").unlink()
    assert place.make("table5", StandIn(), "tiny", plan=True) == 0
    assert len(re.findall(r"base seed [23] .* 1 h 00 m ", place.shown)) == 2


@pytest.mark.parametrize(
    ("losses", "trouble"),
    [
        ([9.0, 6.0, 5.0, 5.2], ""),
        ([9.0, 5.0, 4.0, 8.9], ", 4.00 at its lowest, and is 8.90 at the end"),
        ([9.0, 9.0], ", and is 9.00 at the end"),
        ([9.0, 5.0, float("nan")], ", 5.00 at its lowest, and is nan at the end"),
    ],
)
def test_a_run_that_lost_what_it_had_learned_has_diverged(losses: list[float], trouble: str, tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    wanted = f"diverged: its loss was 9.00 at the start{trouble}" if trouble else ""
    assert describe_divergence(tmp_path / "metrics.jsonl") == wanted


def test_the_tables_say_what_is_claimed_and_found(place: Place) -> None:
    scores, claims, notes = build_tables(place.complete("table5"))
    paper = ("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD 1.1 F1")
    assert scores.head == ["", "demo task", "BLiMP", *(f"paper: {title}" for title in paper)]
    shown = [word.replace(results.NO_BREAK, " ") for word in scores.rows[0]]
    assert shown == ["BERT", "80.2 ± 0.1 (4)", "80.0", *("84.4", "88.4", "86.7", "92.7", "88.5")]
    assert claims.rows[0][:5] == ["No NSP hurts QNLI, MNLI and SQuAD", "BERT", "No NSP", "demo task", "not sure"]
    assert ["MNLI-m, QNLI, MRPC, SST-2: demo task in its place"] in notes.rows


def test_the_end_of_an_earlier_start_says_nothing(tmp_path: Path) -> None:
    write_json(tmp_path / "ended.json", {"code": 75, "reason": "stopped by a signal"})
    assert read_ending(tmp_path, 1, "x", begun=0.0) == (75, "stopped by a signal")
    assert read_ending(tmp_path, 1, "Traceback (most):\n  File\nKeyError: 'y'\n", begun=2.0**33) == (1, "KeyError: 'y'")
    assert read_ending(tmp_path, 0, "", begun=0.0) == (0, "")


def test_results_that_are_damaged_are_those_of_a_run_that_failed(place: Place) -> None:
    class Damaging(StandIn):
        def _pairs(self, words: str, out: Path) -> None:
            write_json(out / "results.json", {"accuracy": "high"})

    cell = place.complete("table5", Damaging(), fails=True).rows[0].cells["blimp"]
    assert cell.values == []
    assert "damaged" in cell.notes[0]


def test_mistakes_are_told_before_anything_is_made() -> None:
    for wrong in (Reproduce(), Reproduce(table=5, figure=5)):
        assert_refusal("which table", make, wrong, Console(quiet=True))
    assert_refusal("--share 3/2: give I/N", make, Reproduce(table=5, share="3/2"), Console(quiet=True))
