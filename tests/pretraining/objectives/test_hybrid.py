"""`hybrid` against plain PyTorch, sequence by sequence: some see what is before, the others both sides and masks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.commands import assert_refusal
from support.operations import kernels_allowed
from support.pretraining_reference import SMALL, make_uneven
from support.transformers_models import MASK, SEP, head_logits, next_logits, random_texts, reference_states
from torch import Tensor

from data_prep.common.arrays import Array
from pretraining.architectures.declaration import make_shape
from pretraining.config.settings import Objective as Settings
from pretraining.model.batch import PretrainingBatches
from pretraining.model.encoder import PretrainingModel
from pretraining.model.losses import keep_losses
from pretraining.model.rows import Draw, Rows
from pretraining.model.shape import Learning, Shape
from pretraining.objectives.declaration import build_model, choose_way, configure_objective, count_step_flops
from pretraining.objectives.hybrid import Hybrid

LENGTHS = (5, 96, 17, 64, 3, 33)
SHARE = 0.4
DRAWN = np.arange(100, dtype=np.uint64)


def make_hybrid(**settings: object) -> Hybrid:
    """The objective of a recipe with these settings."""
    found = configure_objective(Settings.model_validate({"name": "hybrid", "causal_share": SHARE, **settings}))
    assert isinstance(found, Hybrid)
    return found


def shape_of(objective: Hybrid, pairs: bool = False) -> Shape:
    return replace(SMALL, learns=objective.learning(pairs), dropout=0.0, attention_dropout=0.0)


def draw_for(objective: Hybrid, one_way: int, count: int) -> Draw:
    """Random keys of examples of which the first `one_way` are read left to right."""
    drawn = objective.draw_one_way(DRAWN)
    assert drawn is not None
    keys = [*DRAWN[drawn][:one_way], *DRAWN[~drawn][: count - one_way]]
    return Draw(np.array(keys), 0.5, SMALL.vocabulary, MASK, SEP)


def reference_losses(
    weights: Mapping[str, Tensor], shape: Shape, rows: Rows, texts: list[list[int]], one_way: int
) -> list[Tensor]:
    """The losses of the pieces that are read left to right, of the masked ones, and of whether B follows A."""
    nats: list[list[Tensor]] = [[], [], []]
    places = np.split(rows.positions, np.cumsum(rows.predictions)[:-1])
    hidden = np.split(rows.pieces, np.cumsum(rows.lengths)[:-1])
    for number, text in enumerate(texts):
        masked = number >= one_way
        way = shape.change_learning(sees="both" if masked else "before")
        seen = hidden[number].tolist() if masked else text
        states = reference_states(weights, way, seen, rows.boundaries[number])
        asked = places[number] if masked else np.arange(1, len(text))
        logits = head_logits(weights, shape, states[asked - 1])
        nats[masked].append(F.cross_entropy(logits, torch.tensor(text)[asked], reduction="none"))
        if masked and shape.learns.pairs:
            label = torch.tensor(rows.random_next[number])
            nats[2].append(F.cross_entropy(next_logits(weights, states), label, reduction="none")[None])
    return [torch.cat(each) if each else torch.zeros(0) for each in nats]


@pytest.fixture(params=["grouped", "torch", "fp64"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Once with our kernels, once padded with PyTorch's operations, and these once in fp64 without exception."""
    if request.param == "fp64":
        monkeypatch.setattr(Tensor, "float", Tensor.double)
    with kernels_allowed(request.param == "grouped"):
        yield str(request.param)


@pytest.mark.parametrize(("one_way", "pairs"), [(0, False), (3, True), (len(LENGTHS), False)])
def test_loss_and_gradients_are_those_of_the_reference(way: str, one_way: int, pairs: bool) -> None:
    """Of batches with sequences of both kinds, or of one; loss as it is minimised."""
    objective = make_hybrid()
    model: PretrainingModel = make_uneven(build_model(shape_of(objective, pairs)))
    if way == "fp64":
        model = model.double()
        model.head("masked_head").at_once = None  # chunks add up in fp32
    rows, texts = random_texts(LENGTHS, SMALL.vocabulary)
    batch = objective.batch(rows, draw_for(objective, one_way, len(LENGTHS)))
    weights = dict(model.named_parameters())
    left, masked, following = reference_losses(weights, model.shape, rows, texts, one_way)
    with keep_losses() as kept:
        sums = model(batch)
    torch.testing.assert_close(torch.cat(kept).double(), torch.cat([left, masked]).double(), rtol=1e-4, atol=1e-4)
    assert (int(sums.one_way), len(batch.labels)) == (len(left), len(left) + len(masked))
    share = SHARE if len(left) and len(masked) else float(len(left) > 0)
    means = [each.mean() if len(each) else torch.zeros(()) for each in (left, masked, following)]
    reference = share * means[0] + (1 - share) * (means[1] + means[2])
    predictions = len(left) + len(masked)
    loss = objective.loss(sums, PretrainingBatches((batch,), len(LENGTHS), predictions, 0, len(left), one_way))
    tolerance = 1e-10 if way == "fp64" else 1e-5
    torch.testing.assert_close(loss, reference, rtol=tolerance, atol=tolerance)
    given = list(weights.values())
    ours, theirs = (torch.autograd.grad(each, given, materialize_grads=True) for each in (loss, reference))
    for label, one, other in zip(weights, ours, theirs, strict=True):
        assert float((one - other).abs().max()) < tolerance, label
    totals = {**{name: float(each) for name, each in sums._asdict().items()}, "predictions": predictions}
    assert objective.total(objective.measure(totals)) == pytest.approx(float(reference), rel=1e-5)


