"""Short texts that are filled up to a fixed shape, as CUDA graphs need them, have the answers that they have alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.task_items import batch_of
from support.task_models import HEADS, task_weights
from support.transformers_models import SHAPE
from torch import Tensor

from finetuning.model import graphs
from finetuning.model.graphs import Graphs, find_shape
from finetuning.model.heads import TaskBatch, TaskModel
from finetuning.model.serving import ServedModel
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


def model_of(kind: Kind, sees: Sees, where: torch.device | str = "cpu") -> TaskModel:
    shape = SHAPE.change_learning(sees=sees, pairs=sees == "both")
    model = TaskModel(shape, HEADS[kind])
    model.load_state_dict(task_weights(HEADS[kind], shape=shape))
    return model.to(where).eval()


def batches_of(kind: Kind) -> list[TaskBatch]:
    return [batch_of(kind, lengths) for lengths in TEXTS if kind != "choice" or len(lengths) % 3 == 0]


def lay_out_padded(starts: Tensor, lengths: tuple[int, ...], states: Tensor, heads: int, **given: bool) -> Layout:
    """Chooses the layout of a GPU in fp32, which takes the lengths of sequences from the device."""
    return Padded(starts, max(lengths), len(states), **given)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run as on a GPU; what is captured is computed once more."""
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


@pytest.mark.parametrize("lengths", [(385,), (8,) * 9])
@torch.inference_mode()
def test_longer_and_more_texts_are_computed_as_they_are(lengths: tuple[int, ...]) -> None:
    assert find_shape(lengths, LONGEST) is None
    seen = list[TaskBatch]()

    def compute(batch: TaskBatch) -> Tensor:
        seen.append(batch)
        return torch.zeros(len(batch.lengths), 2)

    batch = batch_of("classes", lengths)
    Graphs(compute, "classes", LONGEST, torch.device("cpu")).logits(batch)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_graphs_of_a_gpu_give_the_same_bits(
    kind: Kind, sees: Sees, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    served = ServedModel(model_of(kind, sees).convert_for_answers(dtype, torch.device("cuda")))
    assert served.graphs is not None
    for batch in batches_of(kind) * 2:
        shape = graphs.find_shape(batch.lengths, LONGEST)
        assert shape is not None
        filled = graphs.FilledBatch(shape, served.device)
        filled.write(batch)
        wanted = served.graphs.take(served.graphs.compute(filled.batch), batch)
        assert torch.equal(served.logits(batch), wanted)
    assert not served.graphs.failed
    assert len(served.graphs.captured) == len({graphs.find_shape(batch.lengths, LONGEST) for batch in batches_of(kind)})
