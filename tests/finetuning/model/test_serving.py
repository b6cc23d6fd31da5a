"""A served model says what the model says that it was made of: in fp32 to 1e-5, otherwise within rounding; also on
encoders that look one way, where one piece stands for a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.task_items import batch_of
from support.task_models import HEADS, task_weights
from support.transformers_models import PIECES, SHAPE, reference_states, same
from torch import Tensor
from transformers import AutoModel

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning.model.heads import TaskBatch, TaskModel, compute_logits
from finetuning.model.serving import ServedModel, check_int8
from pretraining.answering import layers
from pretraining.answering.layers import QuantisedProduct
from pretraining.architectures.bert import Bert
from pretraining.devices import cpu_has_int8
from pretraining.huggingface.folders import read_fine_tuned, write_fine_tuned
from pretraining.huggingface.model_card import BaseSummary, TaskProvenance, make_task_card
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.model import cpu_kernels
from pretraining.model.modules import Linear
from pretraining.model.shape import Sees, Shape

LENGTHS = (7, 1, 31, 2, 7, 40)
WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "as this machine does": lambda _: None,
    "without packed weights": lambda patch: patch.setattr(layers, "can_pack", lambda _: False),
    "by the layers of training": lambda patch: patch.setattr(Bert, "find_server", lambda _: None),
    "without our kernels": lambda patch: patch.setattr(cpu_kernels, "_allowed", False),
}


def model_of(head: str, dtype: torch.dtype = torch.float32) -> TaskModel:
    model = TaskModel(SHAPE, HEADS[head])
    model.load_state_dict(task_weights(HEADS[head]))
    return model.to(dtype).eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
@torch.inference_mode()
def test_answers_are_those_of_the_model(head: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 as near to fp32 as the model itself is in bf16, up to chance."""
    WAYS[way](monkeypatch)
    batch = batch_of(head, LENGTHS)
    exact = model_of(head).logits(batch)
    torch.testing.assert_close(ServedModel(model_of(head)).logits(batch), exact, atol=1e-5, rtol=1e-5)
    rounding = (model_of(head, torch.bfloat16).logits(batch) - exact).square().mean().sqrt()
    away = (ServedModel(model_of(head, torch.bfloat16)).logits(batch) - exact).square().mean().sqrt()
    assert 0 < away < 2 * rounding


@torch.inference_mode()
def test_int8_is_near_and_does_not_depend_on_neighbours() -> None:
    if not cpu_has_int8():
        pytest.skip("no products of bytes here")
    exact = model_of("classes").logits(batch_of("classes", LENGTHS))
    served = ServedModel(model_of("classes"), int8=True)
    together = served.logits(batch_of("classes", LENGTHS))
    assert 0 < (together - exact).abs().max() < 0.1 * exact.abs().max()
    alone = served.logits(batch_of("classes", LENGTHS[:1]))
    assert (alone - together[:1]).abs().max() < 0.1 * (together - exact).abs().max()  # a sum may fall to the other byte


@torch.inference_mode()
def test_a_row_of_zeros_is_zero_in_8_bits() -> None:
    if not cpu_has_int8():
        pytest.skip("no products of bytes here")
    linear = Linear(16, 8)
    torch.nn.init.normal_(linear.weight)
    x = torch.zeros(3, 16)
    x[1] = torch.linspace(-1, 1, 16)
    made = QuantisedProduct(linear)(x)
    assert (made[[0, 2]] == 0).all()
    torch.testing.assert_close(made[1], linear.weight @ x[1], atol=0.05, rtol=0.05)


def test_where_there_is_no_int8_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not on cuda for BERT here" in refusal(check_int8, torch.device("cuda"), SHAPE)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert "needs a CPU with products of bytes" in refusal(check_int8, torch.device("cpu"), SHAPE)
    monkeypatch.setattr(Bert, "find_server", lambda _: None)
    assert "not on cpu for BERT here" in refusal(check_int8, torch.device("cpu"), SHAPE)


def test_one_long_text_among_many_short_ones_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer goes through sequences in runs, and says the same."""
    batch = batch_of("classes", LENGTHS)
    whole = ServedModel(model_of("classes")).logits(batch)
    monkeypatch.setattr(layers, "MOST_PADDED", 50)
    torch.testing.assert_close(ServedModel(model_of("classes")).logits(batch), whole)


# Encoders that look one way


SIZES = (7, 3, 31, 2, 7, 40)
SEES: tuple[Sees, ...] = ("before", "after")


def shape_of(sees: Sees) -> Shape:
    return SHAPE.change_learning(sees=sees, pairs=False)


def reference(weights: dict[str, Tensor], shape: Shape, batch: TaskBatch, kind: str) -> Tensor:
    """The logits of a head in plain PyTorch, sequence by sequence."""
    rows = []
    for number, (begin, length) in enumerate(zip(batch.starts.tolist(), batch.lengths, strict=False)):
        pieces = batch.pieces[begin : begin + length].tolist()
        states = reference_states(weights, shape, pieces, SIZES[number] // 2 + 1)
        if kind == "tags":
            states = states[::2]
        elif kind != "spans":
            one = states[-1:] if shape.learns.sees == "before" else states[:1]
            states = torch.tanh(one @ weights["pooler.weight"].T + weights["pooler.bias"])
        rows.append(states @ weights["head.weight"].T + weights["head.bias"])
    return torch.cat(rows).view(-1, 3) if kind == "choice" else torch.cat(rows)


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", HEADS)
@torch.inference_mode()
def test_a_text_is_read_from_the_piece_that_sees_all_of_it(kind: str, sees: Sees) -> None:
    shape, batch = shape_of(sees), batch_of(kind, SIZES)
    weights = task_weights(HEADS[kind], shape=shape)
    models = [TaskModel(shape, HEADS[kind]) for _ in range(2)]
    for model in models:
        model.load_state_dict(weights)
    wanted = reference(weights, shape, batch, kind)
    torch.testing.assert_close(models[0].eval().logits(batch), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(ServedModel(models[1]).logits(batch), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_folder_says_it_and_is_refused_where_nobody_else_computes_it(kind: str, sees: Sees, tmp_path: Path) -> None:
    shape, head = shape_of(sees), HEADS[kind]
    weights = task_weights(head, shape=shape)
    vocabulary = WordPiece(PIECES, cased=False)
    out = tmp_path / "out"
    card = make_task_card(shape, head, out, 16, TaskProvenance("toy", BaseSummary("base", on_hub=False)))
    write_fine_tuned(out, shape, head, weights, vocabulary, card, {}, 16)
    readers = verify_fine_tuned(out, shape, head, weights, compute_logits, vocabulary.special)
    read, read_head, state = read_fine_tuned(out)
    assert (read, read_head) == (shape.encoder, head)
    assert same(state, weights)
    if sees == "before" and kind in ("spans", "tags"):  # transformers computes these one way, and agrees
        assert [*readers] == ["Cloze", "transformers"]
        assert "No class" not in card
        return
    assert [*readers] == ["Cloze"]
    assert "No class of transformers" in card
    assert "library_name" not in card
    with pytest.raises(ValueError, match="cloze-"):
        AutoModel.from_pretrained(out)
