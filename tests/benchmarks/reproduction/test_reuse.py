"""What is there already of a table is used where it may be, and made again where it was made from something else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.reproduction import Place, StandIn

from benchmarks.reproduction import inputs, ledger
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


def test_what_others_need_is_made_again_where_it_is_gone(place: Place) -> None:
    assert place.make("table5", StandIn()) == 0
    made = place.folder / "made" / "demo"
    shutil.rmtree(next((made / "train").glob("base-*")))
    next((made / "notes" / "pairs").glob("pairs-of-base-*")).unlink()
    assert place.make("table5", StandIn(), plan=True) == 0
    assert len(re.findall(r" base seed 1 +done, again ", place.shown)) == 1
    assert "2 runs are left" in place.shown
    assert "; 1 of them again, since what others need of them is not here" in place.shown
    again = StandIn()
    assert place.make("table5", again) == 0
    assert [name.partition("/")[0] for name in again.ran] == ["train", "pairs"]


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
    place.patch.setattr(ledger, "find_commit", lambda: "another")
    again = StandIn()
    assert place.make("table5", again) == 0
    assert again.ran == []
    assert any("made at another commit than this: 13 runs at" in note for note in place.summarise("table5").notes)
