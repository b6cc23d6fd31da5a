"""Which rank holds what, the two operations of a tensor group, and losses over shares of a vocabulary."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training import run_connected
from torch import Tensor

from pretraining.architectures.declaration import architectures, make_shape
from pretraining.mesh.cuts import Division, cut_tensor, join_shares
from pretraining.mesh.mesh import Mesh, copy_to_tensor_ranks, form_mesh, make_mpu, sum_over_tensor_ranks
from pretraining.model.losses import loss_in_chunks, masked_loss

VOCABULARY, PIECES = 150, 7
LABELS = [0, 127, 128, 149, 5, 140, 128]
"""Also those at the end of the first share, 127, and at the beginning of the second, 128."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_together_are_the_weight(ranks: int) -> None:
    for architecture in architectures():
        sizes: dict[str, Any] = {"layers": 2, "hidden": 96, "heads": 4, "intermediate": 192, "positions": 16}
        shape = replace(make_shape("base" if architecture != "gpt" else "small", 300, architecture), **sizes)
        for weight in architectures()[architecture].weights(shape):
            size = weight.pad_size(shape)
            whole = torch.arange(math.prod(size)).view(size)
            division = Division(weight.cut, weight.role.parts, size[0])
            shares = [cut_tensor(whole, division, rank, ranks) for rank in range(ranks)]
            if weight.cut == "whole":
                assert all(share is whole for share in shares)
            else:
                assert torch.equal(join_shares(shares, division), whole), weight
                assert {share.shape for share in shares} == {shares[0].shape}, weight


def test_a_rank_has_its_heads_of_queries_keys_and_values() -> None:
    parts = torch.arange(3 * 4 * 2).view(3, 4, 2)  # of 4 heads of 2
    shares = [cut_tensor(parts.flatten(0, 1), Division("columns", 3, 12), rank, 2) for rank in range(2)]
    assert torch.equal(shares[0].view(3, 2, 2), parts[:, :2])
    assert torch.equal(shares[1].view(3, 2, 2), parts[:, 2:])
    assert [*Mesh(tensor_rank=1, tensor_ranks=2).select_heads(6)] == [3, 4, 5]


def test_shares_of_a_vocabulary_end_with_zeros() -> None:
    table, division = torch.randn(130, 3), Division("vocabulary", 1, 130)
    shares = [cut_tensor(table, division, rank, 2) for rank in range(2)]
    assert [len(share) for share in shares] == [128, 128]
    assert torch.equal(shares[1][:2], table[128:])
    assert not shares[1][2:].any()


