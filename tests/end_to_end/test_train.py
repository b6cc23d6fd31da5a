"""The real command: the same curve however the work is shared, runs that go on, mistakes that are told, signals."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from support.pretraining_reference import padded
from support.processes import LAUNCHERS, ROOT, free_port, spawn
from support.training import COMMAND, Place, make_shards, records, started, train, train_all, wait_for
from torch import Tensor

from data_prep.shards import Manifest
from pretraining import train as entry
from pretraining.checkpoint.exporting import export
from pretraining.checkpoint.reading import finished, load_weights
from pretraining.data.batches import validation_batches
from pretraining.data.dataset import Dataset
from pretraining.huggingface.folders import read_folder
from pretraining.processes.group import disconnect
from pretraining.training.clock import Clock

RECIPES = sorted((ROOT / "pretraining" / "recipes").glob("*.toml"))
CUT = ["--deepspeed.zero_optimization.stage3_param_persistence_threshold", "0"]
"""under ZeRO 3, also of small parameters no rank keeps the whole"""
LAST = "step-00000008"
NO_DROPOUT = ["--model.dropout", "0", "--model.attention-dropout", "0"]
BF16 = ["--precision.dtype", "bf16"]


WAYS: dict[int, dict[str, list[str]]] = {
    1: {
        "straight": ["--parallel.zero", "0"],
        "all at once": ["--parallel.zero", "1", "--phases.0.micro-batch", "24", "--phases.1.micro-batch", "12"],
        "ZeRO 3": ["--parallel.zero", "3", "--phases.0.micro-batch", "8", *CUT],
        "checkpointed": ["--parallel.zero", "1", "--compute.checkpoint-activations", "true"],
        "without dropout": ["--parallel.zero", "0", *NO_DROPOUT],
        "plain operations": ["--parallel.zero", "1", "--compute.kernels", "torch", *NO_DROPOUT],
        "bf16": ["--parallel.zero", "1", *BF16],
        "two parts": ["--stop-after", "short"],
    },
    2: {
        "ZeRO 0": ["--parallel.zero", "0"],
        "ZeRO 1": ["--parallel.zero", "1", "--phases.0.micro-batch", "12"],
        "ZeRO 2": ["--parallel.zero", "2", "--phases.0.micro-batch", "6", "--phases.1.micro-batch", "3"],
        "ZeRO 3": ["--parallel.zero", "3", "--phases.0.micro-batch", "3", *CUT],
        "without dropout": ["--parallel.zero", "2", *NO_DROPOUT],
        "bf16 ZeRO 2": ["--parallel.zero", "2", *BF16],
        "bf16 ZeRO 3": ["--parallel.zero", "3", "--phases.0.micro-batch", "12", *BF16, *CUT],
    },
    3: {
        "ZeRO 3": ["--parallel.zero", "3", "--phases.0.micro-batch", "8", "--phases.1.micro-batch", "1", *CUT],
    },
}


@pytest.fixture(scope="module")
def runs(shared: Place) -> Place:
    """The same run in every way, in folders such as "2 ZeRO 3"."""
    for ranks, ways in WAYS.items():
        commands = [shared.command(f"{ranks} {name}", *more) for name, more in ways.items()]
        if ranks == 1:
            commands.append(shared.command("1 two parts", "--parallel.zero", "1"))
        results = train_all(ranks, commands)
        assert [(code, errors) for code, _, errors in results] == [(0, "")] * len(results)
    return shared


def assert_same_curve(run: Path, wanted: Path, tolerance: float) -> None:
    ours, theirs = records(run), records(wanted)
    assert [each["step"] for each in ours] == [each["step"] for each in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "masked", "next", "gradient_norm"):
            assert a[name] == pytest.approx(b[name], rel=tolerance), f"{name} at step {a['step']}"
        assert a["learning_rate"] == b["learning_rate"]


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def furthest(run: Path, wanted: Path) -> float:
    """Between the exported weights of two runs."""
    ours, theirs = weights(run), weights(wanted)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(("ranks", "way"), [(ranks, way) for ranks, ways in WAYS.items() for way in ways])
def test_the_same_curve_however_the_work_is_shared(runs: Place, ranks: int, way: str) -> None:
    reference = "1 without dropout" if way in ("without dropout", "plain operations") else "1 straight"
    run = runs.folder / f"{ranks} {way}"
    rounding = "bf16" in way
    assert_same_curve(run, runs.folder / reference, 0.02 if rounding else 1e-5)
    assert furthest(run, runs.folder / reference) < (0.01 if rounding else 1e-5)


def test_dropout_is_on(runs: Place) -> None:
    """So the test above can fail."""
    ours, without = (records(runs.folder / f"1 {way}")[0]["loss"] for way in ("straight", "without dropout"))
    assert abs(ours - without) > 1e-4


def test_bf16_ranks_agree_among_themselves(runs: Place) -> None:
    assert_same_curve(runs.folder / "2 bf16 ZeRO 2", runs.folder / "1 bf16", 2e-3)
    assert_same_curve(runs.folder / "2 bf16 ZeRO 3", runs.folder / "1 bf16", 2e-3)


def test_the_loss_falls(runs: Place) -> None:
    curve = [each["masked"] for each in records(runs.folder / "1 straight")]
    assert curve[-1] < curve[0] - 0.1


def their_validation_loss(folder: Path, data: Path, length: int) -> tuple[float, float]:
    """By transformers, on padded batches of the same examples."""
    model = transformers.BertForPreTraining.from_pretrained(folder)
    model.eval()
    masked, following, predictions, sequences = 0.0, 0.0, 0, 0
    dataset = Dataset(data, Manifest.read(data), length, validation=True)
    for batch, _ in validation_batches(dataset, 0, 1, 32, limit=64):
        given = padded(batch)
        labels, next_labels = given.pop("labels"), given.pop("next_sentence_label")
        with torch.no_grad():
            output = model(**given)
        entropy = torch.nn.functional.cross_entropy
        masked += float(entropy(output.prediction_logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        following += float(entropy(output.seq_relationship_logits, next_labels, reduction="sum"))
        predictions, sequences = predictions + len(batch.labels), sequences + len(batch.lengths)
    return masked / predictions, following / sequences


@pytest.mark.parametrize("way", ["1 straight", "2 ZeRO 3", "3 ZeRO 3"])
def test_the_exported_model_scores_in_transformers_what_the_run_said(runs: Place, way: str, tmp_path: Path) -> None:
    last = records(runs.folder / way, "evaluation")[-1]
    export(runs.folder / way, tmp_path / "again")
    for folder in (runs.folder / way / "export", tmp_path / "again"):
        masked, following = their_validation_loss(folder, runs.data, 64)
        assert masked == pytest.approx(last["masked"], abs=1e-3)
        assert following == pytest.approx(last["next_sentence"], abs=1e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer("the river").input_ids[0] == tokenizer.cls_token_id


def test_any_number_of_ranks_scores_the_same(runs: Place) -> None:
    first = records(runs.folder / "1 straight", "evaluation")
    for way in ("2 ZeRO 3", "3 ZeRO 3"):
        for ours, theirs in zip(records(runs.folder / way, "evaluation"), first, strict=True):
            assert (ours["step"], ours["examples"]) == (theirs["step"], theirs["examples"])
            assert ours["masked"] == pytest.approx(theirs["masked"], rel=1e-5)
            assert ours["next_sentence_accuracy"] == pytest.approx(theirs["next_sentence_accuracy"], abs=0.02)


# Runs that go on.


def test_what_is_printed(place: Place) -> None:
    command = place.command("run", "--logging.tensorboard", "true", "--checkpoints.every", "4", "--phases.1.steps", "2")
    (code, output, errors), again = train_all(1, [command, command])
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    run = place.folder / "run"
    assert lines[0].startswith("37,383 parameters: 2 layers of 32, 229 pieces; adamw, fp32, ZeRO 1")
    assert lines[1].startswith("1 rank on cpu, 1 thread each (")
    assert lines[1].endswith(f"; data {place.data}, run {run}")
    assert lines[2] == "phase short (1 of 2): 5 steps; a step: 24 sequences of length 32, 6 x 4 a rank"
    assert lines[3].startswith("1/7  loss ")
    assert f"saved {run / 'checkpoints' / 'step-00000004'}" in lines
    assert lines[-1] == f'load it: transformers.AutoModelForMaskedLM.from_pretrained("{run / "export"}")'
    assert sorted(path.name for path in finished(run)[-1].iterdir()) == [
        "checkpoint.json",
        "exp_avg-00000-of-00001.safetensors",
        "exp_avg_sq-00000-of-00001.safetensors",
        "weight-00000-of-00001.safetensors",
    ]
    assert list((run / "tensorboard").iterdir())
    assert (again[0], again[2]) == (0, "")
    assert "all that was asked for is trained already" in again[1]
    assert len(records(run)) == 7


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_was_killed_goes_on_with_the_same_batches(place: Place, ranks: int) -> None:
    longer = ["--phases.0.steps", "60", "--checkpoints.every", "2", "--parallel.zero", "2"]
    with started(ranks, *place.command("killed", *longer)) as (processes, wait):
        wait_for(lambda: len(finished(place.folder / "killed")) > 1)
        for process in processes:
            process.kill()
        assert {each.code for each in wait(10)} == {-signal.SIGKILL}
    stopped = int(finished(place.folder / "killed")[-1].name.removeprefix("step-"))
    assert stopped < 60, "it was done before it was killed"
    commands = [place.command(run, *longer) for run in ("killed", "straight")]
    (code, output, errors), straight = train_all(ranks, commands)
    assert (code, errors) == (straight[0], straight[2]) == (0, "")
    assert f"continues after step {stopped}" in output
    assert [each["step"] for each in records(place.folder / "killed")] == list(range(1, 64))
    assert_same_curve(place.folder / "killed", place.folder / "straight", 1e-9 if ranks == 1 else 1e-6)
    assert furthest(place.folder / "killed", place.folder / "straight") < 1e-6


def test_the_second_phase_by_itself(runs: Place, place: Place) -> None:
    """From a run, from its exported folder, and from an encoder without heads: with no rate, weights stay."""
    source = runs.folder / "1 straight"
    first = finished(source)[0]
    encoder = place.folder / "without heads"
    transformers.BertModel.from_pretrained(source / "export").save_pretrained(encoder)
    alone = place.folder / "second.toml"
    text = place.recipe.read_text()
    begin, end = text.index("[[phases]]"), text.rindex("[[phases]]")
    alone.write_text(text[:begin] + text[end:].replace("steps = 3", "steps = 1\nrate = 1e-30"))
    given = dataclasses.replace(place, recipe=alone)
    sources = {"run": source, "checkpoint": first, "folder": source / "export", "encoder": encoder}
    results = train_all(1, [given.command(name, "--init", path) for name, path in sources.items()])
    assert [(code, errors) for code, _, errors in results] == [(0, "")] * len(results)
    whole = weights(source)
    for name in ("run", "folder"):
        assert furthest(place.folder / name, source) == 0
    _, at_first, _ = read_folder(place.folder / "checkpoint" / "export")
    _, before, _ = load_weights(first)
    assert all(torch.equal(at_first[name], before[name][: len(at_first[name])]) for name in at_first)
    found = weights(place.folder / "encoder")
    bert = [name for name in whole if name.startswith("bert.")]
    assert all(torch.equal(found[name], whole[name]) for name in bert)
    assert not torch.equal(found["cls.seq_relationship.weight"], whole["cls.seq_relationship.weight"])


@pytest.fixture(scope="module")
def other(shared: Place) -> Path:
    """Other data, nothing of it held out, with the same vocabulary."""
    folder = make_shards(shared.folder / "other", validation=0)
    shutil.copy(shared.data / "vocab.txt", folder / "vocab.txt")
    return folder


def test_other_data_is_refused_unless_it_is_allowed(runs: Place, place: Place, other: Path) -> None:
    run = shutil.copytree(runs.folder / "1 two parts", place.folder / "run")
    shutil.rmtree(run / "checkpoints" / LAST)
    changed = dataclasses.replace(place, data=other)
    refused, allowed = train_all(1, [changed.command("run"), changed.command("run", "--data.allow-other", "true")])
    assert refused[0] == 2
    assert refused[2].startswith(f"error: --data {other}: {run} was trained on other data (fingerprint ")
    assert "allow it: --data.allow_other true" in refused[2]
    assert (allowed[0], allowed[2]) == (0, "")
    assert "no examples of length 64 are held out: no validation" in allowed[1]
    assert [each["step"] for each in records(run)] == list(range(1, 9))


def test_what_a_run_cannot_be_continued_with(runs: Place, place: Place) -> None:
    shutil.copytree(runs.folder / "1 straight", place.folder / "run")
    messages = {
        "run --resume never": "has checkpoints; name a new folder, or leave out --resume never",
        "run --model.layers 3": "was trained with the model Shape(layers=2",
        "run --phases.1.name other": "was trained with the phases ['short', 'long'], and this is ['short', 'other']",
        "run --optimizer.name lamb": "was trained with optimizer.name adamw, and this is lamb; name a new folder",
    }
    results = train_all(1, [place.command(*words.split()) for words in messages])
    for (code, _, errors), message in zip(results, messages.values(), strict=True):
        assert (code, message in errors, errors.count("error:")) == (2, True, 1), errors


def test_by_the_clock(place: Place) -> None:
    """It ends on time, and says how much is left."""
    recipe = place.folder / "clock.toml"
    recipe.write_text(
        "hours = 0.002\n"
        + place.recipe.read_text().replace("steps = 5", "share = 0.75").replace("steps = 3", "share = 0.25")
    )
    place = dataclasses.replace(place, recipe=recipe)
    [(code, output, errors)] = train_all(2, [place.command("run", "--logging.every", "7")])
    assert (code, errors) == (0, "")
    lines = records(place.folder / "run")
    ends = [max(each["step"] for each in lines if each["phase"] == phase) for phase in (1, 2)]
    before = [0, *(each["step"] for each in lines[:-1])]
    trained = sum(each["seconds"] * (each["step"] - done) for each, done in zip(lines, before, strict=True))
    assert 5.0 < trained < 9.0
    left = [each["seconds_left"] for each in lines]
    assert left == sorted(left, reverse=True)
    assert left[0] == pytest.approx(7.2, abs=1.5)
    assert left[-1] < 0.5
    assert lines[-1]["learning_rate"] < 1e-4
    assert 0 < ends[0] < ends[1]
    assert "phase short (1 of 2): 5.4 s; a step: " in output
    assert "/0" not in output


def test_the_clock_is_the_same_everywhere_and_estimates_between() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        clock = Clock(100.0, torch.device("cpu"))
        clock.step()
        assert (clock.seconds, clock.agreed) == (100.0, False)
        time.sleep(0.05)
        clock.agree()
        pace = clock.seconds - 100
        assert clock.agreed
        assert 0.05 <= pace < 0.5
        clock.step()
        clock.step()
        assert clock.seconds == pytest.approx(100 + 3 * pace)
    finally:
        dist.destroy_process_group()


# Mistakes.


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """The command takes them for itself, and leaves its process group to the end of the process after an error."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    disconnect()
    for number, handler in before.items():
        signal.signal(number, handler)


