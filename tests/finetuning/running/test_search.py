"""The runs of a search: which there are, which one is best, and what is kept of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.finetuning import Toy, call, launch, stop_at
from support.marks import slow
from support.training import assert_ended

from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json
from finetuning.results import BEGUN, MODEL, RESULTS, Begun, RunResult
from finetuning.running.batches import RULE
from finetuning.running.search import (
    find_best,
    list_differences,
    list_run_settings,
    read_results,
    remove_worse_models,
    require_same,
    select_deciding_settings,
)
from finetuning.session.report import replace_folder
from finetuning.settings import FineTuning

GRID = {"learning_rates": [5e-5, 3e-5], "batches": [16, 32], "epochs": [2, 3.5], "seeds": 2}
NESTED: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda values: st.dictionaries(st.sampled_from("abc"), values, min_size=1),
)


def test_one_run_where_nothing_is_searched() -> None:
    settings = FineTuning(learning_rate=1e-4, seed=7)
    assert list_run_settings(settings) == {"lr0.0001-seed7": settings}


def test_every_combination_with_every_seed_those_of_the_first_seed_first() -> None:
    runs = list_run_settings(FineTuning.model_validate({"seed": 3, "search": GRID}))
    assert [own.seed for own in runs.values()] == [3] * 8 + [4] * 8
    assert next(iter(runs)) == "lr5e-05-batch16-epochs2-seed3"
    found = {(own.learning_rate, own.batch, own.epochs) for own in [*runs.values()][:8]}
    assert found == {(rate, batch, epochs) for rate in (5e-5, 3e-5) for batch in (16, 32) for epochs in (2, 3.5)}


def test_a_run_keeps_its_name_when_learning_rates_and_seeds_join() -> None:
    """So that what is done stays done."""
    few = list_run_settings(FineTuning.model_validate({"search": {"learning_rates": [5e-5]}}))
    more = list_run_settings(FineTuning.model_validate({"search": {"learning_rates": [1e-4, 5e-5], "seeds": 3}}))
    assert all(select_deciding_settings(more[name]) == select_deciding_settings(own) for name, own in few.items())


def begun(model: str = "mini", **settings: Any) -> Begun:
    """What a run with these settings depends on."""
    return Begun(settings=select_deciding_settings(FineTuning.model_validate(settings)), model={"checksum": model})


def test_what_does_not_change_the_outcome_may_change_on_the_way(tmp_path: Path) -> None:
    require_same(tmp_path, {"one": begun()})  # nothing was begun
    begun(learning_rate=1e-4).write(tmp_path / "one" / BEGUN)
    others: dict[str, Any] = {
        "micro_batch": 4,
        "search": {"seeds": 4},
        "logging": {"every": 1},
        "checkpoints": {"every": 5},
    }
    moved: dict[str, Any] = {"parallel": {"zero": 2}, "compute": {"threads": 1}}
    require_same(tmp_path, {"one": begun(learning_rate=1e-4, **others, **moved)})
    with pytest.raises(UserError) as refused:
        require_same(tmp_path, {"one": begun(learning_rate=1e-4, epochs=5.0, patience=2)})
    assert "\n    settings.epochs: 3.0 -> 5.0\n    settings.patience: 0 -> 2\n" in str(refused.value)


def test_runs_that_are_compared_differ_in_what_is_searched_alone(tmp_path: Path) -> None:
    begun(learning_rate=1e-4, seed=1).write(tmp_path / "one" / BEGUN)
    require_same(tmp_path, {"two": begun(learning_rate=5e-5, seed=2, batch=64, epochs=1.0)})
    for other, change in ((begun(length=64), "length: 128 -> 64"), (begun("base"), "checksum: mini -> base")):
        with pytest.raises(UserError, match=change):
            require_same(tmp_path, {"two": other})


def test_a_setting_that_there_was_not_yet_had_its_default(tmp_path: Path) -> None:
    older = begun(learning_rate=1e-4)
    settings = {name: value for name, value in older.settings.items() if name != "language_loss"}
    older.model_copy(update={"settings": settings}).write(tmp_path / "one" / BEGUN)
    require_same(tmp_path, {"one": begun(learning_rate=1e-4)})
    with pytest.raises(UserError, match=r"language_loss: 0\.0 -> 0\.5"):
        require_same(tmp_path, {"one": begun(learning_rate=1e-4, language_loss=0.5)})


def test_a_run_does_not_go_on_with_batches_of_another_rule(tmp_path: Path) -> None:
    """Those of runs of before had no name yet."""
    begun().write(tmp_path / "one" / BEGUN)
    with pytest.raises(UserError, match="batches: none -> stretches"):
        require_same(tmp_path, {"one": begun().model_copy(update={"batches": RULE})})


@given(NESTED, NESTED)
def test_differences_are_there_where_something_differs(before: Any, now: Any) -> None:
    assert bool(list_differences({"x": before}, {"x": now})) == (before != now)


def test_differences_name_what_came_and_what_went() -> None:
    assert list_differences({"a": {"b": 1}, "c": False}, {"a": {"b": 2, "d": "x"}, "c": True}) == [
        "a.b: 1 -> 2",
        "a.d: none -> x",
        "c: False -> True",
    ]
    assert list_differences({"a": 1}, {}) == ["a: 1 -> none"]


def test_the_best_run_is_the_first_of_the_best_and_other_models_go(tmp_path: Path) -> None:
    for name, score in {"a": 0.5, "b": 0.7, "c": 0.7, "d": None}.items():
        (tmp_path / name / MODEL).mkdir(parents=True)
        write_json(tmp_path / name / RESULTS, {"score": score})
    (tmp_path / "at work" / MODEL).mkdir(parents=True)
    assert find_best(read_results(tmp_path)) == "b"
    remove_worse_models(tmp_path)
    assert sorted(path.parent.name for path in tmp_path.glob(f"*/{MODEL}")) == ["at work", "b"]
    assert find_best({"d": RunResult(score=None)}) is None


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
    assert read_json(path)["threads"] == [threads]
    assert read_json(path)["batches"] == RULE
