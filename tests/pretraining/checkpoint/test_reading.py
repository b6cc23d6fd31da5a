"""Which checkpoint a run goes on from: the newest that is whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.damage import FILES, change_number, flip, spoil_weight, truncate
from support.training import contents, stopped_at

from data_prep.common.errors import UserError
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.reading import find_newest_whole, load_checkpoint, restore_engine
from pretraining.checkpoint.record import (
    DAMAGED,
    FOLDER,
    RECORD,
    CheckpointRecord,
    MadeBy,
    list_finished,
    read_record,
    write_record,
)
from pretraining.engine.engine import Engine, LossScaler
from pretraining.model.shape import Shape
from pretraining.optimizers.adamw import OPTIMIZER

DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": truncate, "flipped": flip, "missing": Path.unlink}
CASES = [*itertools.product(FILES, DAMAGES.values()), (RECORD, change_number)]


@pytest.mark.parametrize(("file", "damage"), CASES)
@pytest.mark.usefixtures("alone")
def test_a_damaged_checkpoint_is_named_and_left(
    straight: Path, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    run = stopped_at(straight, tmp_path / "run", 6)
    before, newest = list_finished(run)[-2:]
    damage(newest / file)
    there, warnings = contents(newest), list[str]()
    assert find_newest_whole(run, warnings.append) == before
    [warning] = warnings
    assert str(newest / file) in warning
    assert f"{newest} is left as it is" in warning
    marked = contents(newest)
    assert str(newest / file) in marked.pop(DAMAGED).decode()
    assert marked == there
    assert find_newest_whole(run, warnings.append) == before
    assert len(warnings) == 1, "it is told once"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_weight_that_is_no_number_is_named_by_whatever_loads_a_model(
    value: float, straight: Path, tmp_path: Path
) -> None:
    run = stopped_at(straight, tmp_path / "run", 6)
    name = spoil_weight(list_finished(run)[-1], value)
    for load in (load_checkpoint, lambda run: StoredModel.open(str(run)).read_weights()):
        with pytest.raises(UserError, match=rf"step-00000006: {name} has values that are no numbers"):
            load(run)


@pytest.mark.usefixtures("alone")
def test_a_repaired_checkpoint_counts_again(straight: Path, tmp_path: Path) -> None:
    run = stopped_at(straight, tmp_path / "run", 6)
    newest = list_finished(run)[-1]
    (newest / RECORD).rename(tmp_path / "kept")
    assert find_newest_whole(run, lambda _: None) != newest
    (tmp_path / "kept").rename(newest / RECORD)
    (newest / DAMAGED).unlink()
    assert find_newest_whole(run, lambda _: None) == newest


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_was_being_replaced_is_put_back(straight: Path, tmp_path: Path) -> None:
    """A run that saves a step twice, with one checkpoint kept, may be killed when that has lost its name."""
    run = stopped_at(straight, tmp_path / "run", 1)
    [only] = list_finished(run)
    there, old = contents(only), only.with_name(only.name + ".old")
    only.rename(old)
    (run / FOLDER / (only.name + ".tmp")).mkdir()
    assert find_newest_whole(run, pytest.fail) == only
    assert contents(only) == there
    old.mkdir()
    assert find_newest_whole(run, pytest.fail) == only
    assert old.exists(), "it is not taken for the one that has the name"
    assert read_record(only).step == 1


@pytest.mark.parametrize("scaler", [{"cur_scale": 4096.0, "cur_iter": 7}, None])
def test_the_scale_of_the_loss_goes_on(tmp_path: Path, scaler: LossScaler | None) -> None:
    write_record(tmp_path, CheckpointRecord(Shape(1, 8, 1, 8, 9), 7, 7.0, scaler, MadeBy(1, 0, "fp16"), {}))
    engine = SimpleNamespace(flat_tensors=[], optimizer=SimpleNamespace(kind=OPTIMIZER), loss_scaler="its own")
    restore_engine(tmp_path, cast(Engine, engine))
    assert engine.loss_scaler == scaler


@pytest.mark.usefixtures("alone")
def test_a_new_folder_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert find_newest_whole(tmp_path, pytest.fail) is None
    (tmp_path / FOLDER / "step-00000001.tmp").mkdir(parents=True)
    assert find_newest_whole(tmp_path, pytest.fail) is None
