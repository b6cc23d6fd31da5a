"""A served model says what the model says that it was made of: in fp32 to 1e-5, otherwise within rounding; on encoders
that look one way, where one piece stands for a text; and from short texts that are filled up to a fixed shape, as CUDA
graphs need them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.base_models import HEADS, task_weights
from support.commands import refusal
from support.fine_tuned_models import batch_of
from support.transformers_models import PIECES, SHAPE, reference_states, same
from torch import Tensor
from transformers import AutoModel

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning.model import serving
from finetuning.model.heads import TaskBatch, TaskModel, compute_logits
from finetuning.model.serving import FilledBatch, Graphs, GraphShape, ServedModel, check_int8, find_shape
from pretraining.answering import layers
from pretraining.answering.layers import QuantisedProduct
from pretraining.answering.one_call import BYTES, can_multiply
from pretraining.architectures.bert import Bert
from pretraining.devices import cpu_has_int8
from pretraining.huggingface.folders import read_fine_tuned, write_fine_tuned
from pretraining.huggingface.model_card import BaseSummary, TaskProvenance, make_task_card
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.model import cpu_kernels
from pretraining.model.attention import Padded
from pretraining.model.layout import Layout
from pretraining.model.modules import Linear
from pretraining.model.shape import Sees, Shape

LENGTHS = (7, 1, 31, 2, 7, 40)
WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "as this machine does": lambda _: None,
    "without packed weights": lambda patch: patch.setattr(layers, "can_pack", lambda _: False),
    "by the layers of training": lambda patch: patch.setattr(Bert, "find_server", lambda _: None),
    "without our kernels": lambda patch: patch.setattr(cpu_kernels, "_allowed", False),
}
PANELS = replace(SHAPE, hidden=64, intermediate=96)
WITH_INT8 = [
    pytest.param(shape, marks=pytest.mark.skipif(not can, reason="no products of bytes here"))
    for shape, can in ((SHAPE, cpu_has_int8()), (PANELS, cpu_has_int8() or can_multiply(BYTES)))
]


def model_of(head: str, dtype: torch.dtype = torch.float32, shape: Shape = SHAPE) -> TaskModel:
    model = TaskModel(shape, HEADS[head])
    model.load_state_dict(task_weights(HEADS[head], shape=shape))
    return model.to(dtype).eval()


def shape_of(sees: Sees, positions: int = SHAPE.positions) -> Shape:
    return replace(SHAPE, positions=positions).change_learning(sees=sees, pairs=sees == "both")


CASES = [(head, way) for way in WAYS for head in (HEADS if way == "as this machine does" else ("classes", "tags"))]


@pytest.mark.parametrize(("head", "way"), CASES)
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


@pytest.mark.parametrize("shape", WITH_INT8)
@torch.inference_mode()
def test_int8_is_near_and_does_not_depend_on_neighbours(shape: Shape) -> None:
    check_int8(torch.device("cpu"), shape)
    exact = model_of("classes", shape=shape).logits(batch_of("classes", LENGTHS))
    served = ServedModel(model_of("classes", shape=shape), int8=True)
    together = served.logits(batch_of("classes", LENGTHS))
    assert 0 < (together - exact).abs().max() < 0.1 * exact.abs().max()
    alone = served.logits(batch_of("classes", LENGTHS[:1]))
    assert (alone - together[:1]).abs().max() < 0.1 * (together - exact).abs().max()  # a sum may fall to the other byte


@pytest.mark.skipif(not cpu_has_int8(), reason="no products of bytes here")
@torch.inference_mode()
def test_a_row_of_zeros_is_zero_in_int8() -> None:
    linear, x = Linear(16, 8), torch.zeros(3, 16)
    torch.nn.init.normal_(linear.weight)
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


def reference(weights: dict[str, Tensor], shape: Shape, batch: TaskBatch, kind: str) -> Tensor:
    """The logits of a head in plain PyTorch, sequence by sequence."""
    rows = []
    for number, pieces in enumerate(torch.split(batch.pieces, list(batch.lengths))):
        states = reference_states(weights, shape, pieces.tolist(), SIZES[number] // 2 + 1)
        if kind == "tags":
            states = states[::2]
        elif kind != "spans":
            one = states[-1:] if shape.learns.sees == "before" else states[:1]
            states = torch.tanh(one @ weights["pooler.weight"].T + weights["pooler.bias"])
        rows.append(states @ weights["head.weight"].T + weights["head.bias"])
    return torch.cat(rows).view(-1, 3) if kind == "choice" else torch.cat(rows)


@pytest.mark.parametrize("sees", ["before", "after"])
@pytest.mark.parametrize("kind", ["classes", "choice", "spans", "tags"])
@torch.inference_mode()
def test_a_text_is_read_from_the_piece_that_sees_all_of_it(kind: str, sees: Sees) -> None:
    shape, batch = shape_of(sees), batch_of(kind, SIZES)
    wanted = reference(task_weights(HEADS[kind], shape=shape), shape, batch, kind)
    for model in (model_of(kind, shape=shape), ServedModel(model_of(kind, shape=shape))):
        torch.testing.assert_close(model.logits(batch), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sees"), [*((kind, "before") for kind in HEADS), ("classes", "after"), ("spans", "after")]
)
def test_a_folder_says_it_and_is_refused_where_nobody_else_computes_it(kind: str, sees: Sees, tmp_path: Path) -> None:
    """transformers computes spans and tags of one way, and agrees."""
    shape, head, out = shape_of(sees), HEADS[kind], tmp_path / "out"
    weights, vocabulary = task_weights(head, shape=shape), WordPiece(PIECES, cased=False)
    card = make_task_card(shape, head, out, 16, TaskProvenance("toy", BaseSummary("base", on_hub=False)))
    write_fine_tuned(out, shape, head, weights, vocabulary, card, {}, 16)
    readers = verify_fine_tuned(out, shape, head, weights, compute_logits, vocabulary.special)
    read, read_head, state = read_fine_tuned(out)
    assert (read, read_head, same(state, weights)) == (shape.encoder, head, True)
    both = sees == "before" and kind in ("spans", "tags")
    assert [*readers] == ["Cloze", "transformers"][: 1 + both]
    assert ("No class of transformers" in card, "library_name" in card) == (not both, both)
    if not both:
        with pytest.raises(ValueError, match="cloze-"):
            AutoModel.from_pretrained(out)


# Graphs


KINDS = ("classes", "score", "choice", "spans")
TEXTS = ((32,), (7,), (33, 2, 40), (1, 2, 3), (40,), (32,) * 6, (30, 1, 32, 5, 9, 12))


def batches_of(kind: str, texts: Sequence[tuple[int, ...]] = TEXTS) -> list[TaskBatch]:
    return [batch_of(kind, lengths) for lengths in texts if kind != "choice" or len(lengths) % 3 == 0]


def lay_out_padded(starts: Tensor, lengths: tuple[int, ...], states: Tensor, heads: int, one_way: bool) -> Layout:
    """Chooses the layout of a GPU in fp32, which takes the lengths of sequences from the device."""
    return Padded(starts, max(lengths), len(states), one_way, None)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run as on a GPU; what is captured is computed once more."""
    monkeypatch.setattr(cpu_kernels, "_allowed", False)
    monkeypatch.setattr(layers, "lay_out", lay_out_padded)
    monkeypatch.setattr(layers, "can_pack", lambda _: False)
    monkeypatch.setattr(serving, "capture", lambda work, pool: (work, pool))


