"""What calibration.py makes of what it measures, and planner.py of that."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner
from benchmarks.calibration import BESIDE, JOINING, KNOWN, TESTED, Case, fit, foretell, sharing_of, work_of
from benchmarks.measure import FORMAT, Keeper
from data_prep.common.errors import UserError
from pretraining.planning.cost import Cluster, Device, step_time

THREAD = Device(2e11, 1.5e10, 1e-3, runs_ahead=False)
PROCESS = Device(4e11, 2.5e10, 1e-3, runs_ahead=False)
LINK, SHARED = 1e9, 1.1


def seconds(device: Device, case: Case, ranks: int = 1) -> float:
    return step_time(Cluster(device, 1, ranks, LINK), work_of(case), sharing_of(case), case.accumulation).total


def test_a_device_is_found_again_from_its_steps() -> None:
    found = fit({case: seconds(THREAD, case) for case in KNOWN})
    assert found.products == pytest.approx(THREAD.products, rel=1e-6)
    assert found.bandwidth == pytest.approx(THREAD.bandwidth, rel=1e-6)
    assert found.launch == pytest.approx(THREAD.launch, rel=1e-6)


def measured() -> dict[str, Any]:
    """What would be measured where the model is exact, and two threads slow each other down."""
    slowed = Device(THREAD.products / SHARED, THREAD.bandwidth / SHARED, SHARED * THREAD.launch, runs_ahead=False)
    found: dict[str, Any] = {}
    for case in (*KNOWN, *TESTED, JOINING):
        found[case.name] = {
            "process": {"median": seconds(PROCESS, case)},
            "thread": {"median": seconds(THREAD, case)},
            "ranks": {"median": seconds(slowed, case, 2)},
        }
        if case in BESIDE:
            found[case.name]["apart"] = {"median": SHARED * seconds(THREAD, case)}
    return found


def test_what_the_model_says_of_exact_steps_has_no_error() -> None:
    devices, link, rows = foretell(measured(), (*KNOWN, *TESTED))
    assert link == pytest.approx(LINK)
    assert devices.keys() == {"process", "thread", "ranks"}
    assert max(abs(row["error"]) for row in rows) < 0.001
    tested = [row for row in rows if not row["calibrates"]]
    assert len(tested) == 2 * len(TESTED) + len(KNOWN) + len(TESTED)


def test_a_measured_machine_takes_the_place_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, rows = foretell(measured(), (*KNOWN, *TESTED))
    devices = {"process": asdict(PROCESS)}
    steps = {"dtype": "bf16", "memory_bytes": 16e9, "link": LINK, "devices": devices, "rows": rows}
    path = Keeper("calibration", [], tmp_path / "own.json").keep({"steps": steps})
    command = ["--recipe", "bert_mini", "--calibration", str(path)]
    assert planner.main(command) == 0
    shown = capsys.readouterr().out
    assert "bert_mini on 1 x 1 processes as own.json has them; bf16" in shown
    assert planner.main([*command, "--nodes", "4"]) == 0
    with pytest.raises(UserError, match="--gpus-per-node 8: measured were 1 and 2 processes"):
        planner.main([*command, "--gpus-per-node", "8"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"format": 1, "benchmark": "calibration"}, "results in format 1"),
        (
            {"format": FORMAT, "benchmark": "calibration", "environment": {}, "memory": []},
            "no steps in it; run benchmarks/calibration.py",
        ),
    ],
)
def test_results_that_calibrate_nothing(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        planner.main(["--calibration", str(path)])