MISTAKES = {
    "--run {tmp}/run --model.positions 48": "phases.1.length = 64: from 8 to 48, the positions of the model",
    "--run {tmp}/run --phases.0.length 48": "--phases.0.length = 48: the data has 32, 64; make it with shard.py",
    "--run {tmp}/run --phases.0.batch 10": "--phases.0.batch = 10: does not divide by 1 rank x phases.0.micro_batch",
    "--run {tmp}/run --parallel.device cuda": '--parallel.device = "cuda": no GPU is found here',
    "--run {tmp}/run --precision.dtype fp16": '--precision.dtype = "fp16": not on a CPU',
    "--run {tmp}/run --phases.0.stepz 4": "--phases.0.stepz: unknown; did you mean phases.0.steps?",
    "--run {tmp}/run --stop-after third": "--stop-after third: no phase of this name; there is short, long",
    "--run {tmp}/run --init {tmp}/nothing": "{tmp}/nothing: no such folder",
    "--run {tmp}/run --init {data}": "{data}: has no finished checkpoint",
    "--run {tmp}/file/run": "--run {tmp}/file/run: cannot be written: Not a directory",
    "--model.layer 3": "--run: is missing",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages of a machine without GPU")
@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_told_with_their_cure(
    words: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_signals: None
) -> None:
    (tmp_path / "file").touch()
    names = {"tmp": tmp_path, "data": place.data}
    arguments = ["--recipe", str(place.recipe), "--data", str(place.data), *words.format(**names).split()]
    if "file/run" in words:  # it comes after the ranks have met
        [(code, _, errors)] = train_all(1, [arguments])
    else:
        code = entry.main(arguments)
        errors = capsys.readouterr().err
    assert code == 2
    assert MISTAKES[words].format(**names) in errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


def test_all_mistakes_at_once(place: Place, capsys: pytest.CaptureFixture[str], kept_signals: None) -> None:
    words = ["--phases.0.batch", "10", "--precision.dtype", "fp17", "--model.layer", "3", "--data", "/nowhere"]
    assert entry.main(["--recipe", str(place.recipe), *words]) == 2
    errors = capsys.readouterr().err
    for each in ("--run: is missing", "--phases.0.batch = 10", "--precision.dtype = ", "--model.layer:", "/nowhere"):
        assert each in errors


@pytest.mark.parametrize("damage", ["nothing", "half-finished", "changed"])
def test_shards_that_cannot_be_used(place: Place, damage: str) -> None:
    """On two ranks; a shard that was changed is found by the rank that checks it, when it is first read."""
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
            content = bytearray(shard.read_bytes())
            content[len(content) // 2] ^= 1
            shard.write_bytes(content)
        wanted = "its SHA-256 is not that of its record: the content changed after it was written; copy it again"
    done = train(2, *dataclasses.replace(place, data=data).command("run"), timeout=60)
    assert [each.code for each in done] == [2, 2]
    assert wanted in done[0].errors, done[0].errors
    assert done[0].errors.count("error: ") == 1
    assert done[1].errors == ""
    assert "Traceback" not in done[0].errors
    if damage == "changed":
        assert [each["step"] for each in records(place.folder / "run")] == [1, 2, 3, 4, 5]
        assert [path.name for path in finished(place.folder / "run")] == ["step-00000005"]


DIFFERENT = """
import os, sys
from pretraining import train
rank = int(os.environ["RANK"])
train.exit_now(train.main([*{common!r}, *{different!r}[rank]]))
"""


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([], ["--seed", "2"], "recipe and data: rank 1 differs from rank 0"),
        ([], ["--data", "{other}"], "recipe and data: rank 1 differs from rank 0"),
        ([], ["--data", "/nowhere"], "rank 1: --data /nowhere"),
        ([], ["--phases.0.batch", "10"], "rank 1: --phases.0.batch = 10"),
    ],
)
def test_ranks_that_disagree(place: Place, other: Path, first: list[str], second: list[str], message: str) -> None:
    different = [first, [each.format(other=other) for each in second]]
    common = [str(each) for each in place.command("run")]
    done = spawn(2, DIFFERENT.format(common=common, different=different), timeout=60)
    assert [each.code for each in done] == [2, 2]
    assert f"error: {message}" in done[0].errors, done[0].errors
    assert done[1].errors == ""
    assert not (place.folder / "run").exists()


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite(place: Place, zero: int) -> None:
    """Told once, by all ranks together; what was saved is sound."""
    wild = [
        "--phases.0.learning_rate",
        "1e30",
        "--optimizer.clip",
        "0",
        "--parallel.zero",
        zero,
        "--checkpoints.every",
        "1",
    ]
    done = train(2, *place.command("run", *wild, "--precision.dtype", "fp32"), timeout=60)
    assert [each.code for each in done] == [2, 2]
    assert done[0].errors.count("warning: the ") == 3
    assert "\nerror: the " in done[0].errors
    assert "lower the rate, lengthen its warm-up or clip the gradient" in done[0].errors
    assert done[1].errors == ""
    assert all(
        bool(torch.isfinite(each).all())
        for path in finished(place.folder / "run")
        for each in load_weights(path)[1].values()
    )


