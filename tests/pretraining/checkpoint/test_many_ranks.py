"""Checkpoints that many ranks have written: what one rank asks of the file system to save and to go on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from support.processes import spawn

from data_prep.common.errors import DamageError, SharedError
from data_prep.common.files import FileRecord
from data_prep.common.launchers import find_world
from pretraining.checkpoint import reading
from pretraining.checkpoint.reading import StoredTensors, read_weights_together
from pretraining.checkpoint.record import WEIGHT, CheckpointRecord, MadeBy, write_record
from pretraining.checkpoint.writing import Save, Saver
from pretraining.config.settings import Checkpoints
from pretraining.model.shape import Shape
from pretraining.processes.group import connect, disconnect

RANKS, NUMBERS = 64, 64 * 10
SIZES = {"layer.weight": torch.Size([NUMBERS])}


def write_parts(folder: Path, ranks: int = RANKS) -> CheckpointRecord:
    """A checkpoint of one parameter that so many ranks have written their parts of."""
    folder.mkdir()
    files = []
    for rank, part in enumerate(torch.arange(float(NUMBERS)).chunk(ranks)):
        name = f"{WEIGHT}-{rank:05}-of-{ranks:05}.safetensors"
        save_file({f"layer.weight:{int(part[0])}": part.clone()}, folder / name)
        files.append(FileRecord.from_file(folder, name))
    shape = Shape(vocabulary=8, hidden=8, layers=1, heads=1, intermediate=8, positions=8)
    record = CheckpointRecord(shape, 1, 1.0, None, MadeBy(ranks, 1, "fp32"), {}, tuple(files))
    write_record(folder, record)
    return record


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are opened."""
    names: list[str] = []

    def open_and_note(path: Path, framework: str) -> Any:
        names.append(path.name)
        return safe_open(path, framework)

    monkeypatch.setattr(reading, "safe_open", open_and_note)
    return names


def be_rank(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)


@pytest.mark.parametrize("ranks", [RANKS, 16, 48, 256])
def test_a_rank_opens_the_files_that_it_needs(
    ranks: int, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as what it holds lies in, and one more where the parts of old and new ranks do not begin together."""
    record = write_parts(tmp_path / "checkpoint")
    for rank in (0, ranks // 3, ranks - 1):
        be_rank(rank, ranks, monkeypatch)
        opened.clear()
        begin, end = NUMBERS * rank // ranks, NUMBERS * (rank + 1) // ranks
        part = torch.empty(end - begin)
        StoredTensors(tmp_path / "checkpoint", record, WEIGHT).read("layer.weight", part, begin)
        assert part.tolist() == list(range(begin, end))
        assert len(opened) <= -(-RANKS // ranks) + (RANKS % ranks != 0)


def test_one_process_reads_all(tmp_path: Path, opened: list[str]) -> None:
    record = write_parts(tmp_path / "checkpoint")
    whole = torch.empty(NUMBERS)
    StoredTensors(tmp_path / "checkpoint", record, WEIGHT).read("layer.weight", whole)
    assert whole.tolist() == list(range(NUMBERS))
    assert len(set(opened)) == len(opened) == RANKS


def test_what_no_file_has_is_missed(tmp_path: Path) -> None:
    record = write_parts(tmp_path / "checkpoint")
    with pytest.raises(DamageError, match=f"{NUMBERS} elements of layer.bias are not in it"):
        StoredTensors(tmp_path / "checkpoint", record, WEIGHT).read("layer.bias", torch.empty(NUMBERS))


def read_together(folder: Path) -> object:
    world = find_world(os.environ)
    connect(world, torch.device("cpu"), timeout=60)
    if world.rank:
        setattr(reading, "safe_open", None)  # noqa: B010
    try:
        return read_weights_together(folder, SIZES)["layer.weight"].sum().item()
    except SharedError as error:
        return str(error)
    finally:
        disconnect()


@pytest.mark.parametrize("is_gone", [False, True])
def test_one_rank_reads_the_weights_for_all_and_all_miss_what_cannot_be_read(is_gone: bool, tmp_path: Path) -> None:
    write_parts(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / f"{WEIGHT}-00007-of-{RANKS:05}.safetensors"
    if is_gone:
        file.unlink()
    first, second = (rank.result for rank in spawn(2, read_together, tmp_path / "checkpoint"))
    assert first == second
    assert str(file) in first if is_gone else first == sum(range(NUMBERS))


class Impatient(threading.Event):
    """A saver's sign that the run ends, which comes after a hundred looks."""

    looks = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        return self.looks == 100


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    found = Saver(tmp_path, Checkpoints(), lambda _: None)
    found._ranks, found._closed = 1024, Impatient()
    yield found
    dist.destroy_process_group()


def test_rank_0_asks_little_while_it_waits_for_the_files_of_others(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def note(path: Path) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(Path, "exists", note)
    save = Save(tmp_path, tmp_path, {}, CheckpointRecord(*[None] * 6), None, 0.0)  # type: ignore[arg-type]
    assert not saver._others_have_written(save)
    assert len(asked) == 100, "one file in each look, not all that are missing"
