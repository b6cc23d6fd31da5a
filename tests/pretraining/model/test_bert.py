"""The model against transformers' own: logits, losses, gradients, and a stretch of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels import kernels_allowed
from support.pretraining_reference import (
    SMALL,
    gradient,
    gradients,
    make_uneven,
    mean_loss,
    pad_batch,
    random_batch,
    their_config,
    their_model,
)
from transformers import BertForMaskedLM

from pretraining.huggingface.weights import import_weights
from pretraining.model import cpu_kernels
from pretraining.model.batch import PretrainingBatches
from pretraining.model.bert import Bert
from pretraining.model.shape import SIZES, Shape
from pretraining.objectives.declaration import build_model, count_step_flops, num_parameters
from pretraining.objectives.mlm import OBJECTIVE as MLM

LENGTHS = (5, 70, 96, 17, 64, 1, 33)


@pytest.fixture(params=["kernels", "torch"])
def either_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with our kernels, once with PyTorch's operations."""
    with kernels_allowed(request.param == "kernels"):
        assert cpu_kernels.usable(torch.zeros(1)) == (request.param == "kernels"), "no C++ compiler"
        yield


def small_model(**changes: Any) -> Bert:
    return make_uneven(build_model(replace(SMALL, **changes)))


@pytest.mark.usefixtures("either_path")
def test_logits_are_those_of_transformers() -> None:
    model, batch = small_model().eval(), random_batch(LENGTHS, SMALL.vocabulary)
    theirs = their_model(model).eval()(**pad_batch(batch))
    masked, following = MLM.logits(model, model.states_for_heads(batch), batch).values()
    chosen = pad_batch(batch)["labels"] != -100
    torch.testing.assert_close(masked, theirs.prediction_logits[chosen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(following, theirs.seq_relationship_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either_path")
def test_loss_and_gradients_are_those_of_transformers() -> None:
    model, batch = small_model(dropout=0.0, attention_dropout=0.0), random_batch(LENGTHS, SMALL.vocabulary)
    theirs = their_model(model)
    loss, reference = mean_loss(model, batch), theirs(**pad_batch(batch)).loss
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)
    loss.backward()
    reference.backward()
    wanted, _ = import_weights(gradients(theirs), SMALL)
    found = {name: ours[: len(wanted[name])] for name, ours in gradients(model).items()}
    for name, ours in found.items():
        error = float((ours - wanted[name][: len(ours)]).abs().max())
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.usefixtures("either_path")
def test_thirty_steps_of_training_follow_transformers() -> None:
    shape = replace(SMALL, dropout=0.0, attention_dropout=0.0)
    model = build_model(shape).initialize(3)
    theirs = their_model(model)
    ours_moves, theirs_moves = (torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (model, theirs))
    for step in range(30):
        batch = random_batch(LENGTHS, SMALL.vocabulary, seed=step % 5)
        loss, reference = mean_loss(model, batch), theirs(**pad_batch(batch)).loss
        assert abs(loss.item() - reference.item()) < 1e-3, f"step {step}"
        for total, moves in ((loss, ours_moves), (reference, theirs_moves)):
            moves.zero_grad()
            total.backward()
            moves.step()
    assert loss.item() < 5, "did not learn"


def test_the_published_sizes_have_the_published_parameters() -> None:
    millions = {name: num_parameters(Shape.from_size(name, 30522)) / 1e6 for name in SIZES}
    assert 109 < millions["base"] < 111
    assert 335 < millions["large"] < 340
    for name in ("tiny", "mini", "medium"):
        shape = Shape.from_size(name, 30522)
        padding = (shape.padded_vocabulary - shape.vocabulary) * (shape.hidden + 1)
        assert sum(parameter.numel() for parameter in build_model(shape).parameters()) - padding == num_parameters(
            shape
        )


@torch.no_grad()
def test_without_pairs_there_is_neither_pooler_nor_next_head() -> None:
    shape = replace(SMALL, pairs=False)
    theirs = BertForMaskedLM(their_config(shape))
    model, whole = build_model(shape).initialize(3), build_model(SMALL).initialize(3)
    padding = (shape.padded_vocabulary - shape.vocabulary) * (shape.hidden + 1)
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, theirs)]
    assert counts[0] - padding == counts[1] == num_parameters(shape) < num_parameters(SMALL)
    assert count_step_flops(shape, [128], 20) < count_step_flops(SMALL, [128], 20)
    batch = random_batch([9, 30], SMALL.vocabulary)
    model.load_state_dict(whole.state_dict(), strict=False)
    losses, both = model.eval()(batch), whole.eval()(batch)
    assert losses._fields == MLM.sums(shape) == ("masked", "masked_correct")
    assert both._fields == MLM.sums(SMALL)
    assert (float(losses.masked), int(losses.masked_correct)) == (float(both.masked), int(both.masked_correct))
    batches = PretrainingBatches((batch,), sequences=2, predictions=len(batch.labels))
    assert float(MLM.loss(losses, batches)) == pytest.approx(float(both.masked) / len(batch.labels))
    assert MLM.logits(model, model.states_for_heads(batch), batch).keys() == {"masked"}


def test_flops_are_those_that_the_peers_count() -> None:
    """Per sequence, forward and backward, the masked head on predictions alone; figures in GFLOP."""
    for name, length, predictions, gigaflops in (
        ("large", 128, 20, 240.6),
        ("large", 512, 80, 1020.5),
        ("base", 128, 20, 69.9),
        ("base", 512, 80, 301.4),
    ):
        assert count_step_flops(Shape.from_size(name, 30522), [length], predictions) / 1e9 == pytest.approx(
            gigaflops, abs=0.06
        )


def test_fresh_weights_are_a_cut_normal_distribution() -> None:
    model = build_model(Shape.from_size("tiny", 1000)).initialize(7)
    weight = model.get_parameter("layers.0.attention.qkv.weight")
    assert weight.abs().max().item() <= 0.04
    assert weight.std().item() == pytest.approx(0.02 * 0.88, rel=0.03)  # the cut at two deviations narrows it
    assert not any(parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))
    assert not model.embeddings.word.weight[1000:].any()
    again = build_model(Shape.from_size("tiny", 1000)).initialize(7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.usefixtures("either_path")
def test_padding_of_the_vocabulary_never_learns() -> None:
    model, batch = small_model(), random_batch(LENGTHS, SMALL.vocabulary)
    mean_loss(model, batch).backward()
    assert not gradient(model.embeddings.word.weight)[SMALL.vocabulary :].any()
    assert not gradient(model.head("masked_head").bias)[SMALL.vocabulary :].any()


def test_recomputing_layers_changes_no_bit() -> None:
    plain, again = small_model(), small_model()
    again.recompute = True
    batch = random_batch(LENGTHS, SMALL.vocabulary)
    for model in (plain, again):
        model.dropout_seed = 5
        mean_loss(model, batch).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(gradient(one), gradient(other))


def test_the_model_in_bf16_stays_near_fp32() -> None:
    batch = random_batch(LENGTHS, SMALL.vocabulary)
    exact, rounded = small_model(), small_model().bfloat16()
    for model in (exact, rounded):
        mean_loss(model, batch).backward()
    for name, wanted in gradients(exact).items():
        distance = (wanted - gradients(rounded)[name].float()).norm() / wanted.norm().clamp(min=1e-6)
        assert float(distance) < 0.05 or float(wanted.norm()) < 1e-3, f"{name}: {float(distance):.3f}"
