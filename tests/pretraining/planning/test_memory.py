"""Which micro-batches there can be, and the search for the largest that fits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.watches import LiveTensors

from pretraining.architectures.declaration import make_shape
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.config.settings import Dtype, list_divisors
from pretraining.data.batches import full_sequences
from pretraining.engine.precision import DTYPES
from pretraining.model import losses
from pretraining.model.batch import PretrainingBatches
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model, objectives
from pretraining.planning import memory
from pretraining.planning.memory import Heaviest, Room, find_largest_that_fits, plan_activations
from pretraining.planning.plan import Target

BASE = Heaviest(make_shape("base", 30522), "bf16", length=128, predictions=20, recompute=False)


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_the_largest_is_found_with_few_trials(share: int, capacity: int) -> None:
    sizes, tried = list_divisors(share), []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= capacity

    wanted = max((size for size in sizes if size <= capacity), default=None)
    assert find_largest_that_fits(sizes, fits) == wanted
    assert len(tried) <= math.floor(math.log2(len(sizes))) + 1


@pytest.mark.parametrize("share", [1, 12, 4096, 4099, 65_536])
@pytest.mark.parametrize("length", [128, 512])
def test_sizes_divide_the_share_and_are_bounded(share: int, length: int) -> None:
    """Long sequences can always be computed one by one."""
    heaviest = replace(BASE, length=length)
    for on_cpu, wide, most in (
        (True, length, memory.CPU_PIECES),
        (False, max(length * 3072, 20 * 30528), memory.GPU_ELEMENTS),
    ):
        sizes = heaviest.sizes(share, on_cpu)
        assert sizes == [size for size in list_divisors(share) if size * wide <= most]
        assert sizes[0] == 1
    assert replace(BASE, length=memory.CPU_PIECES + 1).sizes(8, on_cpu=True) == [1]


def test_an_estimate_grows_with_the_sequences_and_has_a_margin() -> None:
    recipe = load_recipe(RECIPES / "bert_base_adam.toml")
    phase, target = recipe.phases[0], Target(recipe, None, "bf16", Room(0), ranks=1)
    needed = target.bytes_needed(phase, 64)

    def fits(sequences: int, **room: Any) -> bool:
        return replace(target, room=Room(**room)).fits(phase, sequences)

    assert not fits(64, size=needed)
    assert fits(64, size=1.1 * needed)
    assert not fits(128, size=1.1 * needed)
    assert not fits(64, size=1.1 * needed, on_cpu=True)
    assert BASE.activations(64, on_cpu=True) > BASE.activations(64, on_cpu=False), "it keeps the probabilities"


@pytest.mark.parametrize(
    ("name", "dtype", "sequences"),
    [
        *(("ltr", "fp32", 40), ("rtl", "bf16", 8), ("rtl", "fp16", 8), ("mlm", "fp32", 8), ("mlm", "fp32", 40)),
        *(("rtd", "fp32", 40), ("hybrid", "fp32", 8), ("hybrid", "fp32", 40)),
    ],
)
def test_a_step_takes_what_is_planned(name: str, dtype: Dtype, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are counted; in bf16 as on a GPU, whose kernels keep what those for a CPU keep, and in fp16 too, but for
    the loss."""
    if dtype == "fp16":
        monkeypatch.setattr(losses, "has_loss_kernel", lambda _: False)
        monkeypatch.setitem(DTYPES, "fp16", torch.bfloat16)  # which CPUs compute with
    objective = objectives()[name]
    shape = Shape(2, 64, 2, 256, 9000, architecture="electra" if name == "rtd" else "bert")
    shape = replace(shape, learns=replace(objective.learning(False), objective=name))
    predictions = objective.most_predictions(64, 10)
    model = build_model(shape).initialize(1).to(DTYPES[dtype]).train()
    batch = full_sequences(sequences, 64, predictions, objective)
    with LiveTensors() as live:
        batches = PretrainingBatches((batch,), sequences, len(batch.labels), len(batch.pieces))
        loss = objective.loss(model(batch), batches)
        torch.autograd.backward(loss)
    of_parameters = sum(parameter.nbytes for parameter in model.parameters())
    words = shape.padded_vocabulary * shape.hidden
    planned = plan_activations(shape, dtype, sequences, 64, fused_attention=False, predictions=predictions).kept
    planned += of_parameters + words * (4 if dtype == "fp32" else 2)
    assert planned / 2 < live.peak < planned
