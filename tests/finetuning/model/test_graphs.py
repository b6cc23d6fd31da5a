"""Short texts that are filled up to a fixed shape, as CUDA graphs need them, have the answers that they have alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.fine_tuned_models import batch_of
from support.task_models import HEADS, task_weights
from support.transformers_models import SHAPE
from torch import Tensor

from finetuning.model.heads import TaskBatch, TaskModel
from finetuning.model.serving import FilledBatch, Graphs, GraphShape, ServedModel, find_shape
from pretraining.answering import layers
from pretraining.architectures.weights import Kind
from pretraining.model import cpu_kernels
from pretraining.model.attention import Padded
from pretraining.model.layout import Layout
from pretraining.model.shape import Sees

KINDS: tuple[Kind, ...] = ("classes", "score", "choice", "spans")
SEES: tuple[Sees, ...] = ("both", "before", "after")
TEXTS = ((32,), (7,), (33, 2, 40), (1, 2, 3), (40,), (32,) * 6, (30, 1, 32, 5, 9, 12))
LONGEST = SHAPE.positions


def model_of(kind: Kind, sees: Sees, positions: int = LONGEST) -> TaskModel:
    shape = replace(SHAPE, positions=positions).change_learning(sees=sees, pairs=sees == "both")
    model = TaskModel(shape, HEADS[kind])
    model.load_state_dict(task_weights(HEADS[kind], shape=shape))
    return model.eval()


def batches_of(kind: Kind, texts: Sequence[tuple[int, ...]] = TEXTS) -> list[TaskBatch]:
    return [batch_of(kind, lengths) for lengths in texts if kind != "choice" or len(lengths) % 3 == 0]


def lay_out_padded(starts: Tensor, lengths: tuple[int, ...], states: Tensor, heads: int, one_way: bool) -> Layout:
    """Chooses the layout of a GPU in fp32, which takes the lengths of sequences from the device."""
    return Padded(starts, max(lengths), len(states), one_way, None)


@pytest.fixture(autouse=True)
def as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run as on a GPU; what is captured is computed once more."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(cpu_kernels, "_allowed", False)
    monkeypatch.setattr(layers, "lay_out", lay_out_padded)
    monkeypatch.setattr(layers, "can_pack", lambda _: False)
    monkeypatch.setattr(Graphs, "capture", lambda self, batch: lambda: self.compute(batch))


def make_graphs(kind: Kind, sees: Sees = "both") -> Graphs:
    return Graphs(ServedModel(model_of(kind, sees)).logits, kind, LONGEST, torch.device("cpu"))


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_answers_are_those_of_a_text_alone(kind: Kind, sees: Sees) -> None:
    """Also from a graph that was captured with other texts."""
    found, model = make_graphs(kind, sees), model_of(kind, sees)
    for _ in range(2):
        for batch in batches_of(kind):
            torch.testing.assert_close(found.logits(batch), model.logits(batch), atol=1e-5, rtol=1e-5)
    assert set(found.captured) == {find_shape(batch.lengths, LONGEST) for batch in batches_of(kind)}


@given(data=st.data())
def test_what_fills_up_a_batch_is_a_batch(data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 384), min_size=1, max_size=8)))
    shape = GraphShape(1 if len(lengths) == 1 else 8, data.draw(st.sampled_from([64, 128, 384])))
    lengths = tuple(min(length, shape.length) for length in lengths)
    filled, batch = FilledBatch(shape, torch.device("cpu")), batch_of("classes", lengths)
    for wanted in (batch_of("spans", (shape.length,)), batch):  # the second one is written over the first
        filled.write(wanted)
    counts = filled.batch.starts.diff()
    assert filled.batch.starts[[0, -1]].tolist() == [0, shape.rows]
    assert counts.min() >= 0
    assert counts.max() <= shape.length
    assert counts[-len(lengths) :].tolist() == [*lengths]
    own = [each[-sum(lengths) :].tolist() for each in (filled.batch.pieces, filled.batch.segments)]
    assert own == [batch.pieces.tolist(), batch.segments.tolist()]
    positions = torch.cat([torch.arange(count) for count in counts.tolist()])
    assert torch.equal(filled.batch.positions, positions)


@pytest.mark.parametrize("lengths", [(385,), (8,) * 9, (129, 129), (1, 300)])
@torch.inference_mode()
def test_longer_more_and_too_few_texts_are_computed_as_they_are(lengths: tuple[int, ...]) -> None:
    assert find_shape(lengths, 512) is None
    seen = list[TaskBatch]()

    def compute(batch: TaskBatch) -> Tensor:
        seen.append(batch)
        return torch.zeros(len(batch.lengths), 2)

    batch = batch_of("classes", lengths)
    Graphs(compute, "classes", 512, torch.device("cpu")).logits(batch)
    assert seen == [batch]


def fail(self: Graphs, batch: TaskBatch) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def change(self: Graphs, batch: TaskBatch) -> Callable[[], Tensor]:
    return lambda: torch.nextafter(self.compute(batch), torch.tensor(math.inf))


@pytest.mark.parametrize(("capture", "said"), [(fail, "stream is capturing"), (change, "the same bits")])
@torch.inference_mode()
def test_a_graph_that_fails_or_says_something_else_is_not_used(
    capture: Callable[[Graphs, TaskBatch], Callable[[], Tensor]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graphs, "capture", capture)
    found, batch = make_graphs("classes"), batch_of("classes", (9,))
    with pytest.warns(UserWarning, match=said):
        first = found.logits(batch)
    assert torch.equal(found.logits(batch), ServedModel(model_of("classes", "both")).logits(batch))
    torch.testing.assert_close(found.logits(batch), first, atol=1e-5, rtol=1e-5)
    assert not found.captured


LONG = ((1,), (32,), (128,), (384,), (300, 384, 310), (64,) * 8, (120, 60, 128, 90, 100, 77))


def serve(kind: Kind, sees: Sees, dtype: torch.dtype = torch.bfloat16, graphs: bool = True) -> ServedModel:
    return ServedModel(model_of(kind, sees, 512).convert_for_answers(dtype, torch.device("cuda")), graphs=graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_graphs_of_a_gpu_give_the_bits_of_their_kernels(kind: Kind, sees: Sees, dtype: torch.dtype) -> None:
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
