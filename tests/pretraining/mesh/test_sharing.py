"""Ranks that share models learn what ranks with whole ones do, and with each of some planted faults something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.mesh import Case, Found, train
from support.training import run_connected
from torch import Tensor

from pretraining.engine import engine, gradients
from pretraining.mesh import mesh
from pretraining.mesh.cuts import cut_tensor
from pretraining.mesh.mesh import Mesh, sum_over_tensor_ranks
from pretraining.model import losses, modules, shared_loss
from pretraining.model.products import multiply
from pretraining.optimizers.steps import lamb
from pretraining.optimizers.steps.flat import FlatOptimizer, add_over_group

STEPS = 3
Fault = Callable[[pytest.MonkeyPatch], None]


def plant_nothing(_: pytest.MonkeyPatch) -> None:
    """No fault: all are as one."""


def leave_out_a_sum_forward(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(mesh._Sum, "forward", staticmethod(lambda ctx, x, mesh: x * 1.0))


def leave_out_a_sum_backward(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(mesh._Copy, "backward", staticmethod(lambda ctx, grad: (grad * 1.0, None)))


def add_a_bias_twice(patched: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        product = multiply(x, self.weight)
        return sum_over_tensor_ranks(product + self.bias if self.cut == "rows" else product, self.mesh)

    patched.setattr(modules.Linear, "forward", forward, raising=False)


def count_a_norm_twice(patched: pytest.MonkeyPatch) -> None:
    for module in (gradients, engine):
        patched.setattr(module, "is_divided", lambda _: True)


def count_a_share_once(patched: pytest.MonkeyPatch) -> None:
    for module in (gradients, engine):
        patched.setattr(module, "is_divided", lambda _: False)


def mark_no_share(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(mesh, "DIVIDED", "not what DeepSpeed reads")


def leave_out_the_sum_of_a_ratio(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(lamb.Lamb, "_add_over_ranks", lambda _, squares, tables: add_over_group(squares, tables[0].group))


def move_a_share_by_its_own_ratio(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(lamb, "make_slot_table", lambda flat, roles, _: lamb_table(flat, roles))


lamb_table = lamb.make_slot_table


def orthogonalize_shares(patched: pytest.MonkeyPatch) -> None:
    prepare = FlatOptimizer.prepare
    patched.setattr(FlatOptimizer, "prepare", lambda self, *given: prepare(self, *given[:3]))


def draw_one_mask_for_all_heads(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Mesh, "select_heads", lambda self, heads: range(heads // self.tensor_ranks))


def miss_labels_at_a_boundary(patched: pytest.MonkeyPatch) -> None:
    def share(logits: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh) -> Any:
        first = mesh.tensor_rank * logits.shape[1]
        beyond = torch.where(labels == first, -1, labels)  # a "greater than" in the place of "at least"
        return shared_loss.share_loss(logits, beyond, vocabulary, mesh)

    patched.setattr(losses, "share_loss", share)


def count_the_padding(patched: pytest.MonkeyPatch) -> None:
    share = shared_loss.share_loss
    patched.setattr(losses, "share_loss", lambda logits, labels, _, mesh: share(logits, labels, 1 << 30, mesh))


def forget_fused_parts(patched: pytest.MonkeyPatch) -> None:
    """Queries to one rank, values to the other."""
    patched.setattr(mesh, "cut_tensor", lambda whole, how, *where: cut_tensor(whole, how._replace(parts=1), *where))


BERT = Case(zero=1, vocabulary=301)
LAMB = Case(optimizer="lamb", zero=1)
FAULTS: dict[str, tuple[Case, Fault]] = {
    "none": (BERT, plant_nothing),
    "none, an odd number of heads a rank": (replace(BERT, heads=6), plant_nothing),
    "none, LAMB": (LAMB, plant_nothing),
    "a sum too few, forward": (BERT, leave_out_a_sum_forward),
    "a sum too few, backward": (BERT, leave_out_a_sum_backward),
    "a bias twice": (BERT, add_a_bias_twice),
    "a norm counted twice, ZeRO 0": (replace(BERT, zero=0), count_a_norm_twice),
    "a norm counted twice, ZeRO 1": (BERT, count_a_norm_twice),
    "a share counted once, ZeRO 1": (BERT, count_a_share_once),
    "no share marked, ZeRO 2": (replace(BERT, zero=2), mark_no_share),
    "a ratio not summed": (LAMB, leave_out_the_sum_of_a_ratio),
    "a share's own ratio": (LAMB, move_a_share_by_its_own_ratio),
    "shares made orthogonal": (replace(BERT, optimizer="muon"), orthogonalize_shares),
    "one mask for all heads": (BERT, draw_one_mask_for_all_heads),
    "a label at the boundary": (BERT, miss_labels_at_a_boundary),
    "the padding counts": (BERT, count_the_padding),
    "fused parts forgotten": (BERT, forget_fused_parts),
}


def train_with_faults() -> dict[str, Found]:
    found = {}
    for name, (case, plant) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patched:
            plant(patched)
            found[name] = train(case, 2, STEPS)
    return found


def train_alone(cases: set[Case]) -> dict[Case, Found]:
    return {case: train(case, 1, STEPS) for case in cases}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    """The distance of two ranks that share a model, with each fault, to one that has it whole."""
    [alone] = run_connected(1, partial(train_alone, {case for case, _ in FAULTS.values()}), timeout=300)
    both = run_connected(2, train_with_faults, timeout=300)
    return {name: both[0][name].measure_distance(alone[case]) for name, (case, _) in FAULTS.items()}


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
