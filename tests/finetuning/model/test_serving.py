"""A served model says what the model says that it was made of: in fp32 to 1e-5, otherwise within rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.task_models import HEADS, task_weights
from support.transformers_models import SHAPE

from data_prep.common.errors import UserError
from finetuning.inputs import Encoded, Sequences
from finetuning.model.heads import TaskBatch, TaskModel
from finetuning.model.serving import ServedModel, check_int8
from finetuning.ragged import Ragged
from finetuning.running.batches import pack
from pretraining.model import cpu_kernels, serving
from pretraining.model.encoder import Linear
from pretraining.model.serving import QuantisedProduct

LENGTHS = (7, 1, 31, 2, 7, 40)
WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "as this machine does": lambda _: None,
    "without packed weights": lambda patch: patch.setattr(serving, "can_pack", lambda _: False),
    "without our kernels": lambda patch: patch.setattr(cpu_kernels, "_allowed", False),
}


def batch_of(lengths: tuple[int, ...], head: str = "classes") -> TaskBatch:
    """Sequences of these lengths: for a head of tags every second piece begins a word, a choice has three."""
    random = np.random.default_rng(0)
    pieces = Ragged.from_rows([random.integers(1, SHAPE.vocabulary, length).astype(np.int32) for length in lengths])
    words = Ragged.from_rows([np.arange(0, length, 2) for length in lengths])
    second = np.array(lengths) // 2 + 1
    choices = 3 if head == "choice" else 1
    encoded = Encoded(Sequences(pieces, second), None, words if head == "tags" else None, choices)
    return pack(encoded, np.arange(len(encoded)))


def model_of(head: str, dtype: torch.dtype = torch.float32) -> TaskModel:
    model = TaskModel(SHAPE, HEADS[head])
    model.load_state_dict(task_weights(HEADS[head]))
    return model.to(dtype).eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
@torch.inference_mode()
def test_fp32_is_equal_to_1e_5(head: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    batch = batch_of(LENGTHS, head)
    expected = model_of(head).logits(batch)
    torch.testing.assert_close(ServedModel(model_of(head)).logits(batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
@torch.inference_mode()
def test_bf16_is_equal_within_its_rounding(head: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to fp32 as the model itself is in bf16, up to chance."""
    WAYS[way](monkeypatch)
    batch = batch_of(LENGTHS, head)
    exact = model_of(head).logits(batch)
    rounding = (model_of(head, torch.bfloat16).logits(batch) - exact).square().mean().sqrt()
    away = (ServedModel(model_of(head, torch.bfloat16)).logits(batch) - exact).square().mean().sqrt()
    assert 0 < away < 2 * rounding


@torch.inference_mode()
def test_int8_is_near_and_does_not_depend_on_neighbours() -> None:
    if not torch.cpu._is_vnni_supported():
        pytest.skip("no products of bytes here")
    exact = model_of("classes").logits(batch_of(LENGTHS))
    served = ServedModel(model_of("classes"), int8=True)
    together = served.logits(batch_of(LENGTHS))
    assert 0 < (together - exact).abs().max() < 0.1 * exact.abs().max()
    alone = served.logits(batch_of(LENGTHS[:1]))
    assert (alone - together[:1]).abs().max() < 0.1 * (together - exact).abs().max()  # a sum may fall to the other byte


@torch.inference_mode()
def test_a_row_of_zeros_is_zero_in_8_bits() -> None:
    if not torch.cpu._is_vnni_supported():
        pytest.skip("no products of bytes here")
    linear = Linear(16, 8)
    torch.nn.init.normal_(linear.weight)
    x = torch.zeros(3, 16)
    x[1] = torch.linspace(-1, 1, 16)
    made = QuantisedProduct(linear)(x)
    assert (made[[0, 2]] == 0).all()
    torch.testing.assert_close(made[1], linear.weight @ x[1], atol=0.05, rtol=0.05)


def test_where_there_is_no_int8_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match='"int8": on a CPU alone'):
        check_int8(torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(UserError, match="no products of bytes"):
        check_int8(torch.device("cpu"))


def test_one_long_text_among_many_short_ones_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer goes through sequences in runs, and says the same."""
    batch = batch_of(LENGTHS)
    whole = ServedModel(model_of("classes")).logits(batch)
    monkeypatch.setattr(serving, "MOST_PADDED", 50)
    torch.testing.assert_close(ServedModel(model_of("classes")).logits(batch), whole)
