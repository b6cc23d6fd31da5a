"""The runs of a search: which there are, which one is best, what is kept of them, and what tells their data apart."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.commands import refusal
from support.finetuning import Toy, call, launch, stop_at
from support.marks import slow
from support.tasks import CUTTER, write_tasks
from support.training import assert_ended

from data_prep.common.files import read_json, write_json
from data_prep.vocabulary.source import read_vocabulary
from finetuning.inputs import Cutter
from finetuning.results import BEGUN, MODEL, RESULTS, Begun, RunResult
from finetuning.running import search
from finetuning.running.batches import RULE
from finetuning.session.report import replace_folder
from finetuning.settings import FineTuning
from finetuning.tasks.glue import open_glue
from finetuning.tasks.ner import open_ner
from finetuning.tasks.own import open_own
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task

GRID = {"learning_rates": [5e-5, 3e-5], "batches": [16, 32], "epochs": [2, 3.5], "seeds": 2}


def test_every_combination_with_every_seed_those_of_the_first_seed_first() -> None:
    """A run keeps its name when learning rates and seeds join, so that what is done stays done."""
    alone = FineTuning(learning_rate=1e-4, seed=7)
    assert search.list_run_settings(alone) == {"lr0.0001-seed7": alone}
    runs = search.list_run_settings(FineTuning.model_validate({"seed": 3, "search": GRID}))
    assert [own.seed for own in runs.values()] == [3] * 8 + [4] * 8
    assert next(iter(runs)) == "lr5e-05-batch16-epochs2-seed3"
    found = {(own.learning_rate, own.batch, own.epochs) for own in [*runs.values()][:8]}
    assert found == {(rate, batch, epochs) for rate in (5e-5, 3e-5) for batch in (16, 32) for epochs in (2, 3.5)}
    few = search.list_run_settings(FineTuning.model_validate({"search": {"learning_rates": [5e-5]}}))
    more = search.list_run_settings(FineTuning.model_validate({"search": {"learning_rates": [1e-4, 5e-5], "seeds": 3}}))
    assert all(
        search.select_deciding_settings(more[name]) == search.select_deciding_settings(own) for name, own in few.items()
    )


def begun(model: str = "mini", more: dict[str, Any] | None = None, **settings: Any) -> Begun:
    """What a run with these settings depends on."""
    settings = {"learning_rate": 1e-4, **settings}
    found = Begun(
        settings=search.select_deciding_settings(FineTuning.model_validate(settings)), model={"checksum": model}
    )
    return found.model_copy(update=more or {})


OTHERS: dict[str, Any] = {"micro_batch": 4, "search": {"seeds": 4}, "logging": {"every": 1}, "compute": {"threads": 1}}
OTHERS |= {"checkpoints": {"every": 5}, "parallel": {"zero": 2}}
FEW, ALL = ({"data": dict.fromkeys(splits, "2 rows")} for splits in (("train", "dev"), ("train", "dev", "test")))
CHANGED = {"data": ALL["data"] | {"test": "3 rows"}}


BEGUN_RUNS = [
    ("one", begun(), begun(**OTHERS), ""),
    ("one", begun(), begun(epochs=5.0, patience=2), "settings.epochs: 3.0 -> 5.0\n    settings.patience: 0 -> 2"),
    ("two", begun(seed=1), begun(learning_rate=5e-5, seed=2, batch=64, epochs=1.0), ""),
    ("two", begun(seed=1), begun(length=64), "length: 128 -> 64"),
    ("two", begun(seed=1), begun("base"), "checksum: mini -> base"),
    ("one", begun(), begun(more={"batches": RULE}), "batches: none -> stretches"),
    ("one", begun(more=FEW), begun(more=ALL), ""),
    ("one", begun(more=ALL), begun(more=CHANGED), "data.test: 2 rows -> 3 rows"),
]


@pytest.mark.parametrize(("name", "before", "now", "said"), BEGUN_RUNS)
def test_what_changes_the_outcome_may_not_change_on_the_way(
    name: str, before: Begun, now: Begun, said: str, tmp_path: Path
) -> None:
    """Runs that are compared differ in what is searched alone. A run does not go on with batches of another rule; those
    of runs of before had no name yet. Splits may be added; a run that only scores a model also names its test split."""
    search.require_same(tmp_path, {"one": now})  # nothing was begun
    before.write(tmp_path / "one" / BEGUN)
    if said:
        assert said in refusal(search.require_same, tmp_path, {name: now})
    else:
        search.require_same(tmp_path, {name: now})


def test_a_run_keeps_its_name_when_more_is_searched(shared_toy: Toy, tmp_path: Path) -> None:
    task = open_own(shared_toy.data / "toy.toml", Setup(Cutter(read_vocabulary(shared_toy.model)), FineTuning()))
    [alone] = search.list_runs(task, FineTuning(batch=16), tmp_path, {}, trains=True)
    alone.begun.write(alone.folder / BEGUN)
    searched = FineTuning.model_validate({"search": {"batches": [8, 16]}})
    names = [run.name for run in search.list_runs(task, searched, tmp_path, {}, trains=True)]
    assert names == ["lr3e-05-batch8-seed1", alone.name]
    for run in search.list_runs(task, searched, tmp_path, {}, trains=True):
        run.begun.write(run.folder / BEGUN)
    [fewer] = search.list_runs(task, FineTuning(batch=8), tmp_path, {}, trains=True)
    assert fewer.name == names[0]


def test_a_setting_that_there_was_not_yet_had_its_default(tmp_path: Path) -> None:
    settings = {name: value for name, value in begun().settings.items() if name != "language_loss"}
    begun(more={"settings": settings}).write(tmp_path / "one" / BEGUN)
    search.require_same(tmp_path, {"one": begun()})
    assert "language_loss: 0.0 -> 0.5" in refusal(search.require_same, tmp_path, {"one": begun(language_loss=0.5)})


def test_differences_name_what_came_and_what_went() -> None:
    found = search.list_differences({"a": {"b": 1}, "c": False}, {"a": {"b": 2, "d": "x"}, "c": True})
    assert found == ["a.b: 1 -> 2", "a.d: none -> x", "c: False -> True"]
    assert search.list_differences({"a": 1, "b": {"c": 0}}, {"b": {}}) == ["b.c: 0 -> none", "a: 1 -> none"]
    assert search.list_differences({"a": {"b": []}}, {"a": {"b": []}}) == []


def test_the_best_run_is_the_first_of_the_best_and_other_models_go(tmp_path: Path) -> None:
    for name, score in {"a": 0.5, "b": 0.7, "c": 0.7, "d": None}.items():
        (tmp_path / name / MODEL).mkdir(parents=True)
        write_json(tmp_path / name / RESULTS, {"score": score})
    (tmp_path / "at work" / MODEL).mkdir(parents=True)
    assert search.find_best(search.read_results(tmp_path)) == "b"
    search.remove_worse_models(tmp_path)
    assert sorted(path.parent.name for path in tmp_path.glob(f"*/{MODEL}")) == ["at work", "b"]
    assert search.find_best({"d": RunResult(score=None)}) is None


def test_a_folder_takes_the_place_of_another_also_after_a_kill(tmp_path: Path) -> None:
    for number, left in enumerate([None, ".model.old"]):
        source, target = tmp_path / "new", tmp_path / "model"
        source.mkdir()
        (source / "file").write_text(str(number))
        if left:
            (tmp_path / left).mkdir()
            (tmp_path / left / "file").touch()
        replace_folder(source, target)
        assert (target / "file").read_text() == str(number)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.usefixtures("leaves_group")
@pytest.mark.parametrize(
    ("more", "threads"), [([], 2), slow(["--compute.threads", "1"], 1)], ids=["as begun", "as told"]
)
def test_a_run_that_goes_on_has_the_threads_that_it_was_begun_with(toy: Toy, more: list[str], threads: int) -> None:
    """Their number decides how sums are rounded, and how many there would be depends on the runs beside it."""
    command = toy.command("out", "--checkpoints.every", "2")
    assert_ended(launch(command, fault=partial(stop_at, 4)), 75, "after step 4, and saved")
    path = toy.folder / "out" / "toy" / "lr0.003-seed1" / BEGUN
    write_json(path, {**read_json(path), "threads": [2]})
    before = torch.get_num_threads()
    try:
        assert call("run_task", [*command, *more]) == 0
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (read_json(path)["threads"], read_json(path)["batches"]) == ([threads], RULE)


# What tells the data of a task from others, before any of it is cut into pieces


SETUP = Setup(CUTTER, FineTuning())
CHANGES = {
    "glue/SST-2/train.tsv": [("fine film of 1", "good film of 1"), ("of 1 words\t1", "of 1 words\t0")],
    "squad/train-v1.1.json": [("longer, number 1", "longer, numbers 1"), ('"text": "The river"', '"text": "The"')],
    "ner/train.txt": [("Anna", "Anne"), ("O\nRome", "B-PER\nRome")],
}
"""Files of tasks, with another text and another answer."""


def open_task(file: str, folder: Path) -> Task:
    data = (folder / "data" / file).parent
    if file.startswith("glue"):
        return open_glue("sst2", data.parent, SETUP)
    if file.startswith("ner"):
        return open_ner(data, SETUP)
    return open_squad("1.1", data / "train-v1.1.json", data / "dev-v1.1.json", SETUP)


@pytest.mark.parametrize("file", CHANGES)
def test_other_data_are_known_without_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    refuse = Mock(side_effect=AssertionError("cut before the first step"))
    monkeypatch.setattr(Cutter, "cut_texts", refuse)
    monkeypatch.setattr(Cutter, "cut_with_offsets", refuse)
    found = []
    for number, (text, other) in enumerate([("", ""), ("", ""), *CHANGES[file]]):
        write_tasks(folder := tmp_path / str(number))
        path = folder / "data" / file
        path.write_text(path.read_text().replace(text, other) if text else path.read_text())
        found.append(search.identify_data(open_task(file, folder)))
    first, again, other_text, other_answer = found
    assert again == first
    assert other_text["dev"] == first["dev"]
    assert len({each["train"] for each in (first, other_text, other_answer)}) == 3
