"""Scaling: what efficiencies are made of, what a group without messages computes, and the whole command."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import assert_refusal
from support.marks import slow
from support.training import Place

from benchmarks import scaling
from benchmarks.scaling import (
    SILENT,
    Note,
    choose_batches,
    find_phase,
    find_points,
    main,
    open_silent_group,
    read_notes,
)
from benchmarks.tables import summarise_scaling
from data_prep.common.launchers import World
from pretraining.config.overrides import load_recipe
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.processes.group import connect, disconnect

CPU = torch.device("cpu")


def note(processes: int, weak: tuple[float, float], strong: tuple[float, float], threads: int = 1) -> Note:
    """A launch with 8 sequences a process, and with 16 in all; seconds with communication and without."""
    names = ("seconds", SILENT) if processes > 1 else ("seconds",)
    steps = {
        kind: {"sequences": sequences, **dict(zip(names, seconds, strict=False))}
        for kind, sequences, seconds in (("weak", 8 * processes, weak), ("strong", 16, strong))
    }
    return Note(processes, 1, threads, "cpu", "fp32", steps)


def test_efficiencies_are_those_of_rounds() -> None:
    """Each round is compared with itself: a machine that slows down by half in the second one changes nothing."""
    notes = [
        *(note(1, (1.0, 0), (2.0, 0)), note(2, (1.25, 1.0), (1.6, 1.2))),
        *(note(1, (2.0, 0), (4.0, 0)), note(2, (2.5, 2.0), (3.2, 2.4))),
        note(1, (9.0, 0), (9.0, 0)),  # a round that was broken off
    ]
    weak_1, weak_2, strong_1, strong_2 = find_points(notes)
    assert weak_1["efficiency"] == {"median": 1.0, "lowest": 1.0, "highest": 1.0} == strong_1["efficiency"]
    assert weak_2["efficiency"] == {"median": 0.8, "lowest": 0.8, "highest": 0.8}
    assert weak_2["communication"] == 0.2
    assert weak_2["sequences_per_second"] == {"median": 9.6, "lowest": 6.4, "highest": 12.8}
    assert strong_2["efficiency"]["median"] == 0.625  # 2 s by one are 1.6 s by two
    assert strong_2["communication"] == 0.25


def test_nothing_is_said_of_communication_where_it_was_not_left_out() -> None:
    """As under ZeRO 3, where messages bring the weights."""
    two = note(2, (1.25, 0), (1.6, 0))
    steps = {kind: {what: step[what] for what in ("sequences", "seconds")} for kind, step in two.steps.items()}
    points = find_points([note(1, (1.0, 0), (2.0, 0)), replace(two, steps=steps)])
    two_alone = [point for point in points if point["processes"] == 2]
    assert [point["communication"] for point in two_alone] == [None] * 2
    assert points[0]["communication"] == 0
    assert [row[-1] for row in next(summarise_scaling({"points": points})).rows] == ["0", "–", "0", "–"]


def test_batches_are_shared_alike() -> None:
    phase = find_phase(load_recipe(Path("bert_base_lamb"), ["--phases.0.micro_batch", "64"]))
    for device, sequences, most in ((CPU, 32, 32), (torch.device("cuda"), 64, 2048)):
        for processes in (1, 2, 4, 16, 32):
            sizes = choose_batches(phase, device, processes)
            assert sizes["weak"] == (sequences * processes, 1)
            batch, accumulation = sizes["strong"]
            assert batch == most
            assert 0 < most / processes / accumulation <= sequences
        assert "strong" not in choose_batches(phase, device, 5)


@pytest.mark.parametrize("zero", [1, 2])
def test_a_rank_without_messages_has_its_share_of_the_work(zero: int) -> None:
    """And no more: half of the optimizer's state, where there are two."""
    shape = Shape(layers=1, hidden=16, heads=2, intermediate=32, vocabulary=50, positions=16)
    settings = EngineSettings(parallel=EngineSettings().parallel.model_copy(update={"zero": zero}))

    def own_elements() -> int:
        engine = Engine(build_model(shape).initialize(0), settings, CPU)
        found = sum(part.length for flat in engine.flat_tensors for part in flat.parts)
        engine.close()
        return found

    shares = []
    for rank in range(2):
        with open_silent_group(World(rank, 2, rank, 2)):
            shares.append(own_elements())
    connect(World(), CPU)
    assert sum(shares) == own_elements()
    disconnect()
    assert max(shares) < 0.6 * sum(shares)


MISTAKES = {
    "--recipe bert_mini --parallel.tensor 256": "parallel.tensor = 256",
    "--data nowhere": "nowhere: no such folder",
    "--recipe bert_mini --parallel.zreo 1": "did you mean parallel.zero",
    "--out nowhere --notes nowhere": "nowhere: no notes of scaling.py",
    "--rounds 0": "at least 1",
}


@pytest.mark.parametrize("words", [slow(words) if "--data" in words else words for words in MISTAKES])
def test_mistakes_are_told_before_anything_is_launched(words: str) -> None:
    assert_refusal(re.escape(MISTAKES[words]), main, words.split())


def test_what_a_rank_says_before_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 1, stderr="Traceback\nerror: nowhere: no such folder\nmore\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    assert_refusal("^a launch of 1 processes has failed: nowhere: no such folder$", main, [])


def test_notes_of_another_kind_are_refused(tmp_path: Path) -> None:
    for text in ("", "{}\n", "[1]\n", '{"processes": 1}\n'):
        (tmp_path / "notes").write_text(text)
        assert_refusal("notes: ", read_notes, tmp_path / "notes")


@pytest.mark.slow
def test_the_whole_command(
    shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "num_cores", lambda: 2)
    out = tmp_path / "found" / "scaling.json"
    sizes = ["--model.size", "tiny", "--phases.1.length", "32", "--parallel.tensor", "2", "--compute.threads", "1"]
    assert main(["--data", str(shared.data), "--out", str(out), "--rounds", "1", *sizes]) == 0
    found = json.loads(out.read_text())
    about = (found["benchmark"], found["model"]["size"], found["zero"], found["length"])
    assert about == ("scaling", "tiny", 1, 32)
    shown = [tuple(point[name] for name in ("processes", "tensor", "sequences")) for point in found["points"]]
    assert shown == [(1, 1, 32), (2, 1, 64), (2, 2, 32), (1, 1, 32), (2, 1, 32), (2, 2, 32)]
    assert [point["scaling"] for point in found["points"]] == ["weak"] * 3 + ["strong"] * 3
    said = capfd.readouterr().out
    assert "processes: 2, threads of each: 1; weak" in said
    assert "processes: 2, sharing a model: 2, threads of each: 1; weak" in said
    assert said.splitlines()[-1].endswith(f"kept in {out}")
