"""What is there already of a table is used where it may be, and made again where it was made from something else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.reproduction import Place, StandIn, read_result

from benchmarks.reproduction import commands, outcomes
from benchmarks.reproduction.commands import RECIPES, list_cells, order_commands
from benchmarks.reproduction.declaration import ScaleName, load_table
from data_prep.common.codes import Code
from finetuning.run_glue import RunGlue
from finetuning.run_ner import RunNer
from finetuning.run_squad import RunSquad
from finetuning.run_swag import RunSwag
from finetuning.run_task import RunTask


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder of the test's own."""
    return Place(tmp_path, monkeypatch)


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
        found = outcomes.Ledger(place.folder / "demo", place.folder, table).find(step)[1]
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
    suites = [run.suite() for run in (RunGlue(), RunNer(), RunNer(features="last"), RunSwag(), RunTask(), *squad)]
    taken = {name for suite in suites for name in (suite.recipe, suite.small_recipe) if name}
    assert taken == {name for names in RECIPES.values() for name in names}
