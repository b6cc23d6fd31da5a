"""What only a GPU can show: the variable-length kernels, and the model in bf16 on the device."""

from __future__ import annotations

import pytest
import torch
from pretraining_reference import SMALL, mean_loss, random_batch

from pretraining.attention import Layout, _flash, _grouped
from pretraining.model import Bert

pytestmark = pytest.mark.gpu
LENGTHS = [5, 70, 96, 17, 64, 1, 33]


def inputs() -> tuple[list[torch.Tensor], Layout]:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(sum(LENGTHS), 2, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3)]
    batch = random_batch(LENGTHS, 50)
    return parts, Layout(batch.starts.cuda(), batch.lengths)


def test_flash_attention_is_attention_over_each_sequence() -> None:
    parts, layout = inputs()
    outputs, gradients = [], []
    for function in (_flash, _grouped):
        out = function(*parts, layout, 0.0)
        outputs.append(out.float())
        gradients.append([each.float() for each in torch.autograd.grad(out.float().square().sum(), parts)])
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
