"""What the encoder asks of a GPU, seen on a CPU."""

from dataclasses import replace

import pytest
import torch
from support.pretraining_reference import SMALL, mean_loss, random_batch
from support.watches import OnlyDeterministic, no_waits

from pretraining.model import attention
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model

SHAPE = replace(SMALL, layers=4, hidden=48, heads=2, intermediate=64)


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