@pytest.mark.slow
def test_a_port_in_use(place: Place) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        done = train(2, *place.command("run"), port=listener.getsockname()[1], timeout=90)
    assert [each.code for each in done] == [2, 2]
    assert "is in use by another program or run\nchoose a free one: MASTER_PORT=<port>" in done[0].errors
    assert done[1].errors == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system for two checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk(place: Place, small_disk: Path, ranks: int) -> None:
    """The checkpoint before stays, and what was begun goes."""
    place = dataclasses.replace(place, folder=small_disk)
    done = train(ranks, *place.command("run", "--checkpoints.every", "1", "--parallel.zero", "1"), timeout=60)
    assert [each.code for each in done] == [2] * ranks
    assert "cannot be written: No space left on device" in done[0].errors, done[0].errors
    assert "the same command goes on from the last one" in done[0].errors
    assert "Traceback" not in done[0].errors
    assert all(not each.errors for each in done[1:])
    assert finished(small_disk / "run")
    if ranks == 1:  # among several, one may still write when another clears up; the next to save does it
        assert not list((small_disk / "run" / "checkpoints").glob("*.tmp"))


# Signals.


SIGNALS = [
    (2, signal.SIGINT),
    pytest.param(1, signal.SIGINT, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "number"), SIGNALS)