def make_graphs(kind: str, sees: Sees = "both") -> Graphs:
    served = ServedModel(model_of(kind, shape=shape_of(sees)))
    return Graphs(served.logits, HEADS[kind].kind, SHAPE.positions, torch.device("cpu"))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("kind", "sees"),
    [("classes", "both"), ("score", "before"), ("choice", "after"), ("spans", "both"), ("spans", "before")],
)
@torch.inference_mode()
def test_answers_are_those_of_a_text_alone(kind: str, sees: Sees) -> None:
    """Also from a graph that was captured with other texts."""
    found, model = make_graphs(kind, sees), model_of(kind, shape=shape_of(sees))
    for batch in batches_of(kind) * 2:
        torch.testing.assert_close(found.logits(batch), model.logits(batch), atol=1e-5, rtol=1e-5)
    assert set(found.captured) == {find_shape(batch.lengths, SHAPE.positions) for batch in batches_of(kind)}


@settings(max_examples=40)
@given(st.lists(st.integers(1, 384), min_size=1, max_size=8), st.sampled_from([64, 128, 384]))
def test_what_fills_up_a_batch_is_a_batch(sizes: list[int], longest: int) -> None:
    shape, lengths = GraphShape(1 if len(sizes) == 1 else 8, longest), tuple(min(size, longest) for size in sizes)
    filled, batch = FilledBatch(shape, torch.device("cpu")), batch_of("classes", lengths)
    for wanted in (batch_of("spans", (shape.length,)), batch):  # the second one is written over the first
        filled.write(wanted)
    counts = filled.batch.starts.diff()
    assert filled.batch.starts[[0, -1]].tolist() == [0, shape.rows]
    assert 0 <= counts.min() <= counts.max() <= shape.length
    assert counts[-len(lengths) :].tolist() == [*lengths]
    own = [each[-sum(lengths) :].tolist() for each in (filled.batch.pieces, filled.batch.segments)]
    assert own == [batch.pieces.tolist(), batch.segments.tolist()]
    assert torch.equal(filled.batch.positions, torch.cat([torch.arange(count) for count in counts.tolist()]))


