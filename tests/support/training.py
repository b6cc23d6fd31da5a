"""Training runs of seconds, for tests: a small corpus, recipes and what is wrong with them, and the real command."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.commands import run_main
from support.faults import stop_at
from support.processes import ROOT, Done, Run, spawn, start
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_prep.common.codes import ENDED
from data_prep.common.errors import UserError
from data_prep.common.locks import LOCK
from pretraining.checkpoint.record import FOLDER, list_finished
from pretraining.config.overrides import load_recipe
from pretraining.data.batches import validation_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.processes.ending import Code

COMMAND = ROOT / "pretraining" / "train.py"
CUT = ["--deepspeed.zero_optimization.stage3_param_persistence_threshold", "0"]
"""under ZeRO 3, also of small parameters no rank keeps the whole"""
SAVES = ["--checkpoints.every", "1", "--checkpoints.keep", "9"]
FEW = ["--phases.0.steps", "1", "--phases.1.steps", "1"]
"""a step of each phase, where one is as good as many"""
SEED = 12345
"""that of a recipe which says none"""
ENDLESS = ["--phases.0.steps", "5000", "--checkpoints.every", "1"]
TIMES = {
    *("time", "seconds_per_step", "seconds_left", "evaluation_seconds", "waiting_for_data", "peak_memory_bytes"),
    *("pieces_per_second", "padded_pieces_per_second", "flops_utilisation"),
}
RECIPE = """
[model]
layers = 2
hidden = 32
heads = 2
positions = 64
[precision]
dtype = "fp32"
[[phases]]
name = "short"
length = 32
batch = 24
micro_batch = 4
steps = 5
learning_rate = 2e-3
warmup = 0.25
[[phases]]
name = "long"
length = 64
batch = 12
micro_batch = 2
steps = 3
[evaluation]
every = 0
examples = 25
[checkpoints]
every = 0
[logging]
every = 1
tensorboard = false
peak_flops = 1e12
"""


@dataclass(frozen=True)
class Place:
    """What a test of runs needs."""

    data: Path
    recipe: Path
    folder: Path

    def command(self, run: object, *more: object) -> list[str]:
        """The words of the command that trains in a folder of its own."""
        return [
            str(word) for word in ["--recipe", self.recipe, "--data", self.data, "--out", self.folder / str(run), *more]
        ]

    def launch(self, *words: object, **how: Any) -> Run:
        """Starts the command, and lets it go on."""
        return launch(self.command(*words), **how)

    def train(self, *words: object, **how: Any) -> str:
        """The command, which must end well, from its beginning to its end. Returns what it says."""
        return assert_well(train(self.command(*words), **how))


# Runs.


def connect_ranks() -> None:
    """Joins this process to the other ranks that a test has started."""
    from data_prep.common.launchers import find_world
    from pretraining.processes.group import connect

    connect(find_world(os.environ), torch.device("cpu"))


def call_connected(function: Callable[[], Any]) -> Any:
    from pretraining.processes.group import disconnect

    connect_ranks()
    result = function()
    disconnect()
    return result


def run_connected(ranks: int, function: Callable[[], Any], timeout: float = 90.0, **more: Any) -> list[Any]:
    """Calls a function on connected ranks, which must end well and silently. Returns its results."""
    done = spawn(ranks, call_connected, function, timeout=timeout, **more)
    assert_well(done)
    return [rank.result for rank in done]


def be_train_py(command: Sequence[str], fault: Callable[[], None] | None = None) -> None:
    """What a rank does: pretraining/train.py, with a fault."""
    from data_prep.common.supervision import exit_now
    from pretraining import train

    if fault is not None:
        fault()
    exit_now(train.main(list(command)))


def launch(command: Sequence[str], ranks: int = 2, fault: Callable[[], None] | None = None, **more: Any) -> Run:
    """Starts the real command, and lets it go on."""
    return start(ranks, be_train_py, command, fault, **more)


def train(command: Sequence[str], ranks: int = 2, seconds: float = 90.0, **more: Any) -> list[Done]:
    """The real command, from its beginning to its end."""
    return launch(command, ranks, **more).wait(seconds)


def train_straight(place: Place, name: str | Path, *more: object) -> Path:
    """A run of two ranks that nothing happens to."""
    assert_well(train(place.command(name, *more)))
    return place.folder / name


def assert_well(done: Sequence[Done]) -> str:
    """All ranks have done what they were to, and only rank 0 has said anything. Returns that."""
    assert [(rank.code, rank.errors) for rank in done] == [(0, "")] * len(done), [rank.ending for rank in done]
    return done[0].output


def assert_ended(run: Run, code: int, *messages: str) -> str:
    """All ranks end with this code; rank 0 says why, once, and the others say nothing. Returns what it says."""
    done = run.wait()
    assert [rank.code for rank in done] == [code] * len(done), [rank.errors for rank in done]
    for message in messages:
        assert done[0].errors.count(message) == 1, done[0].errors
    assert not any(rank.errors for rank in done[1:]), done
    assert "Traceback" not in done[0].errors
    return done[0].errors


def assert_refused(command: Sequence[str], *messages: str) -> str:
    """The real command, as one rank in this process, refuses what it is asked, and says why. Returns what it says."""
    from pretraining import train
    from pretraining.processes.group import disconnect

    threads = torch.get_num_threads()
    errors = run_main(train.main, *command, code=2)
    disconnect()
    torch.set_num_threads(threads)
    for message in messages:
        assert errors.count(message) == 1, errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    return errors


# What a run leaves.


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of these kinds, which are "step", the usual one, "evaluation" and "note"."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in (kinds or ("step",))]


def measured(run: Path) -> list[dict[str, Any]]:
    """The metrics, without what the clock says and notes on readers."""
    lines = records(run, "step", "evaluation")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def state(run: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint."""
    return {
        f"{path.name} {name}": value
        for path in list_finished(run)[-1].glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def assert_same(run: Path, wanted: Path) -> None:
    """Weights, moments and metrics, bit for bit."""
    ours, theirs = state(run), state(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert measured(run) == measured(wanted)
    assert not [path for path in (run / FOLDER).iterdir() if path.suffix in (".tmp", ".old")]


def assert_same_curve(run: Path, wanted: Path, tolerance: float) -> None:
    """Losses and norms of gradients at each step, to rounding."""
    ours, theirs = records(run), records(wanted)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in other.keys() & {"loss", "masked_loss", "next_loss", "gradient_norm"}:
            assert mine[name] == pytest.approx(other[name], rel=tolerance), f"{name} at step {mine['step']}"
        for name in ("learning_rate", "examples_seen", "pieces_seen"):
            assert mine[name] == other[name], f"{name} at step {mine['step']}"


def assert_goes_on(place: Place, words: Sequence[object], straight: Path, tolerance: float) -> Path:
    """A run of two ranks that is stopped and goes on is the straight one bit for bit; gone on with by one rank from a
    checkpoint of two, it has the same curve and weights to the tolerance. Returns this run."""
    command = place.command("stopped", *words)
    assert_ended(launch(command, fault=partial(stop_at, 4)), Code.STOPPED, "after step 4, and saved")
    assert_well(train(command))
    assert_same(place.folder / "stopped", straight)
    other = stopped_at(straight, place.folder / "other", 3)
    assert_well(train(place.command("other", *words), 1))
    assert_same_curve(other, straight, tolerance)
    assert distance(other, straight) < tolerance
    return other


def exported_weights(run: Path) -> dict[str, Tensor]:
    """The weights that a finished run has exported."""
    return load_file(run / "export" / "model.safetensors")


def distance(run: Path, wanted: Path) -> float:
    """The largest between two runs' exported weights."""
    ours, theirs = exported_weights(run), exported_weights(wanted)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def their_losses(model: Any, data: Path) -> list[float]:
    """The mean losses of a model of transformers on the examples that a run is scored on, padded: of masked pieces, and
    of next sentences where it has a head for them."""
    from support.pretraining_reference import pad_batch

    totals, counts, dataset = [0.0, 0.0], [0, 0], Dataset(Corpora.one(data), 64, validation=True)
    for batch, _ in validation_batches(dataset, 0, 1, 32, limit=25):
        given = pad_batch(batch)
        labels = given.pop("labels").flatten(), given.pop("next_sentence_label")
        with torch.no_grad():
            output = model.eval()(**given)
        masked = output.get("prediction_logits", output.get("logits")).flatten(0, 1)
        for kind, logits in enumerate((masked, output.get("seq_relationship_logits"))):
            if logits is not None:
                totals[kind] += float(cross_entropy(logits, labels[kind], reduction="sum"))
                counts[kind] += int((labels[kind] >= 0).sum())
    return [total / count for total, count in zip(totals, counts, strict=True) if count]


def stopped_at(source: Path, run: Path, step: int) -> Path:
    """A copy of a run that ended after a step."""
    shutil.copytree(source, run)
    for path in list_finished(run):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return run


def everything(run: Path) -> dict[Path, bytes]:
    """All files of a run, with their content, but for those that tell of its last start."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name not in (LOCK, ENDED))
    return {path: path.read_bytes() for path in files}


def contents(folder: Path) -> dict[str, bytes]:
    """Its files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


PLAIN = """
[model]
size = "tiny"

[[phases]]
name = "one"
length = 128
batch = 64
micro_batch = 16
steps = 100
learning_rate = 1e-3
warmup = 0.1

[[phases]]
name = "two"
length = 512
batch = 32
micro_batch = 8
steps = 20
"""

TAKE_WHAT_FITS = ("bert_base", "bert_large", "roberta", "gpt", "modern", "adapt")
"""How the names of our recipes begin whose micro-batches are "auto"; the others are for two CPU cores."""


def write_plain(folder: Path) -> Path:
    path = folder / "plain.toml"
    path.write_text(PLAIN)
    return path


def faults(path: Path, *overrides: str, **known: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides, **known)
    return str(caught.value).splitlines()


def completing(path: Path) -> list[str]:
    """What the command must say besides for a recipe of the house: a model, where the base model gives its sizes."""
    return ["--model.size", "base"] if path.stem == "adapt" else []
