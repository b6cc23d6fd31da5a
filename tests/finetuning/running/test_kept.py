"""Activations that are kept are those that would be computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support.fine_tuned_models import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE

from benchmarks.fine_tuning import open_context
from data_prep.common.arrays import Array
from data_prep.common.launchers import World
from finetuning.inputs import Encoded, Items
from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.running.batches import make_evaluation_batches, pack
from finetuning.running.outputs import KeptItems, keep_activations
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


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context(CPU) as opened:
        yield opened


def keep(
    items: Items, model: FeatureModel, context: Context, limit: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Items, str]:
    """What is kept of a split, and what is said of it."""
    said: list[str] = []
    found = keep_activations({"train": items}, model.frozen, dtype, limit, context, said.append)
    return found["train"], "".join(said)


@pytest.mark.parametrize("kind", ["classes", "choice", "tags", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_would_be_computed(kind: Kind, dtype: torch.dtype, context: Context) -> None:
    model, items = model_of(kind).to(dtype), Given(items_of(kind))
    found, _ = keep(items, model, context, dtype=dtype)
    chosen = np.array([2, 0, 3, 2])
    given, computed = pack(found.encode(chosen), np.arange(4), chosen), pack(items.encode(chosen), np.arange(4), chosen)
    assert given.kept is not None
    rows = given.kept()
    assert rows.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(rows, model.frozen.compute_rows(computed, dtype))
        torch.testing.assert_close(model.logits(given), model.logits(computed), rtol=1e-5, atol=1e-6)


def test_items_of_many_batches_have_their_own(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetuning.running.batches.PIECES", 7)
    monkeypatch.setattr("finetuning.running.batches.EVALUATED_TOGETHER", 3)
    model, items = model_of(), Given(items_of("classes"))
    found, _ = keep(items, model, context)
    for numbers, batch in make_evaluation_batches(found):
        assert batch.kept is not None
        torch.testing.assert_close(batch.kept(), model.frozen.compute_rows(replace(batch, kept=None), torch.float32))
        assert len(numbers) == batch.items


def test_what_takes_too_much_on_a_machine_is_computed_again(context: Context) -> None:
    model, items = model_of(), Given(items_of("classes"))
    size = sum(LENGTHS) * 3 * 64 * 4 / 1e9  # pieces, layers, both widths, fp32
    assert keep(items, model, context, limit=size - 1e-9) == (
        items,
        f"activations of train take {size:.3g} GB of memory, more than --features.cache_gb {size - 1e-9:g}: "
        "they are computed again in every epoch",
    )
    assert isinstance(keep(items, model, context, limit=size)[0], KeptItems)
    two = replace(context, world=World(size=2, local_size=2))
    assert keep(items, model, two, limit=2 * size - 1e-9)[0] is items


def test_a_signal_stops_it(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetuning.running.batches.PIECES", 7)
    asked = iter([False, False, True])
    monkeypatch.setattr(context.control, "stop_requested_anywhere", lambda: next(asked))
    with pytest.raises(GivenUpError):
        keep(Given(items_of("classes")), model_of(), context)
