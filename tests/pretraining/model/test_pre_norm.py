"""The operations of layers with the norm before the block, gates and rotary positions, against PyTorch's in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import NONE
from support.operations import either as either
from support.operations import gradients, keys_of, same, tensors
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.dropout import Dropout
from pretraining.model.fused import add_then_norm, drop, geglu, gelu, make_turns, rotate

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 80))


@pytest.mark.usefixtures("either")
@settings(max_examples=15, deadline=None)
@given(size=SIZES, scale=st.sampled_from([0.01, 1.0, 5.0, 40.0]))
def test_geglu(size: tuple[int, int], scale: float) -> None:
    (x,) = tensors(4, (size[0], 2 * size[1]))
    left, right = (x * scale).double().chunk(2, 1)
    wanted = (F.gelu(left) * right).float()
    expected = [wanted.detach(), *gradients(wanted, [x])]
    found = geglu(x * scale)
    largest = max(float(each.abs().max()) for each in [*expected, x.detach()])
    same([found, *gradients(found, [x])], expected, 2e-6 * largest)


def norm_of_sum(
    mask: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    total = residual + (x if bias is None else x + bias) * mask
    return total, F.layer_norm(total, weight.shape, weight, shift, 1e-5)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_two_norms_of_a_sum_that_goes_on(biased: bool, probability: float) -> None:
    """The sum has gradients of its own beside those through its norm; the last one has none."""
    x, weight, residual, other, bias, shift = tensors(5, (50, 64), (64,), (50, 64), (50, 64), (64,), (64,))
    inputs = [x, weight, residual, other, *([bias, shift] if biased else [])]
    dropout = Dropout(probability, keys_of(50), site=7)
    if not kernels.usable(x):
        dropout = dropout.make_compilable(8, 64).select_site(7)  # whose masks PyTorch's operations draw by keys too

    def twice(operation: Any, x: Tensor, weight: Tensor, residual: Tensor, other: Tensor, *pair: Tensor) -> Tensor:
        bias, shift = pair or (None, None)
        total, normed = operation(x * 1, bias, residual, weight, shift)
        out: Tensor = operation(normed.sin() * other, None, total, weight, shift)[1]
        return out

    mask = drop(torch.ones(50, 64), dropout).double()
    exact = twice(partial(norm_of_sum, mask), *[each.double() for each in inputs]).float()
    found = twice(lambda *given: add_then_norm(*given, 1e-5, dropout), *inputs)  # type: ignore[call-arg]
    same([found, *gradients(found, inputs)], [exact, *gradients(exact, inputs)], 1e-5)


def rotate_by_transformers(qkv: Tensor, positions: Tensor, base: float, heads: int) -> Tensor:
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    query, key, value = qkv.view(len(qkv), 3, heads, -1).transpose(0, 2)[None].unbind(2)  # (1, heads, n, size)
    size = query.shape[-1]
    angles = positions[:, None].float() * (1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float) / size)))
    whole = torch.cat([angles, angles], 1)[None]
    parts = [*apply_rotary_pos_emb(query, key, whole.cos(), whole.sin()), value]
    return torch.stack([each[0].transpose(0, 1) for each in parts], 1).reshape(qkv.shape)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 20), (1, 2)])
def test_positions_rotate_queries_and_keys_as_in_transformers(heads: int, size: int, dtype: torch.dtype) -> None:
    (qkv,) = tensors(6, (40, 3 * heads * size), dtype=dtype)
    positions = torch.tensor([*range(11), *range(20, 0, -1), 700, 8191])
    turns = make_turns(160_000.0, size, 8192, torch.device("cpu"))
    assert turns is make_turns(160_000.0, size, 8192, torch.device("cpu"))
    found = rotate(qkv * 1, positions, turns, heads)
    assert torch.equal(found[33:], qkv[33:]), "rows behind the last piece"
    assert found.dtype == dtype
    wanted = torch.cat([rotate_by_transformers(qkv[:33], positions, 160_000.0, heads), qkv[33:]])
    close = 2**-7 if dtype == torch.bfloat16 else 1e-6  # also in fp64: transformers rounds queries to fp32
    same([found, *gradients(found, [qkv])], [wanted, *gradients(wanted, [qkv])], close)
    assert torch.equal(found.detach().view(40, 3, -1)[:, 2], qkv.detach().view(40, 3, -1)[:, 2])


@pytest.mark.usefixtures("either")
def test_in_bf16_the_error_is_that_of_rounding() -> None:
    inputs = tensors(7, (33, 96), (96,), (33, 96), dtype=torch.bfloat16)
    x, weight, residual = inputs
    ones, turns = torch.ones(1, dtype=torch.float64), make_turns(10_000.0, 16, 33, torch.device("cpu"))
    cases: list[tuple[Any, Any]] = [
        (lambda: gelu(x * 1, None, tanh=True), lambda x, *_: F.gelu(x, approximate="tanh")),
        (lambda: geglu(x), lambda x, *_: F.gelu(x[:, :48]) * x[:, 48:]),
        (
            lambda: torch.cat(add_then_norm(x * 1, None, residual, weight, None, 1e-5, NONE)),
            lambda x, weight, residual: torch.cat(norm_of_sum(ones, x, None, residual, weight, None)),
        ),
        (
            lambda: rotate(x * 1, torch.arange(33), turns, 2),
            lambda x, *_: rotate_by_transformers(x, torch.arange(33), 10_000.0, 2),
        ),
    ]
    for ours, exact in cases:
        found, wanted = ours(), exact(*[each.double() for each in inputs])
        slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        given = [each for each in inputs if each is x or found.shape[0] > 33]
        both = [torch.autograd.grad(out, given, slope.to(out.dtype)) for out in (found, wanted)]
        for one, other in zip([found, *both[0]], [wanted, *both[1]], strict=True):
            assert float(((one - other).norm() / other.norm()).detach()) < 2**-7


def test_positions_rotate_in_fp64_with_fp64() -> None:
    """Finite differences would show a rounding to fp32."""
    (qkv,) = tensors(9, (4, 3 * 2 * 4), dtype=torch.float64)
    turns = make_turns(10.0, 4, 4, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda x: rotate(x, torch.arange(4), turns, 2), [qkv])


@pytest.mark.slow
def test_a_block_compiles_as_a_whole() -> None:
    """Norm before the block, rotary positions and a gate, by PyTorch's operations, which torch.compile fuses."""
    x, weight, residual = tensors(8, (20, 96), (96,), (20, 96))
    turns, positions = make_turns(10_000.0, 16, 20, torch.device("cpu")), torch.arange(20)
    dropout = Dropout(0.3, keys_of(20))

    def block(x: Tensor, weight: Tensor, residual: Tensor, dropout: Dropout) -> Tensor:
        total, normed = add_then_norm(x * 1, None, residual, weight, None, 1e-5, dropout)
        turned = rotate(gelu(normed * 1, None, tanh=True), positions, turns, 2)
        return geglu(torch.cat([turned, total], 1))

    compiled = torch.compile(block, backend="eager", fullgraph=True, dynamic=True)
    wanted, inputs = block(x, weight, residual, dropout), [x, weight, residual]
    found = compiled(x, weight, residual, dropout.make_compilable(2, 96).select_site(0))
    same([found, *gradients(found, inputs)], [wanted, *gradients(wanted, inputs)])
