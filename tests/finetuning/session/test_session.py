"""A command as a whole: what it begins with, what it says, which commands its messages name, and how many runs go at a
time."""

import importlib
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.table import Table
from safetensors.torch import load_file
from support.finetuning import RECIPE, Toy, Tune, changed, results
from support.tasks import article, item, write_small_glue, write_squad

from data_prep.common.files import write_json
from data_prep.common.launchers import World
from data_prep.vocabulary.source import read_vocabulary
from finetuning.inputs import Cutter
from finetuning.results import BEGUN, PREDICTIONS, RESULTS, Begun, RunResult, TaskResult
from finetuning.session import workers
from finetuning.session.report import build_summary, give_back_predictions, read_all_results
from finetuning.session.workers import MachineShare, estimate_memory, share_machine
from finetuning.settings import FineTuning
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup
from pretraining.architectures.declaration import make_shape


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a command is given, without data that a variable names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLOZE_DATA", raising=False)
    return tmp_path


def test_from_scratch_begins_with_fresh_weights(toy: Toy, tune: Tune) -> None:
    """A run of one step at a learning rate of nearly nothing shows what it began with; who waits sees its steps."""
    still = ["--learning_rate", "1e-12", "--epochs", "0.4", "--logging.every", "1000"]
    begun = {"given": load_file(toy.model / "model.safetensors")}
    for out, more in (("taken", []), ("fresh", ["--from-scratch"]), ("other", ["--from-scratch", "--seed", "2"])):
        said = tune(toy.command(out, *still, *more))
        begun[out] = load_file(toy.folder / out / "toy" / "model" / "model.safetensors")
        card = (toy.folder / out / "toy" / "model" / "README.md").read_text()
        assert ("but not the weights" in card) == bool(more)
        assert re.search(r"^1/2  .* left  losses follow at step 2$", said, re.MULTILINE)
    for layer in (0, 1):
        query = f"bert.encoder.layer.{layer}.attention.self.query.weight"
        given, taken, fresh, other = (begun[out][query] for out in ("given", "taken", "fresh", "other"))
        assert torch.allclose(given, taken, atol=1e-6)
        assert all(float((one - two).abs().max()) > 0.01 for one, two in ((given, fresh), (fresh, other)))


@pytest.mark.slow
def test_results_tell_all_of_the_runs(toy: Toy, tune: Tune) -> None:
    said = tune(toy.command("out", "--seeds", "2"))
    assert re.search(r"lr0\.003-seed1  accuracy  dev .*\n  [\d.]+ s left for toy$", said, re.MULTILINE)
    told = results(toy.folder / "out")
    assert (told["metric"], sorted(told["runs"])) == ("accuracy", ["lr0.003-seed1", "lr0.003-seed2"])
    scores = sorted(run["score"] for run in told["runs"].values())
    assert (told["spread"], told["median"]) == (scores, pytest.approx(sum(scores) / 2))
    assert told["score"] == scores[-1] == told["runs"][told["best"]]["score"]
    assert json.loads((toy.folder / "out" / "results.json").read_text())["toy"] == told
    spread, classes = told["spreads"]["dev"]["accuracy"], told["classes"]["dev"]
    assert told["items"]["dev"] == sum(each["items"] for each in classes.values()) == 24
    assert 0.05 < spread < 0.11  # of a half of 24 items it is 0.102
    assert sum(each["items"] * each["recall"] for each in classes.values()) / 24 == pytest.approx(scores[-1])
    assert f"dev {100 * scores[-1]:.1f} ± {100 * spread:.1f} on 24" in said
    assert said.rstrip().endswith(f"next:\n    python finetuning/predict.py {toy.folder / 'out' / 'toy'} TEXTS")


def test_what_cannot_be_done_is_refused(toy: Toy, tune: Tune) -> None:
    """A model names a length that fits; results go beside what is read; there is a task."""
    assert "has 64 positions; take --length 64" in tune(toy.command("out", "--length", 128), code=2)
    tune(toy.command("out", "--length", 64, "--check"))
    command = ["--length", 64, "--model", toy.model, "--data", toy.data, "--out"]
    for read in (toy.model, toy.data):
        assert f"is what is read, {read}" in tune([*command, f"{read}/../{read.name}"], "run_squad", code=2)
    assert "docs/own-tasks.md" in tune(toy.command("out")[1:], code=2)
    assert not (toy.folder / "out").exists()


