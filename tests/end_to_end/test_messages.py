"""What the command says: its report of a run, and mistakes with their cure."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from support.commands import run_main
from support.damage import flip
from support.faults import slow_save
from support.processes import start
from support.training import Place, assert_ended, assert_well, be_train_py, launch, records, train

from pretraining import train as entry
from pretraining.checkpoint.record import list_finished


def test_what_is_printed(place: Place) -> None:
    words = "--logging.tensorboard true --logging.every 3 --checkpoints.every 4 --phases.1.steps 2".split()
    command = place.command("run", *words)
    lines = assert_well(train(command, 1)).splitlines()
    run = place.folder / "run"
    assert lines[0].startswith("37,383 parameters: 2 layers of 32, 229 pieces; adamw, fp32, ZeRO 1")
    assert lines[1].startswith("1 rank on cpu, 1 thread each (")
    assert lines[1].endswith(f"; data {place.data}, run {run}")
    assert lines[2] == "phase short (1 of 2): 5 steps; a step: 24 sequences of length 32, 6 x 4 a rank"
    assert re.fullmatch(r"1/7  [\d.]+k? pieces/s  .* left  losses follow at step 3", lines[3])
    assert lines[4].startswith("3/7  loss ")
    shares = re.findall(r"next [\d.]+ [\d.]+% \(larger class ([\d.]+)%\)", "\n".join(lines))
    assert len(shares) == 6
    assert f"saved {run / 'checkpoints' / 'step-00000004'}" in lines
    assert lines[-1] == f'load it: transformers.AutoModelForMaskedLM.from_pretrained("{run / "export"}")'
    assert sorted(path.name for path in list_finished(run)[-1].iterdir()) == [
        "checkpoint.json",
        "exp_avg-00000-of-00001.safetensors",
        "exp_avg_sq-00000-of-00001.safetensors",
        "weight-00000-of-00001.safetensors",
    ]
    assert list((run / "tensorboard").iterdir())
    assert "all that was asked for is trained already" in assert_well(train(command, 1))
    assert [record["step"] for record in records(run)] == [3, 5, 6, 7]
    assert {f"{100 * record['next_larger_class']:.1f}" for record in [*records(run), *records(run, "evaluation")]} == {
        *shares
    }
    assert f"| larger class of these | {shares[-1]}% |" in (run / "export" / "README.md").read_text()


MISTAKES = {
    "--out {tmp}/run --model.positions 48": "phases.1.length = 64: the model has 48 positions; take 8 to 48, or",
    "--out {tmp}/run --phases.0.length 65 --model.positions 65": (
        "--phases.0.length = 65: the data has 32, 64; make it with shard.py --lengths 32 64 65, or take less"
    ),
    "--out {tmp}/run --phases.0.batch 10": "--phases.0.batch = 10: does not divide by 1 rank x phases.0.micro_batch",
    "--out {tmp}/run --parallel.device cuda": '--parallel.device = "cuda": no GPU is found here',
    "--out {tmp}/run --precision.dtype fp16": '--precision.dtype = "fp16": not on a CPU',
    "--out {tmp}/run --phases.0.stepz 4": "--phases.0.stepz: unknown; did you mean phases.0.steps?",
    "--out {tmp}/run --stop-after third": "--stop-after third: no phase of this name; there is short, long",
    "--out {tmp}/run --init {tmp}/nothing": "{tmp}/nothing: no such folder",
    "--out {tmp}/run --init {data}": "{data}: no config.json and no finished checkpoint",
    "--out {tmp}/file/run": "--out {tmp}/file/run: cannot be written: {tmp}/file is not a folder; name another",
    "--model.layer 3": "--out: is missing",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages of a machine without GPU")
@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.usefixtures("leaves_group")
def test_mistakes_are_told_with_their_cure(words: str, place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    names = {"tmp": tmp_path, "data": place.data}
    arguments = ["--recipe", str(place.recipe), "--data", str(place.data), *words.format(**names).split()]
    met = "file/run" in words  # what is told after the ranks have met
    errors = assert_ended(launch(arguments, 1), 2) if met else run_main(entry.main, *arguments, code=2)
    assert MISTAKES[words].format(**names) in errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


@pytest.mark.usefixtures("leaves_group")
def test_all_mistakes_at_once(place: Place) -> None:
    words = ["--precision.dtype", "fp17", "--model.layer", "3", "--data", "/nowhere"]
    errors = run_main(entry.main, "--recipe", place.recipe, *words, code=2)
    for mistake in ("--out: is missing", "--precision.dtype = ", "--model.layer:", "/nowhere"):
        assert mistake in errors


@pytest.mark.parametrize("damage", ["nothing", "half-finished", "changed"])
def test_shards_that_cannot_be_used(place: Place, damage: str) -> None:
    """On two ranks; a shard that was changed is found by the rank that checks it, when it is first read, and what was
    trained until then is kept, though it is still being written."""
    data = Path(shutil.copytree(place.data, place.folder / "data"))
    if damage == "nothing":
        (data / "manifest.json").unlink()
        wanted = f"--data {data}: no manifest.json: not a folder of shards (make one with shard.py)"
    elif damage == "half-finished":
        (data / "manifest.json").unlink()
        (data / ".cloze-work").mkdir()
        (data / ".cloze-work" / "plan.json").touch()
        wanted = f"--data {data}: not finished; run the same shard.py command again to continue"
    else:
        shards = sorted((data / "length-64" / "duplicate-0").glob("*"))
        for shard in shards:
            flip(shard)
        wanted = "its SHA-256 is not that of its record: the content changed after it was written; copy it again"
    going = launch(dataclasses.replace(place, data=data).command("run"), fault=partial(slow_save, 0.3))
    assert_ended(going, 2, "error: ", wanted)
    if damage == "changed":
        assert [record["step"] for record in records(place.folder / "run")] == [1, 2, 3, 4, 5]
        assert [path.name for path in list_finished(place.folder / "run")] == ["step-00000005"]


def train_otherwise(command: list[str], more: list[str]) -> None:
    """What a rank does where rank 1 has got another command than rank 0."""
    be_train_py(command + more * (os.environ["RANK"] == "1"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "2"], "recipe and data: rank 1 differs from rank 0"),
        (["--data", "{other}"], "recipe and data: rank 1 differs from rank 0"),
        (["--data", "/nowhere"], "rank 1: --data /nowhere"),
        (["--phases.0.batch", "10"], "rank 1: --phases.0.batch = 10"),
    ],
)
def test_ranks_that_disagree(place: Place, other_data: Path, more: list[str], message: str) -> None:
    words = [word.format(other=other_data) for word in more]
    assert_ended(start(2, train_otherwise, place.command("run"), words), 2, f"error: {message}")
    assert not (place.folder / "run").exists()


@pytest.mark.slow
def test_a_port_in_use(place: Place) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        message = "is in use by another program or run\nchoose a free one: MASTER_PORT=<port>"
        assert_ended(launch(place.command("run"), port=listener.getsockname()[1]), 2, message)


def test_a_profile_is_written(place: Place) -> None:
    [done] = train(place.command("run", "--profile", "2"), 1)
    assert done.code == 0
    folder = place.folder / "run" / "profile"
    assert f"profile: {folder / 'table.txt'}" in done.output
    assert "aten::mm" in (folder / "table.txt").read_text()
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    }
    assert "ProfilerStep#4" in names, "the fourth step is profiled"


def test_a_folder_tells_of_the_last_command(place: Place) -> None:
    """Also of one that fails before anything is trained; not where the folder belongs to another run."""
    run = place.folder / "run"
    assert_well(train(place.command("run", "--stop-after", "short"), 1))
    assert json.loads((run / "ended.json").read_text())["code"] == 0
    assert_ended(launch(place.command("run", "--phases.0.batch", "10"), 1), 2)
    told = json.loads((run / "ended.json").read_text())
    assert (told["code"], told["reason"].split(":")[0]) == (2, "--phases.0.batch = 10")


@pytest.mark.usefixtures("leaves_group")
def test_a_slurm_job_without_srun_is_warned_of(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert run_main(entry.main, "--recipe", place.recipe, "--data", "/nowhere", code=2).startswith(
        "warning: Slurm reserved 4 tasks, and this is one process alone"
    )