@pytest.mark.parametrize("lengths", [(385,), (8,) * 9, (129, 129), (1, 300)])
@torch.inference_mode()
def test_longer_more_and_too_few_texts_are_computed_as_they_are(lengths: tuple[int, ...]) -> None:
    assert find_shape(lengths, 512) is None
    compute, batch = Mock(), batch_of("classes", lengths)
    Graphs(compute, "classes", 512, torch.device("cpu")).logits(batch)
    compute.assert_called_once_with(batch)


def fail(work: Callable[[], Tensor], pool: None) -> tuple[Callable[[], Tensor], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def change(work: Callable[[], Tensor], pool: None) -> tuple[Callable[[], Tensor], None]:
    return lambda: torch.nextafter(work(), torch.tensor(math.inf)), pool


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("capture", "said"), [(fail, "stream is capturing"), (change, "the same bits")])
@torch.inference_mode()
def test_a_graph_that_fails_or_says_something_else_is_not_used(
    capture: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "capture", capture)
    found, batch = make_graphs("classes"), batch_of("classes", (9,))
    with pytest.warns(UserWarning, match=said):
        first = found.logits(batch)
    assert torch.equal(found.logits(batch), ServedModel(model_of("classes")).logits(batch))
    torch.testing.assert_close(found.logits(batch), first, atol=1e-5, rtol=1e-5)
    assert not found.captured


LONG = ((1,), (32,), (128,), (384,), (300, 384, 310), (64,) * 8, (120, 60, 128, 90, 100, 77))


def serve(kind: str, sees: Sees, dtype: torch.dtype = torch.bfloat16, graphs: bool = True) -> ServedModel:
    model = model_of(kind, shape=shape_of(sees, 512))
    return ServedModel(model.convert_for_answers(dtype, torch.device("cuda")), graphs=graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sees", ["both", "before", "after"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_graphs_of_a_gpu_give_the_bits_of_their_kernels(kind: str, sees: Sees, dtype: torch.dtype) -> None:
    served, other = serve(kind, sees, dtype), serve(kind, sees, dtype, graphs=False)
    assert served.graphs is not None
    for batch in batches_of(kind, LONG) * 2:
        found = served.logits(batch)
        if (shape := find_shape(batch.lengths, 512)) is not None:
            filled = FilledBatch(shape, served.device)
            filled.write(batch)
            assert torch.equal(found, served.graphs.take(served.graphs.compute(filled.batch), batch))
        close = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(found, other.logits(batch).cpu(), atol=close, rtol=close)
    assert not served.graphs.failed
    assert served.graphs.captured


@pytest.mark.gpu
@torch.inference_mode()
def test_a_capture_that_fails_on_a_gpu_leaves_everything_as_it_was() -> None:
    served, batch = serve("classes", "both"), batch_of("classes", (32,))
    assert served.graphs is not None
    wanted, compute, stream = served.logits(batch), served.graphs.compute, torch.cuda.current_stream()

    def wait_too(batch: TaskBatch) -> Tensor:
        logits = compute(batch)
        return logits + 0 * logits.sum().item()  # waits for the GPU, which no graph can

    served.graphs.compute, served.graphs.captured = wait_too, {}
    with pytest.warns(UserWarning, match="CUDA graphs do not work here"):
        assert torch.equal(served.logits(batch), wanted)
    assert torch.cuda.current_stream() == stream
    torch.testing.assert_close(served.logits(batch).cpu(), wanted, atol=0.1, rtol=0.1)
