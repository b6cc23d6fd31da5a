"""Every table is made at toy scale, by commands that leave at once what the real ones would; what is there is used."""

import json
import math
import re
from pathlib import Path

import pytest
from conftest import ROOT
from rich.console import Console
from support.commands import assert_refusal
from support.reproduction import LACKING, Place, StandIn, by_words, read_result

from benchmarks import reproduce
from benchmarks.reproduce import Reproduce, make
from benchmarks.reproduction import commands, outcomes, results
from benchmarks.reproduction.commands import RECIPES, list_cells, order_commands
from benchmarks.reproduction.declaration import ScaleName, list_tables, load_table
from benchmarks.reproduction.outcomes import describe_divergence, read_ending
from benchmarks.reproduction.results import build_tables
from data_prep.common.codes import Code
from data_prep.common.files import write_json
from finetuning.run_glue import RunGlue
from finetuning.run_ner import RunNer
from finetuning.run_squad import RunSquad
from finetuning.run_swag import RunSwag
from finetuning.run_task import RunTask


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
    assert cells["from scratch"].text.replace(results.NO_BREAK, " ") == "50.0 ± 0.0 one answer for all"
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
    notes = place.folder / "tiny" / "notes" / "train"
    for note in notes.glob("base-seed-1-*"):
        write_json(note, {**json.loads(note.read_text()), "seconds": 3600.0})
    for note in notes.glob("base-seed-[23]-*"):
        note.unlink()
    (place.folder / "table5-tiny.json").unlink()
    assert place.make("table5", StandIn(), "tiny", plan=True) == 0
    assert len(re.findall(r"base seed [23] .* 1 h 00 m ", place.shown)) == 2


DIVERGED = {
    (9.0, 5.0, 4.0, 8.9): "diverged: its loss was 9.00 at the start, 4.00 at its lowest, and is 8.90 at the end",
    (9.0, 9.0): "diverged: its loss was 9.00 at the start, and is 9.00 at the end",
    (9.0, 5.0, math.nan): "diverged: its loss was 9.00 at the start, 5.00 at its lowest, and is nan at the end",
}


def test_a_run_that_lost_what_it_had_learned_has_diverged(tmp_path: Path) -> None:
    for losses, trouble in {(9.0, 6.0, 5.0, 5.2): "", **DIVERGED}.items():
        steps = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        assert describe_divergence(tmp_path / "metrics.jsonl") == trouble


def test_the_tables_say_what_is_claimed_and_found(place: Place) -> None:
    scores, claims, notes = build_tables(place.complete("table5"))
    paper = ("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD 1.1 F1")
    assert scores.head == ["", "demo task", "BLiMP", *(f"paper: {title}" for title in paper)]
    shown = [word.replace(results.NO_BREAK, " ") for word in scores.rows[0]]
    assert shown == ["BERT", "80.2 ± 0.1", "80.0", *("84.4", "88.4", "86.7", "92.7", "88.5")]
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
    assert_refusal("table9: is not declared; there is table1,", make, Reproduce("table9"), Console(quiet=True))
    assert_refusal("--share 3/2: give I/N", make, Reproduce("table5", share="3/2"), Console(quiet=True))


# What is there already is used where it may be, and made again where it was made from something else


def test_no_command_is_run_twice_and_a_table_that_was_interrupted_goes_on(place: Place) -> None:
    whole, again, other = StandIn(), StandIn(), StandIn()
    made = place.complete("table5", whole)
    assert len(whole.ran) == len({*whole.ran})
    place.complete("figure5", other)
    assert not any(name.startswith(("shards/", "task/", "train/")) for name in other.ran)
    stopped, first, second = place.clone(), StandIn(killed_at=5), StandIn()
    assert stopped.make("table5", first) == Code.INTERRUPTED
    assert len(read_result(stopped.folder / "table5-demo.json").runs) == len(first.ran)
    assert (stopped.make("table5", StandIn(), plan=True), stopped.shown.count(" begun ")) == (0, 1)
    assert stopped.complete("table5", second).rows == made.rows
    assert first.ran + second.ran == whole.ran
    place.complete("table5", again)
    assert again.ran == []


def test_a_table_elsewhere_leaves_the_kept_results_alone_also_if_it_is_interrupted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As does the usual folder's name below another current folder."""
    kept = place.folder / "kept"
    monkeypatch.setattr(reproduce, "RESULTS", kept)
    assert place.make("table5", StandIn(killed_at=3)) == Code.INTERRUPTED
    assert f"kept in {place.folder}" in place.shown
    assert not kept.exists()
    assert Reproduce("table5", out=ROOT / reproduce.OUT).results == kept
    monkeypatch.chdir(place.folder)
    assert Reproduce("table5").results != kept


def test_a_table_goes_on_from_results_that_are_kept(place: Place) -> None:
    """In a clone that has the file alone, nothing of it is run again; what another table needs besides, is."""
    made = place.complete("table5")
    clone, nothing, more = place.clone(place.folder / "table5-demo.json"), StandIn(), StandIn()
    assert clone.complete("table5", nothing).rows == made.rows
    assert nothing.ran == []
    assert clone.make("table8", StandIn(), plan=True) == 0
    assert len(re.findall(r" (?:shards +text|train +base seed 1) +to do ", clone.shown)) == 2
    clone.complete("table8", more)
    assert sum(name.startswith("train/") for name in more.ran) == 7  # six other ways of masks, and the base again
    assert not any(name.startswith("tune/demo-base") for name in more.ran)


