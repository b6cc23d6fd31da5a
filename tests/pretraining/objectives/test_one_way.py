"""`ltr` and `rtl` against plain PyTorch, sequence by sequence."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import kernels_allowed
from support.pretraining_reference import SMALL, make_uneven, random_batch
from support.transformers_models import head_logits, random_texts, reference_states
from torch import Tensor

from pretraining.model import encoder
from pretraining.model.attention import Padded
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Objective, build_model, count_step_flops, find_objective, objectives

ONE_WAY = [name for name, objective in objectives().items() if objective.sees != "both"]
SEEDS = st.integers(0, 1000)
LENGTHS = (5, 96, 17, 64, 3)


@pytest.fixture(params=["grouped", "padded", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Once with our kernels, once padded between them, once with PyTorch's operations alone."""
    if request.param == "padded":

        def lay_out(starts: Tensor, lengths: Any, states: Tensor, *given: Any) -> Padded:
            _, one_way, *rest = given
            assert rest[:2] == [None, 0]
            return Padded(starts, max(lengths), len(states), one_way, None)

        monkeypatch.setattr(encoder, "lay_out", lay_out)
    with kernels_allowed(request.param != "torch"):
        yield str(request.param)


def reference_logits(weights: Mapping[str, Tensor], shape: Shape, text: Sequence[int], boundary: int) -> Tensor:
    """Logits of every piece that is predicted, in the order of the text: (length - 1 or length - 2, vocabulary)."""
    hidden = reference_states(weights, shape, text, boundary)
    return head_logits(weights, shape, hidden[:-1] if shape.learns.sees == "before" else hidden[2:])


def made(name: str, **changes: Any) -> tuple[Objective, PretrainingModel]:
    """An objective, and a model of it."""
    objective = objectives()[name]
    shape = replace(SMALL, **changes).change_learning(objective=name, sees=objective.sees, pairs=False)
    return objective, make_uneven(build_model(shape))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ONE_WAY)
def test_logits_loss_and_gradients_are_those_of_the_reference(name: str) -> None:
    objective, model = made(name, dropout=0.0, attention_dropout=0.0)
    rows, texts = random_texts(LENGTHS, SMALL.vocabulary)
    batch, weights = objective.batch(rows), dict(model.named_parameters())
    examples = zip(texts, rows.boundaries, strict=True)
    wanted = torch.cat([reference_logits(weights, model.shape, text, boundary) for text, boundary in examples])
    (found,) = objective.logits(model, model.states_for_heads(batch), batch).values()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    sums, count = model(batch), len(wanted)
    predicted = torch.cat([torch.tensor(text[1:] if objective.sees == "before" else text[1:-1]) for text in texts])
    assert count == len(batch.labels) == objective.predictions(rows.lengths, rows.predictions, 0.0).sum()
    reference = F.cross_entropy(wanted, predicted)
    torch.testing.assert_close(sums.nats / count, reference, rtol=1e-5, atol=1e-5)
    assert int(sums.correct) == int((wanted.argmax(1) == predicted).sum())
    losses, given = (sums.nats / count, reference), list(weights.values())
    ours, theirs = (torch.autograd.grad(loss, given, materialize_grads=True) for loss in losses)
    for label, one, other in zip(weights, ours, theirs, strict=True):
        assert float((one - other).abs().max()) < 1e-5, label


@pytest.mark.parametrize("name", ONE_WAY)
@settings(max_examples=12)
@given(st.integers(2, 130), st.lists(st.integers(1, 130), max_size=3), st.integers(0, 99), st.data())
def test_no_piece_knows_the_answer(name: str, length: int, others: list[int], seed: int, data: st.DataObject) -> None:
    """Other pieces on the side that a piece does not see change no bit of its states, dropout included."""
    _, model = made(name, positions=130)
    model.train().dropout_seed = seed
    one, other = (random_batch([length, *others], SMALL.vocabulary, seed) for _ in range(2))
    at = data.draw(st.integers(1, length - 1))
    unseen = slice(at, length) if model.shape.learns.sees == "before" else slice(at)
    other.pieces[unseen] = (one.pieces[unseen] + 1) % SMALL.vocabulary
    kept = torch.ones(len(one.pieces), dtype=torch.bool)
    kept[unseen] = False
    with torch.no_grad():
        for ours, theirs in zip(model.encode_layers(one), model.encode_layers(other), strict=True):
            assert torch.equal(ours[kept], theirs[kept])
            assert not torch.equal(ours[~kept], theirs[~kept])


@pytest.mark.parametrize("name", objectives())
@settings(max_examples=8)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=4), st.lists(st.integers(1, 130), max_size=4), SEEDS)
def test_a_sequence_does_not_know_its_neighbours(name: str, lengths: list[int], others: list[int], seed: int) -> None:
    """Nor does what it drops depend on them, whichever way it is turned."""
    _, model = made(name, positions=130)
    model.train().dropout_seed = seed
    alone = random_batch(lengths, SMALL.vocabulary, seed)
    together = random_batch([*lengths, *others], SMALL.vocabulary, seed + 1)
    count = len(alone.pieces)
    together.pieces[:count], together.segments[:count] = alone.pieces, alone.segments
    with torch.no_grad():
        ours, theirs = model.encode(alone), model.encode(together)[:count]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        standing = ours[model.sequence_places(alone)]
        last = alone.starts[1:].long() - 1
        assert torch.equal(standing, ours[last if model.shape.learns.sees == "before" else alone.starts[:-1].long()])


@pytest.mark.parametrize("name", ONE_WAY)
def test_flops_are_those_of_half_the_pairs_and_all_predictions(name: str) -> None:
    shape: Shape = made(name)[1].shape
    two_way = shape.change_learning(sees="both", objective="mlm")
    length, h = 96, shape.hidden
    predictions = find_objective(shape).predictions(length, 14, 0.0)
    left = length * length - (length * length + length) / 2
    saved = 3 * shape.layers * 4 * h * left
    assert count_step_flops(shape, [length], predictions) == count_step_flops(two_way, [length], predictions) - saved
    assert predictions == (95 if shape.learns.sees == "before" else 94)
