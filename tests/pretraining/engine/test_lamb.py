"""LAMB under every ZeRO stage against LAMB written down once more, on one process and without DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.marks import slow
from support.processes import spawn
from support.training import connect_ranks

from benchmarks.exactness import NVIDIA, error, first_weights, make_engine, reference, run_engine, without_partition
from data_prep.common.errors import UserError
from pretraining.engine.apex import find_apex
from pretraining.engine.lamb import by_layer
from pretraining.model import cpu_kernels as kernels
from pretraining.processes.group import disconnect

SETTINGS: dict[str, dict[str, Any]] = {
    "nvidia": NVIDIA,
    "paper": {"clip": 0.0, "bias_correction": False, "trust_limits": (0.1, 1.5), "weight_decay": 0.1},
    "all": {"normalize": True, "trust_all": True, "betas": (0.8, 0.9)},
}
CASES = [("fp32", zero, name) for zero in range(4) for name in SETTINGS]
CASES += [("bf16", zero, "nvidia") for zero in (1, 2, 3)]
Results = list[dict[Any, Any]]


def on_all_stages() -> dict[Any, Any]:
    """What one rank finds."""
    connect_ranks()
    found: dict[Any, Any] = {case: run_engine(make_engine(*case[:2], SETTINGS[case[2]])) for case in CASES}
    found["without"] = run_engine(without_partition(make_engine("fp32", 2, NVIDIA)))[0]
    for zero in (1, 2, 3):
        found["offloaded", zero] = run_engine(make_engine("fp32", zero, NVIDIA, offload="optimizer"))[0]
    kernels.allow(False)
    found["torch"] = run_engine(make_engine("fp32", 2, SETTINGS["all"]))
    disconnect()
    return found


@pytest.fixture(scope="module", params=[slow(1), 2, 3])
def found(request: pytest.FixtureRequest) -> tuple[int, Results]:
    done = spawn(request.param, on_all_stages, timeout=240)
    assert [(rank.code, rank.errors) for rank in done] == [(0, "")] * request.param
    return request.param, [rank.result for rank in done]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_it_is_lamb_on_one_process(found: tuple[int, Results], case: tuple[str, int, str]) -> None:
    ranks, results = found
    wanted, ratios = reference(ranks, SETTINGS[case[2]])
    # three ranks' parts of a bf16 gradient are rounded, as bf16 is; those of two are exact
    tolerance = 2**-9 if case[0] == "bf16" and ranks == 3 else 1e-6
    for result in results:
        assert error(result[case][0], wanted) < tolerance
        assert result[case][1] == pytest.approx(ratios, rel=tolerance)
    assert error(first_weights(), wanted) > 1e-3, "nothing has moved"


def test_without_our_kernel_it_is_the_same(found: tuple[int, Results]) -> None:
    ranks, results = found
    wanted, ratios = reference(ranks, SETTINGS["all"])
    assert error(results[0]["torch"][0], wanted) < 1e-6
    assert results[0]["torch"][1] == pytest.approx(ratios, rel=1e-6)


def test_with_the_optimizer_in_the_hosts_memory(found: tuple[int, Results]) -> None:
    ranks, results = found
    wanted, _ = reference(ranks, NVIDIA)
    for zero in (1, 2, 3):
        assert error(results[-1]["offloaded", zero], wanted) < 1e-6, zero


def test_without_knowing_the_parameters_it_would_be_wrong(found: tuple[int, Results]) -> None:
    """The test can fail: this is what a LAMB that takes norms of flat tensors does, and no error is raised."""
    ranks, results = found
    assert error(results[0]["without"], reference(ranks, NVIDIA)[0]) > 1e-2


def test_apex_is_an_accelerator_for_gpus_and_never_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    found = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "amp_C", found)
    assert find_apex("auto", gpu) is find_apex("apex", gpu) is found
    assert find_apex("torch", gpu) is find_apex("auto", cpu) is None
    with pytest.raises(UserError, match='needs a GPU; take "auto"'):
        find_apex("apex", cpu)
    monkeypatch.setitem(sys.modules, "amp_C", None)
    assert find_apex("auto", gpu) is None
    with pytest.raises(UserError, match="apex is not installed; build NVIDIA's from its source"):
        find_apex("apex", gpu)
    monkeypatch.setattr(importlib.metadata, "version", {"apex": "0.9.10.dev0"}.__getitem__)
    with pytest.raises(UserError, match=r"\(0\.9\.10\.dev0\) has no amp_C: it is another project of that name"):
        find_apex("apex", gpu)


def test_trust_ratios_by_layer() -> None:
    ratios = {"layers.0.a.weight": 1.0, "layers.0.b.weight[2]": 2.0, "layers.11.a.weight": 3.0, "pooler.weight": 4.0}
    assert by_layer(ratios) == {"layers.0": [1.0, 2.0], "layers.11": [3.0], "pooler": [4.0]}