def test_micro_batches_add_up() -> None:
    """One without a sequence of one kind calls heads as often as others, and the sum is that of the whole batch."""
    objective = make_hybrid()
    model = make_uneven(build_model(shape_of(objective, pairs=True)))
    parts = []
    for number, one_way in enumerate((2, 0, 4)):
        rows, _ = random_texts((9, 30, 5, 12), SMALL.vocabulary, number)
        parts.append(objective.batch(rows, draw_for(objective, one_way, 4)))
    calls: list[int] = []
    for head in ("masked_head", "pooler", "next_head"):
        model.head(head).register_forward_hook(lambda *_: calls.append(1))
    sums = [model(part) for part in parts]
    assert len(calls) == 4 * len(parts)
    following = sum(int(each.one_way) for each in sums)
    predictions = sum(len(part.labels) for part in parts)
    batches = PretrainingBatches(tuple(parts), 12, predictions, 0, following, 2 + 0 + 4)
    whole = type(sums[0])(*map(sum, zip(*sums, strict=True)))
    found = sum(float(objective.loss(each, batches)) for each in sums)
    assert found == pytest.approx(float(objective.loss(whole, batches)))


@pytest.mark.parametrize("masks", ["static", "dynamic"])
def test_what_is_drawn_follows_from_keys_alone(masks: str) -> None:
    """Any order and division of the examples gives each the same pieces, predictions and direction."""
    objective = make_hybrid(masks=masks)
    rows, _ = random_texts([30] * 40, SMALL.vocabulary)
    draw = Draw(DRAWN[:40], 0.5, SMALL.vocabulary, MASK, SEP)

    def read(order: Array) -> dict[int, tuple[bool, list[int], list[int], list[int]]]:
        """What each example of a micro-batch becomes."""
        drawn = objective.draw_one_way(draw.keys[order])
        assert drawn is not None
        order = order[np.argsort(~drawn, kind="stable")]
        taken = take(rows, order)
        batch = objective.batch(taken, replace(draw, keys=draw.keys[order]))
        home = batch.chosen.numpy() // 30
        found = {}
        for number, each in enumerate(order.tolist()):
            own, pieces = home == number, batch.pieces[30 * number :][:30].tolist()
            chosen, labels = (batch.chosen[own] - 30 * number).tolist(), batch.labels[own].tolist()
            found[each] = (number < batch.one_way, pieces, chosen, labels)
        return found

    whole = read(np.arange(40))
    assert 5 < sum(one_way for one_way, *_ in whole.values()) < 30
    halves = {**read(np.arange(39, -1, -2)), **read(np.arange(0, 40, 2))}
    assert halves == whole
    counts = objective.count_predictions(rows.lengths, rows.predictions, draw.done, objective.draw_one_way(draw.keys))
    assert counts.tolist() == [len(whole[number][3]) for number in range(40)]


def take(rows: Rows, order: Array) -> Rows:
    """The examples of equal lengths and counts in another order."""
    count = len(rows.lengths)
    return Rows(*(each.reshape(count, -1)[order].reshape(-1, *each.shape[1:]) for each in vars(rows).values()))


def test_the_share_is_what_is_asked() -> None:
    for share in (0.0, 0.0625, 0.5):
        drawn = make_hybrid(causal_share=share).draw_one_way(np.arange(20_000, dtype=np.uint64))
        assert drawn is not None
        assert abs(drawn.mean() - share) <= 4 * (share / 20_000) ** 0.5


def test_a_validation_reads_every_example_either_way() -> None:
    rows, texts = random_texts((9, 30), SMALL.vocabulary)
    batch = make_hybrid().validation_batch(rows)
    assert (batch.one_way, batch.lengths) == (2, (9, 30, 9, 30))
    assert batch.pieces.tolist() == [*texts[0], *texts[1], *rows.pieces]
    assert batch.chosen[37:].tolist() == (39 + rows.masked - 1).tolist()
    assert batch.labels.tolist() == [*texts[0][1:], *texts[1][1:], *rows.labels]
    alone = make_hybrid(causal_share=0.0).validation_batch(rows)
    assert (alone.one_way, alone.chosen.tolist()) == (0, (rows.masked - 1).tolist())


@pytest.mark.parametrize("architecture", ["bert", "modern"])
def test_a_plan_counts_the_mean_of_both(architecture: str) -> None:
    objective = make_hybrid(causal_share=0.25)
    assert objective.predictions(128, 20, 0.0) == 0.25 * 127 + 0.75 * 20
    assert (objective.most_predictions(128, 20), make_hybrid(causal_share=0.0).most_predictions(128, 20)) == (127, 20)
    shape = make_shape("base", 1000, architecture)
    ways = objective.learning(False), Learning("hybrid", False), Learning("hybrid", False, "before")
    mean, both, before = (count_step_flops(replace(shape, learns=learns), [200], 40) for learns in ways)
    assert mean == pytest.approx(0.75 * both + 0.25 * before, rel=1e-12)


def test_a_way_that_was_never_learned_is_refused() -> None:
    learned, alone = (make_hybrid(causal_share=share).learning(False) for share in (0.1, 0.0))
    shape = replace(SMALL, learns=learned)
    assert shape.values()["objective.causal_share"] == 0.1
    assert choose_way(shape, "before", "x").learns == Learning("ltr", False, "before")
    assert choose_way(shape, "both", "x").learns == alone
    assert choose_way(shape, None, "x") == shape
    modern = replace(make_shape("base", 9, "modern"), learns=learned)
    mlm = shape.change_learning(objective="mlm", settings=())
    for one, sees in ((replace(shape, learns=alone), "before"), (mlm, "before"), (modern, "before"), (shape, "after")):
        told = f"--sees {sees}: .* of x .*learned to see all others.*; leave --sees out"
        assert_refusal(told, choose_way, one, sees, "x")