def make_predictions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a decoder with rows that pad it, its bias, and labels; of some predictions two pieces are equally
    likely: 127 and 128, of different shares, and 1 and 3."""
    draw = torch.Generator().manual_seed(3)
    hidden, decoder = torch.randn(PIECES, 16, generator=draw), torch.randn(192, 16, generator=draw)
    bias = torch.randn(192, generator=draw)
    decoder[128], bias[128] = decoder[127], bias[127]
    decoder[3], bias[3] = decoder[1], bias[1]
    hidden[1], hidden[2], hidden[4] = 9 * decoder[127], 9 * decoder[127], 9 * decoder[3]
    decoder[VOCABULARY:], bias[VOCABULARY:] = 0, 1e4  # nobody predicts what pads the vocabulary
    return hidden, decoder, bias, torch.tensor([*LABELS[:4], 3, *LABELS[5:]])


def compute_losses(mesh: Mesh, at_once: int | None, trains: bool) -> list[Tensor]:
    """The loss and the right predictions; where it trains, the gradients of hidden states, decoder and bias too."""
    hidden, decoder, bias, labels = make_predictions()
    division = Division("vocabulary", 1, len(decoder))
    own = mesh.tensor_rank, mesh.tensor_ranks
    decoder, bias = (cut_tensor(each, division, *own).clone() for each in (decoder, bias))
    inputs = [each.requires_grad_(trains) for each in (hidden, decoder, bias)]
    given = (copy_to_tensor_ranks(hidden, mesh), decoder, bias, labels, VOCABULARY)
    with torch.set_grad_enabled(trains):
        loss, right = masked_loss(*given, mesh) if at_once is None else loss_in_chunks(*given, at_once, mesh)
    if trains:
        torch.autograd.backward(3 * loss)
    return [loss.detach(), right, *(each.grad for each in inputs if each.grad is not None)]


def run_operations() -> dict[str, Any]:
    """What a rank of two finds that share a model."""
    mesh = form_mesh(2)
    own = float(mesh.tensor_rank + 1)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    copied = copy_to_tensor_ranks(x * 1.0, mesh)
    torch.autograd.backward((copied * own).t().contiguous().view(-1)[:4].sum())  # its gradient is a view with strides
    y = torch.arange(6.0).view(3, 2).requires_grad_()
    summed = sum_over_tensor_ranks((y * own).t(), mesh)  # not contiguous either
    torch.autograd.backward(summed, torch.tensor([[1.0, 2.0, 3.0]]).t().expand(3, 2).t())
    found: dict[str, Any] = {"mesh": (mesh.data_rank, mesh.data_ranks, mesh.tensor_rank, mesh.tensor_ranks)}
    found |= {"copied": copied.detach(), "copy's gradient": x.grad, "summed": summed.detach(), "sum's": y.grad}
    for at_once in (None, 3):
        for trains in (True, False):
            found[f"{at_once} {trains}"] = compute_losses(mesh, at_once, trains)
    none = x.new_zeros(0, 3), x.new_zeros(128, 3), x.new_zeros(128), torch.zeros(0, dtype=torch.long), 9
    found["no predictions"] = masked_loss(*none, mesh)
    mpu = make_mpu(mesh)
    places = mpu.get_tensor_model_parallel_rank, mpu.get_model_parallel_world_size, mpu.get_data_parallel_rank
    found["mpu"] = tuple(place() for place in places)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_connected(2, run_operations)


def test_tensor_ranks_are_innermost(ranks: list[dict[str, Any]]) -> None:
    assert [rank["mesh"] for rank in ranks] == [(0, 1, 0, 2), (0, 1, 1, 2)]
    assert [rank["mpu"] for rank in ranks] == [(0, 2, 0), (1, 2, 0)]


def test_copies_add_up_their_gradients_and_sums_hand_on_theirs(ranks: list[dict[str, Any]]) -> None:
    """Also where these are not contiguous: the tensor that is reduced is the one that is returned."""
    for number, rank in enumerate(ranks):
        assert torch.equal(rank["copied"], torch.arange(6.0).view(2, 3))
        assert torch.equal(rank["copy's gradient"], torch.tensor([[3.0, 3.0, 0.0], [3.0, 3.0, 0.0]]))
        assert torch.equal(rank["summed"], 3 * torch.arange(6.0).view(3, 2).t())
        assert torch.equal(rank["sum's"], (number + 1.0) * torch.tensor([[1.0, 2.0, 3.0]]).t().expand(3, 2))


@pytest.mark.parametrize("at_once", [None, 3])
@pytest.mark.parametrize("trains", [True, False])
def test_losses_over_shares_are_those_of_the_whole_vocabulary(
    ranks: list[dict[str, Any]], at_once: int | None, trains: bool
) -> None:
    """Ties are told as in a whole vocabulary: the first of equally likely pieces is the choice."""
    loss, right, *gradients = compute_losses(Mesh(), at_once, trains)
    assert int(right) == 1  # 127, but neither 128 beside it nor 3, which comes after 1
    for rank in ranks:
        found_loss, found_right, *_ = rank[f"{at_once} {trains}"]
        torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
        assert int(found_right) == int(right)
    if not trains:
        return
    of_hidden, *of_rows = gradients
    for rank in ranks:
        torch.testing.assert_close(rank[f"{at_once} {trains}"][2], of_hidden, rtol=1e-5, atol=1e-5)
    for index, wanted in enumerate(of_rows):
        joined = torch.cat([rank[f"{at_once} {trains}"][3 + index] for rank in ranks])
        torch.testing.assert_close(joined[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)
        assert not joined[VOCABULARY:].any()


def test_of_no_predictions_there_is_no_loss(ranks: list[dict[str, Any]]) -> None:
    assert [tuple(map(float, rank["no predictions"])) for rank in ranks] == [(0.0, 0.0)] * 2