def test_without_the_files_of_conll_it_says_where_they_belong(toy: Toy, elsewhere: Path, tune: Tune) -> None:
    """Nothing fetches them, so the message names the place; once they are there the same command finds them."""
    command = ["--model", toy.model, "--length", 32, "--check"]
    message = tune(command, "run_ner", code=2)
    assert "train.txt, valid.txt and test.txt" in message
    assert "fetch.py" not in message
    (place := elsewhere / "data" / "ner").mkdir(parents=True)
    for name in ("train", "valid", "test"):
        (place / f"{name}.txt").write_text("a B-PER\nb O\n")
    tune(command, "run_ner")


def test_it_says_which_questions_it_learns_from_and_which_it_scores(toy: Toy, elsewhere: Path, tune: Tune) -> None:
    articles = [article(t, [("a word", [item(t, "which", ["word"])])]) for t in "abcd"]
    (data := elsewhere / "squad").mkdir()
    train = write_squad(data / "some-train-v1.1.json", articles)
    command = ["--model", toy.model, "--length", 32, "--spans.question", 8, "--check"]
    for words in (("--data", data), ("--train", train)):  # a file of questions alone is enough
        said = tune([*command, *words], "run_squad")
        assert f"squad1: reads {data}/some-train-v1.1.json\n" in said
    for name in ("a", "b"):
        write_squad(data / f"{name}-dev-v1.1.json", articles)
    told = "which is the dev split? name one of them with --dev: a-dev-v1.1.json, b-dev-v1.1.json"
    assert told in tune([*command, "--data", data], "run_squad", code=2)
    said = tune([*command, "--data", data, "--dev", data / "b-dev-v1.1.json"], "run_squad")
    assert f"squad1: reads {data}/some-train-v1.1.json, {data}/b-dev-v1.1.json\n" in said