def test_an_interrupted_run_ends_at_once_and_quietly(place: Place, ranks: int, number: int) -> None:
    with started(ranks, *place.command("run", "--phases.0.steps", "5000")) as (processes, wait):
        wait_for(lambda: (place.folder / "run" / "metrics.jsonl").exists() and len(records(place.folder / "run")) > 3)
        for process in processes:
            process.send_signal(number)
        done = wait(15)
    assert [each.code for each in done] == [130] * ranks, done[0].errors
    assert done[0].errors.strip() == "interrupted; the same command continues from the last checkpoint"
    assert all(not each.errors for each in done[1:])


def test_a_rank_that_dies_ends_the_others(place: Place) -> None:
    with started(2, *place.command("run", "--phases.0.steps", "5000")) as (processes, wait):
        wait_for(lambda: (place.folder / "run" / "metrics.jsonl").exists() and len(records(place.folder / "run")) > 3)
        processes[1].kill()
        done = wait(30)
    assert [each.code for each in done] == [76, -signal.SIGKILL]
    assert done[0].errors.startswith("error: rank 1 has ended, or cannot be reached any more\n")
    assert "Traceback" not in done[0].errors


# Launchers.

LAUNCHED = [
    "torchrun --nproc-per-node 2 --",
    pytest.param("deepspeed --num_gpus 2 --master_port {port}", marks=pytest.mark.slow),
    pytest.param("mpirun --allow-run-as-root --oversubscribe -n 2 {python}", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("command", LAUNCHED)
def test_launchers(place: Place, command: str) -> None:
    words = command.format(python=sys.executable, port=free_port()).split()
    program = shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"no {words[0]} here")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    if words[0] == "torchrun":
        clean["MASTER_PORT"] = str(free_port())
    arguments = [str(each) for each in [*words[1:], COMMAND, *place.command("run", "--phases.0.steps", "2")]]
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(
        [program, *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path},
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 ranks on cpu, 1 thread each ({words[0]}); data" in done.stdout
    assert [each["step"] for each in records(place.folder / "run")] == [1, 2, 3, 4, 5]
    if words[0] != "deepspeed":  # which tells of itself
        assert done.stderr == ""


@pytest.mark.slow
def test_srun_sets_all_that_is_needed(place: Place) -> None:
    """Without Slurm: its variables of a step of one task. `deepspeed`'s --local_rank is passed over."""
    step = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1",
    }  # fmt: skip
    script = f"""
import os
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
from pretraining import train
train.exit_now(train.main({[str(each) for each in place.command("run", "--local_rank=0", "--phases.0.steps", "1")]!r}))
"""
    [done] = spawn(1, script, environment=step)
    assert (done.code, done.errors) == (0, "")
    assert "1 rank on cpu, 1 thread each (srun)" in done.output


def test_a_slurm_job_without_srun_is_warned_of(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept_signals: None
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert entry.main(["--recipe", str(place.recipe), "--data", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("warning: Slurm reserved 4 tasks, and this is one process alone")


# The plan.


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_the_plan_of_every_recipe(
    path: Path, ranks: int, capsys: pytest.CaptureFixture[str], kept_signals: None
) -> None:
    options = ["--ranks", str(ranks), "--pieces-per-second", "1e6"]
    code = entry.main(["--recipe", str(path), "--check", *options])
    printed = capsys.readouterr()
    if code == 2:  # small batches do not divide among so many
        assert "does not divide by" in printed.err
        assert ranks > 1
        return
    assert (code, printed.err) == (0, "")
    assert f" on {ranks} rank" in printed.out
    assert "learning rate" in printed.out


def test_the_plan_with_data(place: Place, capsys: pytest.CaptureFixture[str], kept_signals: None) -> None:
    command = ["--recipe", str(place.recipe), "--data", str(place.data), "--check"]
    assert entry.main(command) == 0
    first = capsys.readouterr().out
    assert "vocabulary 229; fp32 on 1 rank, ZeRO 1, adamw" in first
    assert "no --data" not in first
    assert entry.main([*command, "--precision.dtype", "fp16", "--ranks", "3"]) == 0  # for another machine
    assert "fp16 on 3 ranks" in capsys.readouterr().out
    assert entry.main([*command, "--ranks", "5"]) == 2
    assert "does not divide by 5 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_layers_train_to_the_same_losses(runs: Place, place: Place) -> None:
    ways = [[*NO_DROPOUT, "--parallel.zero", zero, "--compute.compile", "true"] for zero in ("0", "2")]
    results = train_all(1, [place.command(way[-3], *way) for way in ways], timeout=350)
    assert [(code, errors) for code, _, errors in results] == [(0, ""), (0, "")]
    for zero in ("0", "2"):
        assert_same_curve(place.folder / zero, runs.folder / "1 without dropout", 1e-4)
