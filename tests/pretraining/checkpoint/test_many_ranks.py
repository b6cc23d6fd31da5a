"""Checkpoints that many ranks have written: what one rank asks of the file system to save and to go on."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from support.training import run_connected

from data_prep.common.errors import DamageError, SharedError, UserError
from data_prep.common.files import FileRecord
from pretraining.checkpoint import reading
from pretraining.checkpoint.reading import StoredTensors, read_each_together, read_weights_together
from pretraining.checkpoint.record import WEIGHT, CheckpointRecord, MadeBy, write_record
from pretraining.checkpoint.writing import Save, Saver
from pretraining.config.settings import Checkpoints
from pretraining.model.shape import Shape
from pretraining.processes.group import shared_errors

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


@pytest.mark.parametrize("ranks", [RANKS, 1, 16, 48, 256])
def test_a_rank_opens_few_files(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as what it holds lies in, and one more where the parts of old and new ranks do not begin together."""
    record = write_parts(tmp_path / "checkpoint")
    for rank in (0, ranks // 3, ranks - 1):
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", ranks)):
            monkeypatch.setattr(dist, name, lambda value=value: value)
        opening = Mock(wraps=safe_open)
        monkeypatch.setattr(reading, "safe_open", opening)
        begin, end = NUMBERS * rank // ranks, NUMBERS * (rank + 1) // ranks
        part = torch.empty(end - begin)
        StoredTensors(tmp_path / "checkpoint", record, WEIGHT).read("layer.weight", part, begin)
        assert part.tolist() == list(range(begin, end))
        opened = [call.args[0] for call in opening.call_args_list]
        assert len({*opened}) == len(opened) <= -(-RANKS // ranks) + (RANKS % ranks != 0)


def test_what_no_file_has_is_missed(tmp_path: Path) -> None:
    record = write_parts(tmp_path / "checkpoint")
    with pytest.raises(DamageError, match=f"{NUMBERS} elements of layer.bias are not in it"):
        StoredTensors(tmp_path / "checkpoint", record, WEIGHT).read("layer.bias", torch.empty(NUMBERS))


def read_together(folder: Path) -> object:
    if dist.get_rank():
        setattr(reading, "safe_open", None)  # noqa: B010
    try:
        return read_weights_together(folder, SIZES)["layer.weight"].sum().item()
    except SharedError as error:
        return str(error)


@pytest.mark.parametrize("is_gone", [False, True])
def test_one_rank_reads_the_weights_for_all_and_all_miss_what_cannot_be_read(is_gone: bool, tmp_path: Path) -> None:
    write_parts(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / f"{WEIGHT}-00007-of-{RANKS:05}.safetensors"
    if is_gone:
        file.unlink()
    first, second = run_connected(2, partial(read_together, tmp_path / "checkpoint"))
    assert first == second
    assert str(file) in first if is_gone else first == sum(range(NUMBERS))


def fail_while_reading(how: str) -> str:
    """Reads two weights together; rank 0 misses the second, or has a mistake there, or rank 1 fails before."""
    errors = {"missing": UserError("the second is gone"), "mistake": RuntimeError("the second is gone")}

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(2)
        if how in errors:
            raise errors[how]
        yield "second", torch.ones(2)

    try:
        with shared_errors():
            if how == "before" and dist.get_rank():
                raise UserError("the second is gone")
            return str(dict(read_each_together(read, dict.fromkeys(("first", "second"), torch.Size([2])))))
    except SharedError as error:
        return str(error)


@pytest.mark.parametrize("how", ["missing", "mistake", "before"])
def test_no_rank_waits_for_weights_that_another_cannot_read(how: str) -> None:
    for told in run_connected(2, partial(fail_while_reading, how)):
        assert "the second is gone" in told


@pytest.mark.usefixtures("alone")
def test_rank_0_asks_little_while_it_waits_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the run ends, after a hundred looks."""
    saver, exists = Saver(tmp_path, Checkpoints(), lambda _: None), Mock(return_value=False)
    saver._ranks, saver._closed = 1024, Mock(wait=Mock(side_effect=[False] * 99 + [True]))
    monkeypatch.setattr(Path, "exists", exists)
    save = Save(tmp_path, tmp_path, {}, CheckpointRecord(*[None] * 6), None, 0.0)  # type: ignore[arg-type]
    assert not saver._others_have_written(save)
    assert exists.call_count == 100, "one file in each look, not all that are missing"
