"""What only a GPU can show: the variable-length kernels, and the model in bf16 on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import apex_kernels
from support.pretraining_reference import SMALL, mean_loss, random_batch

from benchmarks.exactness import NVIDIA, error, make_engine, reference, run_engine
from pretraining.engine.apex import lamb_updates
from pretraining.model.attention import Layout, _flash, _grouped
from pretraining.model.bert import Bert
from pretraining.processes.group import connect, disconnect
from pretraining.processes.launchers import World

pytestmark = pytest.mark.gpu
LENGTHS = [5, 70, 96, 17, 64, 1, 33]


def inputs() -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Layout]:
    """Queries, keys and values of packed sequences."""
    generator = torch.Generator().manual_seed(1)
    shape, batch = (sum(LENGTHS), 2, 64), random_batch(LENGTHS, 50)
    query, key, value = (torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
    return (query, key, value), Layout(batch.starts.cuda(), batch.lengths)


def test_flash_attention_is_attention_over_each_sequence() -> None:
    parts, layout = inputs()
    outputs, gradients = [], []
    for function in (_flash, _grouped):
        out = function(*parts, layout, 0.0)
        outputs.append(out.float())
        gradients.append([slopes.float() for slopes in torch.autograd.grad(out.float().square().sum(), parts)])
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.02


def test_dropout_of_attention_is_honoured() -> None:
    """The mean over many draws is what comes without dropout, and single draws are not."""
    parts, layout = inputs()
    with torch.no_grad():
        exact = _grouped(*parts, layout, 0.0).float()
        draws = torch.stack([_flash(*parts, layout, 0.3).float() for _ in range(300)])
    assert float((draws[0] - exact).norm() / exact.norm()) > 0.1
    assert float((draws.mean(0) - exact).norm() / exact.norm()) < 0.1


def test_the_model_computes_what_it_does_on_a_cpu() -> None:
    batch = random_batch(LENGTHS, SMALL.vocabulary)
    ours, theirs = Bert(SMALL).initialize(1).eval(), Bert(SMALL).initialize(1).eval().cuda()
    with torch.no_grad():
        exact = mean_loss(ours, batch)
        assert mean_loss(theirs, batch.to("cuda")).item() == pytest.approx(exact.item(), rel=1e-4)
        assert mean_loss(theirs.bfloat16(), batch.to("cuda")).item() == pytest.approx(exact.item(), rel=2e-2)


LAMB = [("fp32", zero) for zero in range(4)] + [(dtype, zero) for dtype in ("bf16", "fp16") for zero in (1, 2, 3)]


@pytest.fixture
def one_rank() -> Iterator[None]:
    connect(World(), torch.device("cuda", 0))
    yield
    disconnect()


@pytest.mark.parametrize(("dtype", "zero"), LAMB)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.usefixtures("one_rank")
def test_lamb_is_lamb_on_one_process(dtype: str, zero: int, kernels: str) -> None:
    """By PyTorch alone, and by NVIDIA apex where it is installed. The forces are exact in bf16, nearly so in fp16,
    where the scale of the loss grows on the way."""
    chosen = {**NVIDIA, "kernels": kernels}
    weights, ratios = run_engine(make_engine(dtype, zero, chosen, device="cuda"))
    wanted, wanted_ratios = reference(1, chosen)
    tolerance = 2**-10 if dtype == "fp16" else 1e-6
    assert error(weights, wanted) < tolerance
    assert ratios == pytest.approx(wanted_ratios, rel=tolerance)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.usefixtures("one_rank")
def test_lamb_with_the_optimizer_in_the_hosts_memory(zero: int) -> None:
    weights, _ = run_engine(make_engine("bf16", zero, NVIDIA, offload="optimizer", device="cuda"))
    assert error(weights, reference(1, NVIDIA)[0]) < 1e-6


def test_apex_moves_as_what_stands_for_it() -> None:
    """Tests without a GPU rest on that."""
    amp_c = pytest.importorskip("amp_C", reason="NVIDIA apex is not installed")
    lists = [[torch.randn(size, device="cuda") for size in (7, 70_000)] for _ in range(3)]
    lists.append([torch.rand(size, device="cuda") for size in (7, 70_000)])
    twins = [[tensor.clone() for tensor in tensors] for tensors in lists]
    options: dict[str, Any] = {"decay": 0.01, "steps": 3.0, "betas": (0.9, 0.999), "epsilon": 1e-6, "corrected": True}
    updates, squares = lamb_updates(amp_c, lists, **options)
    wanted, wanted_squares = lamb_updates(apex_kernels, twins, **options)
    for one, other in zip([*updates, *lists[2], *lists[3]], [*wanted, *twins[2], *twins[3]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(squares, wanted_squares, rtol=1e-6, atol=0)
