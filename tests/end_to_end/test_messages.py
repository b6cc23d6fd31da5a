"""What the command says: its report of a run, and mistakes with their cure."""

import dataclasses
import gzip
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from support.commands import run_main
from support.damage import flip
from support.faults import slow_save
from support.processes import start
from support.training import Place, assert_ended, assert_well, be_train_py, records, train

from pretraining import train as entry
from pretraining.checkpoint.record import list_finished


def test_what_is_printed(place: Place) -> None:
    """Losses with their shares, what was saved and how the model is loaded; the second start has nothing to do."""
    words = "--logging.tensorboard true --logging.every 3 --checkpoints.every 4 --phases.1.steps 2".split()
    command, run = place.command("run", *words), place.folder / "run"
    said = assert_well(train(command, 1))
    lines = said.splitlines()
    assert lines[0].startswith("37,383 parameters: 2 layers of 32, 229 pieces; adamw, fp32, ZeRO 1")
    assert "phase short (1 of 2): 5 steps; a step: 24 sequences of length 32, 6 x 4 a rank" in lines
    assert f"saved {run / 'checkpoints' / 'step-00000004'}" in lines
    assert lines[-1] == f'load it: transformers.AutoModelForMaskedLM.from_pretrained("{run / "export"}")'
    assert [*run.glob("events.*")]
    assert "all that was asked for is trained already" in assert_well(train(command, 1))
    assert [record["step"] for record in records(run)] == [3, 5, 6, 7]
    shares = re.findall(r"next [\d.]+ [\d.]+% \(larger class ([\d.]+)%\)", said)
    assert len(shares) == 6
    told = records(run, "step", "evaluation")
    assert [f"{100 * record['next_larger_class']:.1f}" for record in told] == shares
    assert f"| larger class of these | {shares[-1]}% |" in (run / "export" / "README.md").read_text()


MISTAKES = {
    "--out {tmp}/run --phases.0.length 65 --model.positions 65": "--phases.0.length = 65: the data has 32, 64; ",
    "--out {tmp}/run --phases.0.batch 10": "--phases.0.batch = 10: does not divide by 1 rank x phases.0.micro_batch",
    "--out {tmp}/run --stop-after third": "--stop-after third: no phase of this name; there is short, long",
    "--out {tmp}/run --data {tmp}": "--data {tmp}: no manifest.json: not a folder of shards (make one with shard.py)",
}


@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.usefixtures("leaves_group")
def test_mistakes_are_told_with_their_cure(words: str, place: Place, tmp_path: Path) -> None:
    arguments = ["--recipe", str(place.recipe), "--data", str(place.data), *words.format(tmp=tmp_path).split()]
    errors = run_main(entry.main, *arguments, code=2)
    assert MISTAKES[words].format(tmp=tmp_path) in errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


@pytest.mark.usefixtures("leaves_group")
def test_all_mistakes_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job of Slurm without srun is warned of."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    words = ["--precision.dtype", "fp17", "--model.layer", "3", "--data", "/nowhere"]
    errors = run_main(entry.main, "--recipe", place.recipe, *words, code=2)
    assert errors.startswith("warning: Slurm reserved 4 tasks, and this is one process alone")
    for mistake in ("--out: is missing", "--precision.dtype = ", "--model.layer:", "/nowhere"):
        assert mistake in errors


def test_a_shard_that_was_changed(place: Place) -> None:
    """It is found by the rank that checks it, when it is first read; what was trained until then is kept, though it is
    still being written."""
    data = Path(shutil.copytree(place.data, place.folder / "data"))
    for shard in (data / "length-64" / "duplicate-0").glob("*"):
        flip(shard)
    going = dataclasses.replace(place, data=data).launch("run", fault=partial(slow_save, 0.1))
    assert_ended(going, 2, "error: ", "its SHA-256 is not that of its record: the content changed after it was written")
    assert [record["step"] for record in records(place.folder / "run")] == [1, 2, 3, 4, 5]
    assert [path.name for path in list_finished(place.folder / "run")] == ["step-00000005"]


def train_otherwise(command: list[str], more: list[str]) -> None:
    """What a rank does where rank 1 has got another command than rank 0."""
    be_train_py(command + more * (os.environ["RANK"] == "1"))


DIFFERS = "recipe and data: rank 1 differs from rank 0"
DISAGREE = {"--seed 2": DIFFERS, "--data {other}": DIFFERS, "--phases.0.batch 10": "rank 1: --phases.0.batch = 10"}


@pytest.mark.parametrize("more", DISAGREE)
def test_ranks_that_disagree(place: Place, other_data: Path, more: str) -> None:
    words = more.format(other=other_data).split()
    assert_ended(start(2, train_otherwise, place.command("run"), words), 2, f"error: {DISAGREE[more]}")
    assert not (place.folder / "run").exists()


def test_a_profile_is_written(place: Place) -> None:
    command, folder = place.command("run", "--profile", "2", "--phases.1.steps", "1"), place.folder / "run" / "profile"
    [done] = train(command, 1)
    assert done.code == 0, done.errors
    assert f"profile: {folder / 'table.txt'}" in done.output
    assert "aten::mm" in (folder / "table.txt").read_text()
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "ProfilerStep#4" in {event.get("name") for event in events}, "the fourth step is profiled"


def test_a_folder_tells_of_the_last_command(place: Place, straight: Path) -> None:
    """Also of one that fails before anything is trained."""
    run = shutil.copytree(straight, place.folder / "run")
    assert json.loads((run / "ended.json").read_text())["code"] == 0
    assert_ended(place.launch("run", "--phases.0.batch", "10", ranks=1), 2)
    told = json.loads((run / "ended.json").read_text())
    assert (told["code"], told["reason"].split(":")[0]) == (2, "--phases.0.batch = 10")
