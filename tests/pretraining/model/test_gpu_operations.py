"""Which operations of a model our kernels for GPUs do, and what is said where Triton cannot be had.

Where there is no GPU, tensors of the host stand for those on one, and Triton's interpreter runs the kernels.
"""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from support.attention import FlashKernels, attend_plainly, furthest, inputs, with_slopes
from support.marks import has_gpu
from support.operations import DEVICE, NONE, ON_DEVICE, as_on_a_gpu, kernels_allowed
from support.pretraining_reference import SMALL, gradients, mean_loss, random_batch
from torch import Tensor

from pretraining.model import attention, gpu_layouts
from pretraining.model import gpu_operations as gpu
from pretraining.model.gpu_layouts import Packed
from pretraining.model.products import multiply_and_pass
from pretraining.objectives.declaration import build_model

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = ON_DEVICE
KERNELS = (
    "gpu_kernels.py",
    "gpu_halves.py",
    "gpu_attention.py",
    "gpu_row_keys.py",
    "gpu_cross_entropy.py",
    "gpu_lamb.py",
)
KEYS = torch.tensor([1, -2], dtype=torch.int32)
NAMES: tuple[gpu.Operation, ...] = (
    "row_keys",
    "gelu",
    "add_and_norm",
    "join",
    "attention",
    "cross_entropy",
    "optimizer",
)


@pytest.mark.kernels
@pytest.mark.parametrize(("recompute", "own"), [(False, False), (True, True)])
def test_a_model_drops_and_learns_as_on_a_cpu(recompute: bool, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout of hidden states, and with our attention of its shares: the same masks, loss and gradients."""
    shape = replace(SMALL, hidden=64, heads=2) if own else replace(SMALL, attention_dropout=0.0)
    if own:
        monkeypatch.setattr(gpu_layouts, "_choice", "own")
        for module in (attention, gpu_layouts):
            monkeypatch.setattr(module, "has_flash", lambda *_: True)
    batch = random_batch([5, 17, 1], shape.vocabulary)
    found: list[list[Tensor]] = []
    for device in ("cpu", DEVICE):
        if found:
            as_on_a_gpu(monkeypatch)
        model = build_model(shape, recompute).initialize(1).to(device)
        model.dropout_seed = 77
        loss = mean_loss(model, batch.to(device))
        loss.backward()
        found.append([loss.detach().cpu(), *(each.cpu() for each in gradients(model).values())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(has_gpu(), reason="the flash kernels have a stand-in here")
@pytest.mark.parametrize(("with_bias", "sight"), [(True, (False, None)), (True, (True, 3)), (False, (False, 3))])
def test_the_flash_kernels_attend_to_products(with_bias: bool, sight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have added their bias already; its gradient comes from our kernel that lays gradients side by side."""
    batch, (qkv, bias) = random_batch([5, 30, 1], 50), inputs(36, 32, torch.bfloat16)
    bias = bias if with_bias else torch.zeros(96, requires_grad=True)
    wanted = attend_plainly(batch, qkv, bias, 2, *sight)
    as_on_a_gpu(monkeypatch)
    called = mock.Mock(side_effect=gpu.join)
    monkeypatch.setattr(gpu, "join", called)
    attend = Packed(batch.starts, 30, *sight).attends_sums(qkv)
    assert attend is not None
    with FlashKernels():
        leaves = [qkv, bias][: 1 + with_bias]
        ours = with_slopes(attend(qkv + bias.detach().to(qkv.dtype), bias if with_bias else None, 2, NONE), *leaves)
    called.assert_called_once()
    assert furthest(ours, wanted[: len(ours)]) < 0.02


@pytest.mark.parametrize("learns", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_of_what_goes_past_a_product_are_added(
    learns: tuple[bool, bool], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 4), (5, 4)))
    bias = torch.ones(5, dtype=torch.float64) if with_bias else None
    leaves = [each.to(DEVICE).requires_grad_(needed) for each, needed in zip((x, weight), learns, strict=True)]
    asked = [leaf for leaf in leaves if leaf.requires_grad]

    def gradients_by(operation: Any) -> tuple[Tensor, ...]:
        product, past = operation(*leaves, None if bias is None else bias.to(DEVICE))
        return torch.autograd.grad(product.sin().sum() + (3 * past[1:]).cos().sum(), asked)

    ours = gradients_by(multiply_and_pass)
    plain = gradients_by(lambda x, weight, bias: (F.linear(x, weight, bias), x))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_few_rows_are_sums_that_do_not_stand_still(dtype: torch.dtype) -> None:
    """Of positions and segments: each row gets the slopes of thousands of pieces, another none."""
    ids = (torch.arange(9000) % 3).to(DEVICE)
    weight = torch.ones(4, 5, dtype=dtype, device=DEVICE).requires_grad_()
    out = gpu.look_up_few(ids, weight)
    out.backward(torch.ones_like(out))
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([3000, 3000, 3000, 0], rel=2**-8)
    slope = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=DEVICE).view(out.shape)
    (ours,) = torch.autograd.grad(gpu.look_up_few(ids, weight), weight, slope)
    (plain,) = torch.autograd.grad(F.embedding(ids, weight.double()), weight, slope.double())
    torch.testing.assert_close(ours, plain, rtol=1e-12 if dtype == torch.float64 else 0.01, atol=1e-9)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets which kernels work, before and after."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(gpu, "_failed", False)
    gpu._works.cache_clear()
    yield
    gpu._works.cache_clear()


