"""The parts of `make gpu` are commands that their scripts understand, and their figures are printed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from conftest import ROOT
from rich.console import Console
from support.commands import assert_refusal
from support.training import Place

from benchmarks.fine_tuning import FineTuningSpeed
from benchmarks.gpu import basics, trainer
from benchmarks.gpu.basics import OwnPart, list_marked_tests
from benchmarks.gpu.install import NEEDED, PREPARING
from benchmarks.gpu.parts import DATA, format_figures, load_parts
from benchmarks.gpu.trainer import TrainerPart, summarise_speed
from benchmarks.inference import Inference
from benchmarks.scaling import Scaling
from benchmarks.throughput import SIDES, Throughput

KINDS = {
    "gpu/basics.py": OwnPart,
    "gpu/trainer.py": TrainerPart,
    "fine_tuning.py": FineTuningSpeed,
    "inference.py": Inference,
    "throughput.py": Throughput,
    "scaling.py": Scaling,
}


@pytest.mark.parametrize("dry", [False, True])
def test_every_part_is_a_command_that_its_script_understands(dry: bool) -> None:
    for part in load_parts():
        assert {*part.needs} <= {*NEEDED, *PREPARING}
        script, *words = part.build_command(Path("out"), dry)
        read: Any = tyro.cli(KINDS[script], args=words, config=(tyro.conf.FlagCreatePairsOff,))
        assert (ROOT / "benchmarks" / script).is_file()
        if isinstance(read, Throughput):
            assert {*read.against} <= {*SIDES}
            assert read.shards == DATA


def test_what_is_worth_most_fits_into_nine_minutes_and_all_into_a_rental() -> None:
    names = [part.name for part in load_parts()]
    first = load_parts()[: names.index("large-512") + 1]
    assert {"smoke", "large-128", "large-512", "profile"} <= {part.name for part in first}
    assert sum(part.minutes for part in first) < 9 - 0.25
    assert 1.5 + sum(part.minutes for part in load_parts()) < 40  # with the minutes that pip takes, about


def test_tests_are_those_of_kernels_or_others() -> None:
    kernels, others = {*list_marked_tests(of_kernels=True)}, {*list_marked_tests(of_kernels=False)}
    assert kernels
    assert others
    assert not kernels & others


def test_the_first_steps_of_a_start_count_for_no_speed() -> None:
    def step(pieces: float, wait: float | None) -> dict[str, float | None]:
        return {"pieces_per_second": pieces, "waiting_for_data": wait, "peak_memory_bytes": 2.0**30}

    steps = [step(1, 0.9), step(1, 0.9), step(1, 0.9), step(100, None), step(300, 0.1), step(200, 0.2)]
    found = summarise_speed(steps)
    assert (found["steps"], found["pieces_per_second"], found["peak_memory_gib"]) == (3, 200, 1.0)
    assert found["waiting_for_data"] == pytest.approx(0.15)


@pytest.mark.slow
def test_a_run_is_killed_and_goes_on(shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "DATA", shared.data)
    assert trainer.measure(TrainerPart("tiny-32-4", tmp_path / "found.json"), Console(quiet=True)) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["continued_with_step"] == found["newest_checkpoint"] + 1
    assert found["killed_after_step"] >= found["newest_checkpoint"] > 0
    assert found["largest_difference_of_their_losses"] in (None, 0.0), "on a CPU the steps are the same bit for bit"
    assert found["first"]["pieces_per_second"] > 0


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refusal(r"torch \S+ finds no GPU: .*\n.*, or take make gpu DRY=1", basics.describe_machine, dry=False)


def test_the_lines_say_what_was_measured() -> None:
    ours = {name: {"median": 204_000} for name in ("real_pieces_per_second", "sequences_per_second")}
    contest = {
        "mean_length": 110.0,
        "times_as_fast_as": {"cloze, own attention": {"median": 0.9}},
        "sides": {"cloze": ours},
    }
    parts = {
        "large-128": {"measured": {"contests": {"large-128": contest}}},
        "attention-128": {"measured": {"contests": {"large-128": contest}}},
        "smoke": {"ended": "ran out of time", "measured": {"passed": 7, "failed": 2}},
        "large-512": {"ended": "failed"},
        "inference": {"measured": {"models": {"base": {"1 x 384": {"sides": {"cloze bf16": {"p50_ms": 1.9}}}}}}},
    }
    for what, told in {
        "large at 128, real pieces/s": "204,000",
        "large at 128, flash: times as fast as our attention": "0.9",
        "ways to train that work": "7",
        "large at 512, real pieces/s": "-",
        "base, 1 x 384: milliseconds": "1.9",
        "base, 1 x 128: milliseconds": "-",
    }.items():
        [line] = [line for line in format_figures(parts) if line.startswith(what)]
        assert line.split()[-1] == told
