"""Checkpoints of ranks that share models: any other number of them goes on from these, and a lost share is named."""

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.mesh import Case, collect_weights, make_engine, take_step
from support.training import run_connected
from torch import Tensor

from data_prep.common.errors import DamageError
from pretraining.checkpoint.reading import StoredTensors, find_fault, list_parameter_sizes, read_weights
from pretraining.checkpoint.record import FOLDER, RECORD, WEIGHT, list_finished, read_record, write_record
from pretraining.checkpoint.writing import Saver
from pretraining.config.settings import Checkpoints
from pretraining.engine.engine import Engine
from pretraining.optimizers.declaration import optimizers

pytestmark = pytest.mark.slow

CASES = {
    "lamb": Case(optimizer="lamb", zero=1, vocabulary=530),  # two and four ranks pad it otherwise
    "adamw": Case(optimizer="adamw", zero=2),
    "muon": Case(optimizer="muon", zero=0),
    "gpt": Case("gpt", "ltr", "muon", zero=1),
    "bf16": Case(optimizer="lamb", zero=2, dtype="bf16"),
}
SAVED, LAST = 3, 7
"""Steps after which a checkpoint is made, and a run ends."""


class Numbers(NamedTuple):
    """What a run has found in the steps after its checkpoint."""

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]


def save(engine: Engine, run: Path) -> None:
    saver = Saver(run, Checkpoints(), lambda _: None)
    saver.save(engine, SAVED, {}, {"sums": [], "counts": [], "steps": 0, "seconds": 0.0})
    saver.finish()


def go_on(case: Case, engine: Engine) -> Numbers:
    """Trains the steps after the checkpoint, and gives up the engine."""
    steps = [take_step(case, engine, step, 1e-3) for step in range(SAVED, LAST)]
    weights = collect_weights(engine)
    engine.close()
    return Numbers(steps, weights)


def train_and_save(folder: Path, tensor: int) -> dict[str, Numbers]:
    """Trains all cases without a break, and saves them on the way."""
    found = {}
    for name, case in CASES.items():
        engine = make_engine(case, tensor, name=case.optimizer, clip=0.5)
        for step in range(SAVED):
            take_step(case, engine, step, 1e-3)
        save(engine, folder / name)
        found[name] = go_on(case, engine)
    return found


def resume(folder: Path, tensor: int, again: Path) -> dict[str, Numbers]:
    """Goes on from all checkpoints, which are saved once more before the first step."""
    found = {}
    for name, case in CASES.items():
        [checkpoint] = list_finished(folder / name)
        engine = make_engine(case, tensor, checkpoint, name=case.optimizer, clip=0.5)
        save(engine, again / name)
        found[name] = go_on(case, engine)
    return found


def train_and_resume(folder: Path, tensor: int, again: Path) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    return train_and_save(folder, tensor), resume(folder, tensor, again)


def make_folders(base: Path, *names: str) -> list[Path]:
    for name, case in itertools.product(names, CASES):
        (base / name / case).mkdir(parents=True)
    return [base / name for name in names]


class Shared(NamedTuple):
    """Runs of four ranks, two of which share a model."""

    folder: Path
    straight: dict[str, Numbers]
    """without a break"""
    resumed: dict[str, Numbers]
    """that went on from the checkpoint"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder, again = make_folders(tmp_path_factory.mktemp("checkpoints"), "shared", "again")
    straight, resumed = run_connected(4, partial(train_and_resume, folder, 2, again), timeout=300)[0]
    return Shared(folder, straight, resumed)


def read_all(run: Path, case: Case) -> dict[str, Tensor]:
    """Reads the whole tensors of a run's only checkpoint."""
    [checkpoint] = list_finished(run)
    record = read_record(checkpoint)
    kinds = WEIGHT, *optimizers()[case.optimizer].state
    return {
        f"{kind} {name}": StoredTensors(checkpoint, record, kind).read_whole(name, size)
        for kind in kinds
        for name, size in list_parameter_sizes(record.shape).items()
    }


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def assert_same_numbers(case: Case, ours: Numbers, theirs: Numbers) -> None:
    """Losses and norms to rounding, which other ranks do otherwise in 16 bits."""
    for mine, other in zip(ours.steps, theirs.steps, strict=True) if case.dtype == "fp32" else ():
        assert [mine[name] for name in ("loss", "norm")] == pytest.approx([other["loss"], other["norm"]], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_same_ranks_go_on_bit_for_bit(shared: Shared, name: str) -> None:
    assert shared.resumed[name].steps == shared.straight[name].steps
    assert_same_tensors(shared.resumed[name].weights, shared.straight[name].weights)


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 1), (4, 4)])
def test_others_go_on_with_the_same_state(shared: Shared, ranks: int, tensor: int, tmp_path: Path) -> None:
    """Weights and optimizer's state are the same bits, and the curve is the uninterrupted one."""
    [again] = make_folders(tmp_path, "again")
    found = run_connected(ranks, partial(resume, shared.folder, tensor, again), timeout=300)[0]
    for name, case in CASES.items():
        assert_same_tensors(read_all(again / name, case), read_all(shared.folder / name, case))
        assert_same_numbers(case, found[name], shared.straight[name])


def test_ranks_that_share_a_model_go_on_from_a_whole_one(tmp_path: Path) -> None:
    folder, again = make_folders(tmp_path, "whole", "again")
    straight = run_connected(2, partial(train_and_save, folder, 1), timeout=300)[0]
    found = run_connected(2, partial(resume, folder, 2, again), timeout=300)[0]
    for name, case in CASES.items():
        assert_same_tensors(read_all(again / name, case), read_all(folder / name, case))
        assert_same_numbers(case, found[name], straight[name])
        records = [read_record(list_finished(run / name)[0]) for run in (folder, again)]
        assert [(each.tensor_ranks, bool(each.divisions)) for each in records] == [(1, False), (2, True)]
        assert "tensor_ranks" not in (list_finished(folder / name)[0] / RECORD).read_text()


def test_a_share_that_is_missing_is_named(shared: Shared, tmp_path: Path) -> None:
    """A file that is gone, and one that the record does not know."""
    [checkpoint] = list_finished(shared.folder / "lamb")
    record, copy = read_record(checkpoint), tmp_path / FOLDER / checkpoint.name
    copy.mkdir(parents=True)
    for file in record.files:
        os.link(checkpoint / file.path, copy / file.path)
    gone = [file for file in record.files if file.path == f"{WEIGHT}-00003-of-00004.safetensors"]
    write_record(copy, replace(record, files=tuple(file for file in record.files if file not in gone)))
    with pytest.raises(DamageError, match="are not in it"):
        read_weights(copy, list_parameter_sizes(record.shape))
    write_record(copy, replace(record, files=tuple(gone)))
    (copy / gone[0].path).unlink()
    assert f"{copy / gone[0].path}: missing" in (find_fault(copy) or "")
    other = next(file for file in record.files if file.path == f"{WEIGHT}-00001-of-00004.safetensors")
    (copy / gone[0].path).write_bytes((checkpoint / other.path).read_bytes())  # the share of rank 0 in its place
    assert f"{copy / gone[0].path}: " in (find_fault(copy) or "")