def on_a_gpu(width: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """What says that it is a tensor of two rows on the GPU in use."""
    device = torch.device(DEVICE.type, 0)
    return SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(2, width), dim=lambda: 2)


@pytest.mark.usefixtures("fresh")
def test_kernels_are_tried_before_they_are_used() -> None:
    x, masks = on_a_gpu(12), (KEYS, 1, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # ours; NumPy deprecates what Triton 3.6's interpreter does
        for learns in (False, True):
            with torch.set_grad_enabled(learns):
                for operation in ("gelu", "gelu_tanh", "geglu", "rotate", "row_keys"):
                    assert gpu.usable(operation, x)
                assert gpu.usable("drop", x, masks)
                assert gpu.usable("add_and_norm", x, masks)
                assert gpu.usable("add_then_norm", x, masks)
                assert gpu.usable("add_and_norm", x, (KEYS[:0], 1, 0.0))
                assert gpu.usable("attention", on_a_gpu(32))


@pytest.mark.usefixtures("fresh")
def test_what_kernels_cannot_do_is_pytorchs() -> None:
    assert not gpu.usable("drop", on_a_gpu(), (KEYS[:0], 1, 0.1)), "rows without keys"
    assert not gpu.usable("gelu", on_a_gpu(1 << 20))
    assert not gpu.usable("gelu", on_a_gpu(dtype=torch.float64))
    assert not gpu.usable("gelu", torch.zeros(2, 8)), "on the host"
    with kernels_allowed(False):
        assert not gpu.usable("gelu", on_a_gpu())


FAILURES = {
    "Triton is not installed": ModuleNotFoundError("No module named 'triton'"),
    "Triton fails (RuntimeError: no C compiler)": RuntimeError("several lines\nno C compiler\n"),
}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("told", FAILURES)
def test_where_triton_fails_one_warning_says_what_it_costs(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_kernels", mock.Mock(side_effect=FAILURES[told]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert not any(gpu.usable(name, on_a_gpu()) for name in NAMES for _ in range(2))
    (warning,) = warned
    assert str(warning.message).startswith(told)
    assert "twice the bytes" in str(warning.message)
    assert "\n" not in str(warning.message)


def test_triton_is_loaded_by_a_gpu_alone() -> None:
    """Loading takes time, and it may be missing: only a function that a GPU calls imports it."""
    for path in (ROOT / "pretraining").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            assert path.name in KERNELS or not names & {"triton", *(name[:-3] for name in KERNELS)}, path
