"""An objective of several passes is planned by what they multiply and keep: a generator beside the encoder, as ELECTRA
has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels import kernels_allowed
from support.memory import LiveTensors
from support.pretraining_reference import SMALL, random_batch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretraining.data.batches import full_sequences
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.costs import Pass
from pretraining.objectives.declaration import (
    build_model,
    count_computed_flops,
    count_step_flops,
    num_parameters,
    objectives,
)
from pretraining.objectives.mlm import MaskedPieces
from pretraining.planning.amount import measure_sequences
from pretraining.planning.cost import MicroBatch
from pretraining.planning.memory import plan_activations


def generator_of(shape: Shape) -> Shape:
    return replace(shape, hidden=shape.hidden // 4, intermediate=shape.intermediate // 4, layers=1).change_learning(
        objective="mlm"
    )


class Detection(MaskedPieces):
    """A small model predicts masked pieces; the large one says of every piece whether it is right."""

    def heads(self, shape: Shape) -> dict[str, str]:
        return {"found": "head of replaced pieces", "generator": "generator"}

    def build(self, shape: Shape) -> dict[str, nn.Module]:
        return {"found": nn.Linear(shape.hidden, 1), "generator": build_model(generator_of(shape))}

    def parameters(self, shape: Shape) -> int:
        return num_parameters(generator_of(shape)) + shape.hidden + 1

    def flops(self, shape: Shape, sequences: int, predictions: float) -> float:
        return objectives()["mlm"].flops(generator_of(shape), sequences, predictions)

    def passes(self, shape: Shape, sequences: int, pieces: float, predictions: float) -> list[Pass]:
        found = Pass(shape, pieces, flops=2 * shape.hidden * pieces, kept=pieces)
        return [Pass(generator_of(shape), predictions), found]

    def forward(self, model: PretrainingModel, batch: PretrainingBatch) -> Any:
        return model.head("generator")(batch), model.head("found")(model.encode(batch))

    def loss(self, losses: Any, batches: PretrainingBatches) -> Tensor:
        (masked, _), found = losses
        loss: Tensor = masked / batches.predictions + found.float().square().mean()
        return loss


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> Shape:
    monkeypatch.setitem(objectives(), "detection", Detection())
    still = replace(SMALL, hidden=64, intermediate=256, dropout=0.0, attention_dropout=0.0)
    return still.change_learning(objective="detection", pairs=False)


def count_attention(shape: Shape, lengths: Sequence[int]) -> int:
    """PyTorch's counter does not know attention on a CPU."""
    return 4 * shape.hidden * shape.layers * sum(length**2 for length in lengths)


def test_operations_are_those_of_all_passes(shape: Shape) -> None:
    batch, model = random_batch([64] * 5, shape.vocabulary), build_model(shape).initialize(1)
    with kernels_allowed(False), FlopCounterMode(display=False) as counter:
        model(batch)
    small = generator_of(shape)
    padding = 2 * small.hidden * (shape.padded_vocabulary - shape.vocabulary) * len(batch.labels)
    counted = counter.get_total_flops() - padding
    counted += sum(count_attention(each, batch.lengths) for each in (shape, small))
    assert count_computed_flops(shape, batch.lengths, len(batch.labels)) / 3 == counted
    assert num_parameters(shape) == sum(weight.numel() for weight in model.parameters()) - (
        (shape.padded_vocabulary - shape.vocabulary) * (shape.hidden + small.hidden + 1)
    )


def test_memory_is_that_of_all_passes(shape: Shape) -> None:
    shape = replace(shape, vocabulary=9000)
    objective, model = objectives()["detection"], build_model(shape).initialize(1).train()
    batch = full_sequences(16, 64, 10, objectives()["mlm"])
    with LiveTensors() as live:
        loss = objective.loss(model(batch), PretrainingBatches((batch,), 16, len(batch.labels)))
        torch.autograd.backward(loss)
    of_parameters = sum(parameter.nbytes for parameter in model.parameters())
    planned = plan_activations(shape, "fp32", 16, 64, fused_attention=False, predictions=10)
    assert planned.kept / 2 < live.peak - of_parameters < planned.kept
    alone = shape.change_learning(objective="mlm")
    assert planned.kept > 1.1 * plan_activations(alone, "fp32", 16, 64, fused_attention=False, predictions=0).kept
    assert planned.recomputed < planned.kept


def test_a_pass_of_a_share_of_the_sequences_costs_this_share(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(_: Any, shape: Shape, sequences: int, pieces: float, predictions: float) -> list[Pass]:
        return 2 * [Pass(shape, predictions / 2, share=0.5)]

    def figures() -> Mapping[str, float]:
        planned = plan_activations(shape, "bf16", 8, 64, predictions=10)
        average = measure_sequences(shape, 64, None)
        computed = count_computed_flops(shape, [64] * 8, 80)
        return {
            "kept": planned.kept,
            "computed": computed,
            "useful": count_step_flops(shape, [64] * 8, 80),
            "traffic": MicroBatch.from_average(shape, "bf16", 8, average).traffic,
        }

    shape = shape.change_learning(objective="mlm")
    whole, layers = figures(), MicroBatch.from_average(shape, "bf16", 8, measure_sequences(shape, 64, None)).layers
    monkeypatch.setattr(type(objectives()["mlm"]), "passes", halves)
    assert figures() == pytest.approx(whole)
    assert MicroBatch.from_average(shape, "bf16", 8, measure_sequences(shape, 64, None)).layers == 2 * layers
