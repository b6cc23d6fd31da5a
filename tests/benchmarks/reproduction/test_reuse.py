"""What is there already of a table is used where it may be, and made again where it was made from something else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.reproduction import Place, StandIn

from benchmarks.reproduction import inputs, running
from benchmarks.reproduction.commands import CellLister, order_commands
from benchmarks.reproduction.declaration import load_table
from benchmarks.reproduction.inputs import RECIPES
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


def test_no_command_is_run_twice_and_a_table_goes_on_where_it_was_stopped(place: Place) -> None:
    whole = StandIn()
    assert place.make("table5", whole) == 0
    assert len(whole.ran) == len({*whole.ran})
    again = StandIn()
    assert place.make("table5", again) == 0
    assert again.ran == []
    other = StandIn()
    assert place.make("figure5", other) == 0
    assert not any(name.startswith(("shards/", "task/", "train/")) for name in other.ran)


def test_a_table_that_was_interrupted_goes_on_by_the_same_command(place: Place) -> None:
    whole = StandIn()
    assert place.make("table5", whole) == 0
    stopped = Place(place.folder / "other", place.patch)
    first = StandIn(killed_at=5)
    assert stopped.make("table5", first) == Code.INTERRUPTED
    assert not (stopped.folder / "table5-demo.json").exists()
    assert stopped.make("table5", StandIn(), plan=True) == 0
    assert stopped.shown.count(" begun ") == 1
    second = StandIn()
    assert stopped.make("table5", second) == 0
    assert first.ran + second.ran == whole.ran
    assert stopped.summarise("table5").rows == place.summarise("table5").rows


def test_a_table_goes_on_from_results_that_are_kept(place: Place) -> None:
    """In a clone that has the file alone, nothing of it is run again; what another table needs besides, is."""
    assert place.make("table5", StandIn(), "mini") == 0
    clone = Place(place.folder / "clone", place.patch)
    clone.folder.mkdir()
    kept = place.folder / "table5-mini.json"
    (clone.folder / kept.name).write_bytes(kept.read_bytes())
    nothing = StandIn()
    assert clone.make("table5", nothing, "mini") == 0
    assert nothing.ran == []
    assert clone.summarise("table5", "mini").rows == place.summarise("table5", "mini").rows
    assert clone.make("table8", StandIn(), "mini", plan=True) == 0
    assert len(re.findall(r" (?:text|base seed 1) +kept, again ", clone.shown)) == 2
    assert "; 2 of them again, since what others need of them is not here" in clone.shown
    more = StandIn()
    assert clone.make("table8", more, "mini") == 0
    assert sum(name.startswith("train/") for name in more.ran) == 7  # six ways of masks, and the base again
    assert not any(name.startswith("tune/stsb-base") for name in more.ran)


def test_damaged_results_are_passed_over_with_a_word_and_stay(place: Place) -> None:
    assert place.make("table5", StandIn()) == 0
    kept = place.folder / "table5-demo.json"
    content = json.loads(kept.read_text())
    for damaged in ("{", json.dumps({**content, "runs": {"train/x": {"code": "y"}}})):
        kept.with_name("table1-demo.json").write_text(damaged)
        assert place.make("table5", StandIn()) == 0
        assert "table1-demo.json: damaged, and passed over" in place.shown
        assert kept.with_name("table1-demo.json").read_text() == damaged


def test_a_table_prefers_its_own_results(place: Place) -> None:
    assert place.make("table5", StandIn()) == 0
    content = json.loads((place.folder / "table5-demo.json").read_text())
    name = next(iter(content["runs"]))
    for table, day in (("table5", "2026-01-01"), ("table8", "2026-01-03")):
        runs = {name: {**content["runs"][name], "date": day}}
        (place.folder / f"{table}-demo.json").write_text(json.dumps({**content, "runs": runs}))
    step = next(
        step for step in order_commands([*CellLister(load_table("table5", "demo")).list_cells()]) if step.name == name
    )
    for table, day in (("table5", "2026-01-01"), ("table8", "2026-01-03")):
        found = running.Ledger(place.folder / "demo", place.folder, table).find(step)[1]
        assert found is not None
        assert found.date == day


def test_a_run_that_has_failed_in_kept_results_is_tried_again(place: Place) -> None:
    assert place.make("table5", StandIn(), "mini") == 0
    path = place.folder / "table5-mini.json"
    content = json.loads(path.read_text())
    name = next(name for name in content["runs"] if name.startswith("tune/"))
    content["runs"][name] |= {"code": 2, "said": "no room", "scores": []}
    clone = Place(place.folder / "clone", place.patch)
    clone.folder.mkdir()
    (clone.folder / path.name).write_text(json.dumps(content))
    again = StandIn()
    assert clone.make("table5", again, "mini") == 0
    assert name in again.ran
    assert clone.summarise("table5", "mini").rows == place.summarise("table5", "mini").rows


def test_another_recipe_makes_all_anew_beside_what_is_there(place: Place) -> None:
    assert place.make("table5", StandIn()) == 0
    checksum = inputs.checksum_recipe
    place.patch.setattr(inputs, "checksum_recipe", lambda path: f"{'pre' in path.parts[-3]}{checksum(path)}")
    assert place.make("table5", StandIn(), plan=True) == 0
    assert "11 runs are left" in place.shown  # three models, what is made of them, and no text and no task
    anew = StandIn()
    assert place.make("table5", anew) == 0
    assert len(anew.ran) == 11
    assert len([*(place.folder / "made" / "demo" / "train").glob("base-*/metrics.jsonl")]) == 2


def test_another_text_makes_all_anew(place: Place) -> None:
    ran = []
    for name, text in (("one", "text"), ("same", "text"), ("other", "another text")):
        folder = place.folder / name / "wiki"
        folder.mkdir(parents=True)
        (folder / "wiki_00").write_text(text)
        place.patch.setattr(inputs, "DATA", folder.parent)
        stand_in = StandIn()
        assert place.make("table5", stand_in, "mini") == 0
        ran.append(len(stand_in.ran))
    assert ran == [17, 0, 17]


def test_what_a_recipe_says_counts_and_not_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    found = []
    for text in ("epochs = 3", "# three\nepochs = 3", "epochs = 4"):
        path.write_text(text)
        found.append(inputs.checksum_recipe(path))
    assert found[0] == found[1] != found[2]


def test_other_files_of_tasks_and_pairs_give_other_results(place: Place) -> None:
    given = place.folder / "given"
    place.patch.setenv("CLOZE_DATA", str(given))
    files = [given / "glue" / "STS-B" / f"{split}.tsv" for split in ("train", "dev", "test")]
    files.append(given / "pairs" / "blimp.jsonl")
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    assert place.make("table5", StandIn(), "mini") == 0
    for path, prefix, count in zip(files, ("tune/stsb", "tune/stsb", "", "pairs/"), (5, 5, 0, 3), strict=True):
        path.write_text("other")
        again = StandIn()
        assert place.make("table5", again, "mini") == 0
        assert (len(again.ran), {name.startswith(prefix) for name in again.ran} - {True}) == (count, set())


def test_the_recipes_of_a_command_are_those_that_it_takes() -> None:
    suites = [
        RunGlue().suite(),
        RunNer().suite(),
        RunNer(features="last").suite(),
        RunSwag().suite(),
        RunTask().suite(),
    ]
    suites += [RunSquad(version=version).suite() for version in ("1.1", "2.0")]
    taken = {name for suite in suites for name in (suite.recipe, suite.small_recipe) if name}
    assert taken == {name for names in RECIPES.values() for name in names}


def test_results_of_another_commit_are_used_and_said(place: Place) -> None:
    assert place.make("table5", StandIn()) == 0
    assert not any("another commit" in note for note in place.summarise("table5").notes)
    place.patch.setattr(running, "find_commit", lambda: "another")
    again = StandIn()
    assert place.make("table5", again) == 0
    assert again.ran == []
    assert any("made at another commit than this: 13 runs at" in note for note in place.summarise("table5").notes)
