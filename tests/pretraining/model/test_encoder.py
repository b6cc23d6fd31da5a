"""What the encoder asks of a GPU and of torch.compile, seen on a CPU."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from support.marks import slow
from support.pretraining_reference import SMALL, gradients, mean_loss, random_batch
from support.watches import OnlyDeterministic, no_waits
from torch._dynamo.utils import counters

from data_prep.common.errors import UserError
from pretraining.model import attention
from pretraining.model import cpu_kernels as kernels
from pretraining.model.attention import Padded
from pretraining.model.bert import FinalLayer, Layer
from pretraining.model.dropout import Dropout
from pretraining.model.encoder import PretrainingModel, require_own_masks
from pretraining.model.gpu_layouts import Packed
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model

SHAPE = replace(SMALL, layers=4, hidden=48, heads=2, intermediate=64)
FEW_LAYERS = replace(SHAPE, layers=3)
BATCHES = ([5, 70, 96, 17], [5, 70], [96] * 7, [64, 64, 64])
"""Sequences of each batch: other pieces, sequences and longest sequences."""
SMALLEST = ([1], [5], [16], [17], [96], [1, 1], [2, 1])
RANDOM = [[random.Random(seed).randint(1, 96) for _ in range(1 + seed % 9)] for seed in range(20)]


@pytest.fixture(params=["flash", "padded"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors take the way of a GPU with flash kernels, and of one without."""
    monkeypatch.setattr(attention, "has_flash", lambda *_: request.param == "flash")


def model_without_data(recompute: bool = False, shape: Shape = SHAPE) -> PretrainingModel:
    with torch.device("meta"):
        return build_model(shape, recompute).bfloat16()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_on_a_gpu_never_waits_for_it(recompute: bool) -> None:
    model = model_without_data(recompute)
    batch = random_batch([5, 70, 96, 17], SHAPE.vocabulary).to("meta")
    with no_waits():
        mean_loss(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype), name


@pytest.mark.usefixtures("gpu")
def test_a_step_on_a_gpu_takes_deterministic_operations() -> None:
    """With what attention and products end in on a GPU, tests there find the same bits twice."""
    batch = random_batch([5, 70, 96, 17], SHAPE.vocabulary).to("meta")
    with OnlyDeterministic() as operations:
        mean_loss(model_without_data(), batch).backward()
    assert {"nll_loss_backward", "embedding_dense_backward"} <= operations.seen


# torch.compile


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile runs what Dynamo has translated as it is; in slow tests what AOT autograd makes of that."""
    backend = "aot_eager" if request.node.get_closest_marker("slow") else "eager"
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))


def count_translations() -> list[int]:
    """Of all layers but the last, and of that."""
    kinds = [kind.forward.__code__ for kind in (Layer, FinalLayer)]
    return [len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(kind)) for kind in kinds]


@pytest.mark.slow
@pytest.mark.usefixtures("gpu", "compiled")
@pytest.mark.parametrize(("gpu", "recompute"), [("flash", True), ("padded", False)], indirect=["gpu"])
def test_all_sizes_need_few_translations(recompute: bool) -> None:
    """Layers share one for batches of training; with evaluation and the smallest batches there are few: Dynamo refuses
    more than eight."""
    model = model_without_data(recompute, FEW_LAYERS)
    model.compile_layers()
    for lengths in BATCHES:
        mean_loss(model, random_batch(lengths, SHAPE.vocabulary).to("meta")).backward()
    assert count_translations() == [1, 1]
    for lengths in (*SMALLEST, *RANDOM):
        batch = random_batch(lengths, SHAPE.vocabulary).to("meta")
        mean_loss(model.train(), batch).backward()
        with torch.no_grad():
            mean_loss(model.eval(), batch)
    assert max(count_translations()) <= 6 < torch._dynamo.config.recompile_limit
    assert not counters["graph_break"]


@pytest.mark.kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("recompute", [False, slow(True)])
def test_compiled_layers_compute_the_same(recompute: bool) -> None:
    """They drop the same too, by the keys of rows: Inductor's own masks repeat in torch 2.13 (pytorch issue 198333)."""
    shape = replace(SHAPE, layers=2, dropout=0.3, attention_dropout=0.0)
    plain, other = (build_model(shape, recompute).initialize(1) for _ in range(2))
    plain.dropout_seed = other.dropout_seed = 7
    other.compile_layers()
    batch = random_batch([5, 70, 96, 17], shape.vocabulary)
    losses = [mean_loss(model, batch) for model in (plain, other)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    for name, wanted in gradients(plain).items():
        torch.testing.assert_close(gradients(other)[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_what_is_not_compiled_keeps_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, heads and optimizers are not compiled."""
    called = []
    monkeypatch.setattr(kernels, "call", lambda name, *_: called.append(name))
    model = build_model(SHAPE).initialize(1)
    model.compile_layers()
    model(random_batch([5, 7], SHAPE.vocabulary))
    assert {"dropout_rows", "gelu_forward", "cross_entropy"} == set(called)


def test_compiled_layers_on_a_gpu_take_no_masks_of_the_compiler() -> None:
    """Without keys of rows, or where attention is PyTorch's own: those masks repeat in torch 2.13."""
    none, keys, starts = torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.tensor([0, 3])
    padded, packed = Padded(starts, 3, 3, False, None), Packed(starts, 3)
    ours = Dropout(0.1, keys).make_compilable(8, 4)
    require_own_masks(ours, Dropout(0.1, keys), packed)
    require_own_masks(Dropout(0.0, none), Dropout(0.0, none), padded)
    for hidden, layout in ((Dropout(0.1, none).make_compilable(8, 4), packed), (ours, padded)):
        with pytest.raises(UserError, match=r"compute.compile = true: not with dropout on this GPU"):
            require_own_masks(hidden, Dropout(0.1, keys), layout)
