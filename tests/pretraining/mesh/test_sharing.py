"""Ranks that share models learn what ranks with whole ones do, and with each of some planted faults something else."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.mesh import Case, Found, train
from support.training import run_connected
from torch import Tensor

from pretraining.engine import engine, gradients
from pretraining.mesh import mesh
from pretraining.mesh.cuts import Division, cut_tensor
from pretraining.mesh.mesh import Mesh, sum_over_tensor_ranks
from pretraining.model import losses, modules, shared_loss
from pretraining.model.products import multiply
from pretraining.optimizers.steps import lamb
from pretraining.optimizers.steps.flat import FlatOptimizer, add_over_group

STEPS = 3
BERT, LAMB, MUON = (Case(optimizer=name, zero=1, vocabulary=301) for name in ("adamw", "lamb", "muon"))
make_slot_table, prepare, share_loss = lamb.make_slot_table, FlatOptimizer.prepare, shared_loss.share_loss


class Fault(NamedTuple):
    """A case, and what stands in the place of a name in some modules or classes; without a fault, nothing does."""

    case: Case
    places: tuple[Any, ...] = ()
    name: str = ""
    instead: Any = None


def add_a_bias_twice(self: Any, x: Tensor) -> Tensor:
    product = multiply(x, self.weight)
    return sum_over_tensor_ranks(product + self.bias if self.cut == "rows" else product, self.mesh)


def miss_labels_at_a_boundary(logits: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh) -> Any:
    """A "greater than" in the place of "at least"."""
    first = mesh.tensor_rank * logits.shape[1]
    return share_loss(logits, torch.where(labels == first, -1, labels), vocabulary, mesh)


def add_own_squares(_: Any, squares: Any, tables: Any) -> Any:
    return add_over_group(squares, tables[0].group)


def forget_fused_parts(whole: Tensor, how: Division, *where: int) -> Tensor:
    """Queries go to one rank, values to the other."""
    return cut_tensor(whole, how._replace(parts=1), *where)


FAULTS = {
    "none": Fault(BERT),
    "none, an odd number of heads a rank": Fault(replace(BERT, heads=6)),
    "none, LAMB": Fault(LAMB),
    "a sum too few, forward": Fault(BERT, (mesh._Sum,), "forward", staticmethod(lambda ctx, x, mesh: x * 1.0)),
    "a sum too few, backward": Fault(BERT, (mesh._Copy,), "backward", staticmethod(lambda _, grad: (grad * 1.0, None))),
    "a bias twice": Fault(BERT, (modules.Linear,), "forward", add_a_bias_twice),
    "a norm counted twice, ZeRO 0": Fault(replace(BERT, zero=0), (gradients, engine), "is_divided", lambda _: True),
    "a norm counted twice, ZeRO 1": Fault(BERT, (gradients, engine), "is_divided", lambda _: True),
    "a share counted once, ZeRO 1": Fault(BERT, (gradients, engine), "is_divided", lambda _: False),
    "no share marked, ZeRO 2": Fault(replace(BERT, zero=2), (mesh,), "DIVIDED", "not what DeepSpeed reads"),
    "a ratio not summed": Fault(LAMB, (lamb.Lamb,), "_add_over_ranks", add_own_squares),
    "a share's own ratio": Fault(LAMB, (lamb,), "make_slot_table", lambda *given: make_slot_table(*given[:2])),
    "shares made orthogonal": Fault(MUON, (FlatOptimizer,), "prepare", lambda own, *given: prepare(own, *given[:3])),
    "one mask for all heads": Fault(BERT, (Mesh,), "select_heads", lambda own, heads: range(heads // own.tensor_ranks)),
    "a label at the boundary": Fault(BERT, (losses,), "share_loss", miss_labels_at_a_boundary),
    "the padding counts": Fault(
        BERT, (losses,), "share_loss", lambda logits, labels, _, mesh: share_loss(logits, labels, 1 << 30, mesh)
    ),
    "fused parts forgotten": Fault(BERT, (mesh,), "cut_tensor", forget_fused_parts),
}


def train_with_faults() -> dict[str, Found]:
    found = {}
    for name, fault in FAULTS.items():
        with pytest.MonkeyPatch.context() as patched:
            for place in fault.places:
                patched.setattr(place, fault.name, fault.instead, raising=False)
            found[name] = train(fault.case, 2, STEPS)
    return found


def train_alone(cases: set[Case]) -> dict[Case, Found]:
    return {case: train(case, 1, STEPS) for case in cases}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    """The distance of two ranks that share a model, with each fault, to one that has it whole."""
    [alone] = run_connected(1, partial(train_alone, {fault.case for fault in FAULTS.values()}), timeout=300)
    both = run_connected(2, train_with_faults, timeout=300)
    return {name: both[0][name].measure_distance(alone[fault.case]) for name, fault in FAULTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(found: dict[str, dict[str, float]], name: str) -> None:
    apart = found[name]
    is_right = apart["gradients"] < 1e-6 and all(apart[key] < 1e-5 for key in ("loss", "norm", "ratios"))
    assert is_right == name.startswith("none"), apart


OPTIMIZERS = ("adamw", "lamb", "muon")
LEARNED = {f"{name}, ZeRO {zero}": Case(optimizer=name, zero=zero) for name in OPTIMIZERS for zero in range(3)} | {
    "gpt": Case("gpt", "ltr", "lamb", heads=6),
    "roberta": Case("roberta", "mlm", "lamb", recompute=True),
    "modern": Case("modern", "mlm", "lamb"),
    "ltr": Case("bert", "ltr", "muon"),
    "hybrid": Case("bert", "hybrid", "muon", zero=2),
    "rtl": Case("bert", "rtl"),
    "roberta, ltr": Case("roberta", "ltr"),
    "roberta, hybrid": Case("roberta", "hybrid", "lamb", zero=0),
    "gpt, recomputed": Case("gpt", "ltr", recompute=True),
    "modern, recomputed": Case("modern", "mlm", "muon", recompute=True, zero=2),
    "bf16": Case(optimizer="lamb", dtype="bf16"),
}


def train_all(tensor: int) -> dict[str, Found]:
    return {name: train(case, tensor) for name, case in LEARNED.items()}


@pytest.fixture(scope="module")
def learned() -> tuple[list[dict[str, Found]], dict[str, Found]]:
    """What all ranks of 2 x 2 learn of each case, and the first of two ranks with whole models."""
    return run_connected(4, partial(train_all, 2), timeout=300), run_connected(2, partial(train_all, 1), timeout=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_ranks_that_share_a_model_learn_the_same(
    learned: tuple[list[dict[str, Found]], dict[str, Found]], name: str
) -> None:
    shared, wanted = [rank[name] for rank in learned[0]], learned[1][name]
    for rank in shared:
        apart = rank.measure_distance(wanted)
        if LEARNED[name].dtype == "fp32":
            assert apart["gradients"] < 1e-6
            assert max(apart["loss"], apart["norm"], apart["ratios"]) < 1e-5
            assert apart["right"] == 0
        else:
            assert apart["gradients"] < 2e-2
            assert apart["loss"] < 2e-3
            assert apart["norm"] < 5e-3