def test_a_model_that_does_not_fit_the_texts_is_warned_of_and_a_recipe_says_where_to_compute(
    toy: Toy, tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(toy.model, tmp_path / "model")
    write_json(tmp_path / "model" / "tokenizer_config.json", {"do_lower_case": False, "model_max_length": 16})
    (tmp_path / "model" / "tokenizer.json").unlink()
    command = replace(toy, model=tmp_path / "model").command("out", "--check", "--length")
    assert "was trained on texts of 16 pieces at most; longer ones, up to --length 32" in tune([*command, 32])
    said = tune([*command, 16])
    assert (f"{tmp_path}/model: text is not put into lower case" in said, "trained on texts" in said) == (True, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = changed(toy, tmp_path, {"recipe.toml": f'{RECIPE}[parallel]\ndevice = "cuda"\n'})
    assert "a GPU was asked for" in tune(toy.command("out", data=data), code=2)
    tune(toy.command("out", "--parallel.device", "cpu", "--check", data=data))


def commands_in(message: str) -> list[list[str]]:
    """The commands that a message names."""
    parts = [part for line in message.splitlines() for part in line.split(";")]
    found = [part.strip().removesuffix(" fetches it").removesuffix(" fetches them") for part in parts]
    return [shlex.split(part) for part in found if part.startswith("python ")]


MAKERS = ["data_prep/shard.py", "pretraining/train.py", "pretraining/export.py"]


@pytest.mark.parametrize(("missing", "scripts"), [("model", MAKERS), ("data", ["finetuning/fetch.py"])])
def test_the_command_alone_names_what_is_missing_and_the_commands_that_make_it(
    missing: str, scripts: list[str], toy: Toy, elsewhere: Path, tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "data":
        shutil.copytree(toy.model, elsewhere / "exported" / "mine")
    commands = commands_in(tune(["--length", 32], "run_glue", code=2))
    assert [command[1] for command in commands] == scripts
    for _, script, *words in commands:
        with pytest.raises(SystemExit):
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main(["--help"])
        help_text = capsys.readouterr().out
        assert all(word in help_text for word in words if word.startswith("--")), words
    assert not (elsewhere / "runs").exists()


def test_the_command_alone_takes_the_newest_model_and_all_tasks(toy: Toy, elsewhere: Path, tune: Tune) -> None:
    shutil.copytree(toy.model, elsewhere / "exported" / "mine")
    write_small_glue(elsewhere / "data" / "glue")
    printed = tune(["--length", 32, "--check"], "run_glue")
    assert f"results go to {Path('runs') / 'mine' / 'glue'}" in printed
    assert [line.split()[0] for line in printed.splitlines() if "classes" in line] == ["rte", "wnli"]


def test_runs_are_listed_by_their_scores(tmp_path: Path) -> None:
    """All scores are spelled alike, and what failed stands at the end; no model is promised where all failed."""
    bad, same = RunResult(score=None, failed="the loss is nan"), RunResult(score=0.8, seconds=3.0, degenerate=True)
    runs = {"bad": bad, "same": same, "best": RunResult(score=0.811, seconds=3.0)}
    result = TaskResult(task="toy", metric="accuracy", runs=runs)
    table = next(part for part in build_summary([result], Path("out"), [result]) if isinstance(part, Table))
    lines = ["|".join(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]
    assert lines == ["toy|best|81.1|3.0 s|", "toy|same|80.0|3.0 s|degenerate", "toy|bad|||failed"]
    failed = [TaskResult(task="toy", metric="accuracy", runs={}, failed=["lr1"])]
    *_, last = build_summary(failed, tmp_path, failed)
    assert last == f"predictions and all figures are in {tmp_path}"


def test_results_have_the_tasks_of_earlier_commands_too(tmp_path: Path) -> None:
    model: dict[str, Any] = {"checksum": "mini"}
    for task, score, own in (("rte", 0.5, model), ("sst2", 0.6, model), ("qnli", 0.7, {"checksum": "base"})):
        TaskResult(task=task, metric="accuracy", score=score, runs={}).write(tmp_path / task / RESULTS)
        Begun(model=own).write(tmp_path / task / "one" / BEGUN)
    write_json(tmp_path / "glue" / RESULTS, {"rte": {}})  # of another command
    [now] = results = [TaskResult(task="rte", metric="accuracy", score=0.7, runs={})]
    found = read_all_results(results, tmp_path, model)
    assert [(each.task, each.score) for each in found] == [("sst2", 0.6), ("rte", now.score)]


def test_a_run_that_is_the_best_no_more_gets_its_predictions_back(tmp_path: Path) -> None:
    """A grid leaves the best run's predictions in the task's folder, not in its own; every run keeps them."""
    TaskResult(task="toy", metric="accuracy", best="first", runs={}).write(tmp_path / RESULTS)
    own, best = tmp_path / "first" / PREDICTIONS, tmp_path / PREDICTIONS
    own.parent.mkdir()
    best.mkdir()
    (best / "dev.tsv").write_text("of first")
    give_back_predictions(tmp_path, "first")
    assert (best / "dev.tsv").exists()
    give_back_predictions(tmp_path, "second")
    assert not best.exists()
    best.mkdir()  # the next best's; killed before that was noted
    give_back_predictions(tmp_path, "second")
    assert (own / "dev.tsv").read_text() == "of first"
    assert best.exists()


# How many runs go at a time: by cores, by memory, by what is left, and by what others leave free


CPU = torch.device("cpu")
GB = 1e9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """64 idle cores and 256 GB, and what of them is free now."""
    has = SimpleNamespace(total=256 * GB, free=256 * GB, busy=0.0)
    monkeypatch.setattr(workers, "num_cores", lambda: 64)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(workers, "default_threads", lambda world: 64)
    monkeypatch.setattr(workers, "read_total_memory", lambda device: has.total)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=has.free))
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: has.busy)
    return has


def share(runs: int, left: int | None = None, memory: float = 2 * GB, **search: object) -> MachineShare:
    settings = FineTuning.model_validate({"search": search})
    return share_machine(settings, World(), CPU, runs, runs if left is None else left, memory)


def test_a_machine_is_shared_by_what_runs_need(machine: SimpleNamespace) -> None:
    assert share(36) == MachineShare(36, 1)
    assert share(4) == MachineShare(4, 16)
    assert share(36, memory=16 * GB) == MachineShare(16, 4)  # as many as have room
    assert share(36, memory=600 * GB) == MachineShare(1, 64)  # never none
    assert share(36, jobs=3) == MachineShare(3, 21)  # who says how many decides
    world = replace(World(), launcher="torchrun")  # whose ranks make one run at a time
    assert share_machine(FineTuning(), world, CPU, 36, 36, 2 * GB) == MachineShare(1, 64)


def test_what_is_done_left_and_free_changes_no_threads(machine: SimpleNamespace) -> None:
    """They decide a run's bits, and these follow from the command and the machine."""
    assert share(36, left=3) == MachineShare(3, 1)
    assert share(36, left=0) == MachineShare(1, 1)
    machine.free = 20 * GB
    assert share(36) == MachineShare(10, 1)
    machine.busy = 95.0
    assert share(36) == MachineShare(3, 1)
    machine.busy = 100.0
    assert share(4) == MachineShare(1, 16)


@pytest.mark.parametrize(("size", "low", "high"), [("tiny", 1.5, 2.0), ("base", 5.0, 9.0), ("large", 12.0, 20.0)])
def test_the_memory_of_a_run_grows_with_its_model(toy: Toy, size: str, low: float, high: float) -> None:
    settings = FineTuning.model_validate({"precision": {"dtype": "fp32"}})
    task = open_own(toy.data / "toy.toml", Setup(Cutter(read_vocabulary(toy.model)), settings))
    assert low * GB < estimate_memory(task, settings, make_shape(size, 30522), CPU) < high * GB
