"""Activations that are kept are those that would be computed; a file that is not theirs is told of and written anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.task_items import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE

from benchmarks.fine_tuning import open_context
from data_prep.common.arrays import Array
from finetuning.inputs import Encoded, Items
from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.ragged import Ragged
from finetuning.running import kept
from finetuning.running.batches import make_evaluation_batches, pack
from finetuning.running.kept import FOLDER, ActivationCache, KeptItems
from finetuning.settings import Features
from pretraining.architectures.weights import Kind
from pretraining.engine.step import GivenUpError
from pretraining.model.batch import CPU
from pretraining.processes.context import Context


@dataclass(frozen=True)
class Given(Items):
    """Items that are in memory."""

    encoded: Encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def encode(self, numbers: Array) -> Encoded:
        return self.encoded.take(numbers)


def model_of(kind: Kind = "classes", seed: int = 1) -> FeatureModel:
    encoders = [EncoderWeights(SHAPE.change_learning(sees=sees), {}).fill_missing(seed) for sees in ("before", "after")]
    return FeatureModel(encoders, head_of(kind), Features(layers="mix", hidden=8)).eval()


class Kept:
    """What a start keeps, in a folder of its own, and what it says."""

    def __init__(self, folder: Path, context: Context) -> None:
        self.folder, self.context = folder / "out" / "task", context

    def keep(
        self, items: Items, model: FeatureModel, limit: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> tuple[Items, list[str]]:
        said: list[str] = []
        keeper = ActivationCache(model.frozen, dtype, self.folder, limit, self.context, said.append)
        return keeper.keep({"train": items})["train"], said

    @property
    def path(self) -> Path:
        return self.folder / FOLDER / "train.arrow"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Kept]:
    with open_context(CPU) as context:
        yield Kept(tmp_path, context)


@pytest.mark.parametrize("kind", ["classes", "choice", "tags", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_would_be_computed(kind: Kind, dtype: torch.dtype, start: Kept) -> None:
    model, items = model_of(kind).to(dtype), Given(items_of(kind))
    found, said = start.keep(items, model, dtype=dtype)
    assert len(said) == 1
    assert said[0].endswith(f"GB, and are kept in {start.path.parent}")
    chosen = np.array([2, 0, 3, 2])
    given, computed = pack(found.encode(chosen), np.arange(4), chosen), pack(items.encode(chosen), np.arange(4), chosen)
    assert given.kept is not None
    rows = given.kept()
    assert rows.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(rows, model.frozen.compute_rows(computed, dtype))
        torch.testing.assert_close(model.logits(given), model.logits(computed), rtol=1e-5, atol=1e-6)
    again, said = start.keep(items, model, dtype=dtype)
    assert (said, isinstance(again, KeptItems)) == ([], True)


def test_many_record_batches_are_one_file(start: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetuning.running.batches.PIECES", 7)
    monkeypatch.setattr("finetuning.running.batches.EVALUATED_TOGETHER", 3)
    model, items = model_of(), Given(items_of("classes"))
    found, _ = start.keep(items, model)
    for numbers, batch in make_evaluation_batches(found):
        assert batch.kept is not None
        torch.testing.assert_close(batch.kept(), model.frozen.compute_rows(replace(batch, kept=None), torch.float32))
        assert len(numbers) == batch.items


def changed_text(encoded: Encoded) -> Encoded:
    pieces, second = encoded.sequences
    values = pieces.values.copy()
    values[-1] += 1
    return replace(encoded, sequences=encoded.sequences._replace(pieces=Ragged(values, pieces.ends), second=second))


TOLD = {"cut": "not a whole Arrow file", "flipped": "damaged"}


@pytest.mark.parametrize("what", ["model", "data", "format", "cut", "flipped"])
def test_a_file_of_others_is_told_of_and_written_anew(what: str, start: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    model, items = model_of(), Given(items_of("classes"))
    start.keep(items, model)
    content = bytearray(start.path.read_bytes())
    content[len(content) // 2] ^= 1
    if what == "model":
        model = model_of(seed=5)
    elif what == "data":
        items = Given(changed_text(items.encoded))
    elif what == "format":
        monkeypatch.setattr(kept, "FORMAT", kept.FORMAT + 1)
    else:
        start.path.write_bytes(content if what == "flipped" else start.path.read_bytes()[:-20])
    found, said = start.keep(items, model)
    told = TOLD.get(what, "of another model, other data or another version of Cloze")
    assert said[0].startswith(f"{start.path}: {told}")
    assert said[0].endswith("; written anew")
    batch = pack(found.encode(np.arange(len(LENGTHS))), np.arange(len(LENGTHS)))
    assert batch.kept is not None
    torch.testing.assert_close(batch.kept(), model.frozen.compute_rows(batch, torch.float32))


def test_what_takes_too_much_is_computed_again_with_other_tasks_counted(start: Kept) -> None:
    model, items = model_of(), Given(items_of("classes"))
    size = sum(LENGTHS) * 3 * 64 * 4  # pieces, layers, both widths, fp32
    found, said = start.keep(items, model, limit=(size - 1) / 1e9)
    assert found is items
    assert said == [
        f"activations of train take {size / 1e9:.3g} GB, more than --cache-gb {(size - 1) / 1e9:g} leaves: "
        "they are computed again in every epoch"
    ]
    other = start.folder.parent / "other" / FOLDER / "train.arrow"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x" * 100)
    assert start.keep(items, model, limit=(size + 99) / 1e9)[0] is items
    assert isinstance(start.keep(items, model, limit=(size + 100) / 1e9)[0], KeptItems)


def test_a_full_disk_is_told_and_nothing_is_left(start: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    items = Given(items_of("classes"))
    found, said = start.keep(items, model_of())
    assert found is items
    assert "No space left on device: activations are computed again in every epoch" in "\n".join(said)
    assert [path.name for path in start.path.parent.iterdir()] == ["lock"]


def test_a_signal_stops_it_and_the_next_start_writes_it_whole(start: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetuning.running.batches.PIECES", 7)
    items, asked = Given(items_of("classes")), iter([False, False, True])
    with monkeypatch.context() as signalled:
        signalled.setattr(start.context.control, "stop_requested_anywhere", lambda: next(asked))
        with pytest.raises(GivenUpError):
            start.keep(items, model_of())
    assert not start.path.exists()
    found, said = start.keep(items, model_of())
    assert isinstance(found, KeptItems)
    assert "written anew" not in "\n".join(said)