def test_damaged_results_are_passed_over_with_a_word_and_a_table_prefers_its_own(place: Place) -> None:
    place.complete("table5")
    kept, other = place.folder / "table5-demo.json", place.folder / "table8-demo.json"
    content = json.loads(kept.read_text())
    for damaged in ("{", json.dumps({**content, "runs": {"train/x": {"code": "y"}}})):
        other.write_text(damaged)
        place.complete("table5")
        assert "table8-demo.json: damaged, and passed over" in place.shown
        assert other.read_text() == damaged
    name = next(iter(content["runs"]))
    days = {"table5": "2026-01-01", "table8": "2026-01-03"}
    for table, day in days.items():
        runs = {name: {**content["runs"][name], "date": day}}
        (place.folder / f"{table}-demo.json").write_text(json.dumps({**content, "runs": runs}))
    steps = order_commands(list_cells(load_table("table5", "demo")))
    step = next(step for step in steps if step.name == name)
    for table, day in days.items():
        found = outcomes.Ledger(place.folder / "none" / "demo", place.folder, table).find(step)[1]
        assert found is not None
        assert found.date == day


def test_a_complete_table_alone_replaces_a_complete_one_of_another_recipe(place: Place) -> None:
    before, kept = place.complete("table5"), place.folder / "table5-demo.json"
    place.patch.setattr(commands, "checksum_recipe", lambda path: f"another {path}")
    stopped = place.clone(kept)
    lacking = stopped.clone(kept)
    assert stopped.make("table5", StandIn(killed_at=3)) == Code.INTERRUPTED
    assert "kept in" in stopped.shown
    assert len(read_result(stopped.folder / "table5-demo-partial.json").runs) == 3
    lacking.lacks.add("BLiMP")
    assert lacking.make("table5", StandIn()) == Code.DONE
    assert (lacking.folder / "table5-demo-partial.json").exists()
    for other in (stopped, lacking):
        assert (other.folder / kept.name).read_bytes() == kept.read_bytes()
    lacking.lacks.clear()
    assert {*before.runs} != {*place.complete("table5").runs}
    assert not (place.folder / "table5-demo-partial.json").exists()


def test_a_run_that_has_failed_in_kept_results_is_tried_again(place: Place) -> None:
    made, path, again = place.complete("table5"), place.folder / "table5-demo.json", StandIn()
    content = json.loads(path.read_text())
    name = next(name for name in content["runs"] if name.startswith("tune/"))
    content["runs"][name] |= {"code": 2, "said": "no room", "scores": []}
    path.write_text(json.dumps(content))
    assert place.clone(path).complete("table5", again).rows == made.rows
    assert name in again.ran


def names_of(scale: ScaleName) -> set[str]:
    """The names of all that table 5 needs: what has another name is made anew, beside what is there."""
    return {step.name for step in order_commands(list_cells(load_table("table5", scale)))}


def test_another_recipe_makes_all_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before, checksum = names_of("demo"), commands.checksum_recipe
    monkeypatch.setattr(commands, "checksum_recipe", lambda path: f"{'pre' in path.parts[-3]}{checksum(path)}")
    kept = before & names_of("demo")
    assert {name.partition("/")[0] for name in kept} == {"shards", "task"}
    assert (len(before), len(kept)) == (13, 2)


def test_another_text_makes_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, text in (("one", "text"), ("same", "text"), ("other", "another text")):
        (tmp_path / name / "wiki").mkdir(parents=True)
        (tmp_path / name / "wiki" / "wiki_00").write_text(text)
        monkeypatch.setenv("CLOZE_DATA", str(tmp_path / name))
        found.append(names_of("mini"))
    assert found[0] == found[1]
    assert found[0].isdisjoint(found[2])


def test_what_a_recipe_says_counts_and_not_its_comments(tmp_path: Path) -> None:
    path, found = tmp_path / "recipe.toml", []
    for text in ("epochs = 3", "# three\nepochs = 3", "epochs = 4"):
        path.write_text(text)
        found.append(commands.checksum_recipe(path))
    assert found[0] == found[1] != found[2]


def test_other_files_of_tasks_and_pairs_give_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_DATA", str(tmp_path))
    files = [*(f"glue/STS-B/{split}.tsv" for split in ("train", "dev", "test")), "pairs/blimp.jsonl"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    before = names_of("mini")
    for file, prefix, count in zip(files, ("tune/stsb", "tune/stsb", "", "pairs/"), (13, 13, 0, 9), strict=True):
        (tmp_path / file).write_text("other")
        now = names_of("mini")
        assert (len(now - before), {name.startswith(prefix) for name in now - before} - {True}) == (count, set())
        before = now


def test_the_recipes_of_a_command_are_those_that_it_takes() -> None:
    squad = (RunSquad(version="1.1"), RunSquad(version="2.0"))
    suites = [run.suite() for run in (RunGlue(), RunNer(), RunSwag(), RunTask(), *squad)]
    taken = {name for suite in suites for name in (suite.recipe, suite.small_recipe) if name}
    assert taken == {name for names in RECIPES.values() for name in names}
