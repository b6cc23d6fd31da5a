"""A command as a whole: what it begins with, what it says, and which commands its messages name."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.finetuning import RECIPE, TASK, Toy, call, changed, results
from support.squad import article, item, write_squad
from support.task_models import task_weights
from support.transformers_models import PIECES, SHAPE

from data_prep.common.files import write_json
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.inputs import Cutter
from finetuning.model.models import find_model, summarize_model
from finetuning.results import RunResult, TaskResult
from finetuning.running import records
from finetuning.session.report import build_summary, describe_items, describe_splits, list_rows
from finetuning.settings import FineTuning
from finetuning.tasks.spans import TextWindows
from pretraining.huggingface.folders import write_fine_tuned
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.group import disconnect

pytestmark = pytest.mark.usefixtures("leaves_group")


def test_from_scratch_begins_with_fresh_weights(toy: Toy) -> None:
    """A run of one step at a learning rate of nearly nothing shows what it began with."""
    still = ["--learning-rates", "1e-12", "--epochs", "0.2"]
    begun = {"given": load_file(toy.model / "model.safetensors")}
    for out, more in (("taken", []), ("fresh", ["--from-scratch"]), ("other", ["--from-scratch", "--seed", "2"])):
        assert call("run_task", toy.command(out, *still, *more)) == 0
        disconnect()
        begun[out] = load_file(toy.folder / out / "toy" / "model" / "model.safetensors")
        card = (toy.folder / out / "toy" / "model" / "README.md").read_text()
        assert ("but not the weights" in card) == bool(more)
    names = [name for name in begun["given"] if name.endswith("query.weight")]
    assert names
    for name in names:
        given, taken, fresh, other = (begun[out][name] for out in ("given", "taken", "fresh", "other"))
        assert torch.allclose(given, taken, atol=1e-6)
        assert all(float((one - two).abs().max()) > 0.01 for one, two in ((given, fresh), (fresh, other)))


def test_results_tell_all_of_the_runs(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run_task", toy.command("out", "--seeds", "2")) == 0
    said = capsys.readouterr().out
    steps = [line for line in said.splitlines() if "items/s" in line and "epoch" in line]
    assert all(re.search(r" s left(  \(.* s for all runs\))?$", line) for line in steps)
    assert ["for all runs" in line for line in steps] == [True] * 5 + [False] * 5
    assert re.search(r"lr0\.003-seed1  accuracy  dev .*\n  [\d.]+ s left for toy$", said, re.MULTILINE)
    told = results(toy.folder / "out")
    assert told["metric"] == "accuracy"
    assert sorted(told["runs"]) == ["lr0.003-seed1", "lr0.003-seed2"]
    scores = sorted(run["score"] for run in told["runs"].values())
    assert told["spread"] == scores
    assert told["median"] == pytest.approx(sum(scores) / 2)
    assert told["score"] == scores[-1] == told["runs"][told["best"]]["score"]
    assert json.loads((toy.folder / "out" / "results.json").read_text())["toy"] == told
    spread, classes = told["spreads"]["dev"]["accuracy"], told["classes"]["dev"]
    assert told["items"]["dev"] == sum(each["items"] for each in classes.values()) == 24
    assert 0.05 < spread < 0.11  # of a half of 24 items it is 0.102
    assert sum(each["items"] * each["recall"] for each in classes.values()) / 24 == pytest.approx(scores[-1])
    assert f"dev {100 * scores[-1]:.1f} ± {100 * spread:.1f} on 24" in said
    for name, run in told["runs"].items():
        assert re.search(rf"toy +{name} +{100 * run['score']:.1f} ", said), name
    assert said.rstrip().endswith(f"next:\n    python finetuning/predict.py {toy.folder / 'out' / 'toy'}")
    named = (str(toy.folder), str(toy.data), "of 2 runs:", "toy: ", "items/s")  # what may be longer
    lines = [line for line in said.splitlines() if not any(name in line for name in named)]
    assert all(len(line.rstrip()) <= 80 for line in lines), said


def test_a_long_epoch_says_how_far_it_is(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "PATIENCE", 0.0)
    assert call("run_task", toy.command("out", "--batch-size", "1", "--epochs", "1", "--logging.every", "1000")) == 0
    assert re.search(r"^ 1/40  .* left  the loss follows at step 40$", capsys.readouterr().out, re.MULTILINE)


def test_a_model_with_fewer_positions_names_a_length_that_fits(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run_task", toy.command("out", "--length", "128")) == 2
    assert "has 64 positions; take --length 64" in capsys.readouterr().err
    disconnect()
    assert call("run_task", toy.command("out", "--length", "64", "--check")) == 0


@pytest.mark.parametrize("flag", ["--model", "--data"])
def test_results_go_beside_what_is_read(flag: str, toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    read = toy.model if flag == "--model" else toy.data
    words = ["--length", "64", "--model", str(toy.model), "--data", str(toy.data), "--out", f"{read}/../{read.name}"]
    assert call("run_squad", words) == 2
    assert f"is {flag} {read}, which is read" in capsys.readouterr().err


def test_no_task_at_all_is_refused(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run_task", toy.command("out")[1:]) == 2
    assert "docs/own-tasks.md" in capsys.readouterr().err
    assert not (toy.folder / "out").exists()


def test_without_the_files_of_conll_it_says_where_they_belong(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing fetches them, so the message names the place; once they are there the same command finds them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLOZE_DATA", raising=False)
    command = ["--model", str(toy.model), "--length", "32", "--check"]
    assert call("run_ner", command) == 2
    message = capsys.readouterr().err
    assert "train.txt, valid.txt and test.txt" in message
    assert "fetch.py" not in message
    (tmp_path / "data" / "ner").mkdir(parents=True)
    for name in ("train", "valid", "test"):
        (tmp_path / "data" / "ner" / f"{name}.txt").write_text("a B-PER\nb O\n")
    disconnect()
    assert call("run_ner", command) == 0


def test_it_says_which_questions_it_learns_from_and_which_it_scores(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    articles = [article(t, [("a word", [item(t, "which", ["word"])])]) for t in "abcd"]
    (data := tmp_path / "squad").mkdir()
    write_squad(data / "some-train-v1.1.json", articles)
    command = ["--model", str(toy.model), "--data", str(data), "--length", "32", "--spans.question", "8", "--check"]
    assert call("run_squad", command) == 0
    printed = capsys.readouterr().out
    assert f"squad1: reads some-train-v1.1.json of {data}\n" in printed
    assert "1 of its 4 questions (1 whole articles) are held out from training and scored" in printed
    for name in ("a", "b"):
        write_squad(data / f"{name}-dev-v1.1.json", articles)
    disconnect()
    assert call("run_squad", command) == 2
    message = capsys.readouterr().err
    assert "which is the dev split? name one of them with --dev: a-dev-v1.1.json, b-dev-v1.1.json" in message
    disconnect()
    assert call("run_squad", [*command, "--dev", str(data / "b-dev-v1.1.json")]) == 0
    assert f"squad1: reads some-train-v1.1.json, b-dev-v1.1.json of {data}\n" in capsys.readouterr().out


def test_a_file_of_questions_alone_is_enough(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLOZE_DATA", raising=False)
    train = write_squad(tmp_path / "mine.json", [article(t, [("a word", [item(t, "which", ["word"])])]) for t in "abc"])
    command = ["--model", str(toy.model), "--train", str(train), "--length", "32", "--spans.question", "8", "--check"]
    assert call("run_squad", command) == 0
    assert "1 of its 3 questions (1 whole articles) are held out" in capsys.readouterr().out
    disconnect()
    assert call("run_squad", [*command, "--dev", str(train), "--hold-out", "0.5"]) == 2
    assert "--hold-out and --dev: both say what is scored" in capsys.readouterr().err


def test_positions_that_were_never_trained_are_told(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(toy.model, tmp_path / "model")
    write_json(tmp_path / "model" / "tokenizer_config.json", {"do_lower_case": True, "model_max_length": 16})
    toy = replace(toy, model=tmp_path / "model")
    assert call("run_task", toy.command("out", "--length", "32", "--check")) == 0
    assert "was trained on texts of 16 pieces at most; longer ones, up to --length 32" in capsys.readouterr().out
    disconnect()
    assert call("run_task", toy.command("out", "--length", "16", "--check")) == 0
    assert "was trained on texts" not in capsys.readouterr().out


def test_a_recipe_says_where_to_compute(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    data = changed(toy, tmp_path, {"recipe.toml": f'{RECIPE}[parallel]\ndevice = "cuda"\n'})
    assert call("run_task", toy.command("out", data=data)) == 2
    assert "a GPU was asked for" in capsys.readouterr().err
    assert call("run_task", toy.command("out", "--parallel.device", "cpu", "--check", data=data)) == 0


def test_a_split_that_came_later_is_named_with_what_answers_it(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = changed(toy, tmp_path, {"toy.toml": TASK.replace('test = "test.tsv"\n', "")})
    assert call("run_task", toy.command("out", data=data)) == 0
    assert "is not answered" not in capsys.readouterr().out
    left = toy.folder / "out" / "toy" / "lr0.003-seed1" / "checkpoints" / "step-1"
    left.mkdir(parents=True)  # as after a kill
    (data / "toy.toml").write_text(TASK)
    disconnect()
    assert call("run_task", toy.command("out", data=data)) == 0
    told = capsys.readouterr().out
    assert "toy: test came after the best run, and is not answered: give --evaluate --model" in told
    assert not left.parent.exists()
    model = toy.folder / "out" / "toy" / "model"
    disconnect()
    assert call("run_task", toy.command("later", "--evaluate", "--model", model)) == 0
    assert (toy.folder / "later" / "toy" / "predictions" / "predictions_test.tsv").exists()


def commands_in(message: str) -> list[list[str]]:
    """The commands that a message names."""
    parts = [part for line in message.splitlines() for part in line.split(";")]
    found = [part.strip().removesuffix(" fetches it").removesuffix(" fetches them") for part in parts]
    return [shlex.split(part) for part in found if part.startswith("python ")]


@pytest.mark.parametrize("missing", ["model", "data"])
def test_the_command_alone_names_what_is_missing_and_the_commands_that_make_it(
    missing: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "data":
        shutil.copytree(toy.model, tmp_path / "exported" / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLOZE_DATA", raising=False)
    assert call("run_glue", ["--length", "32"]) == 2
    message = capsys.readouterr().err
    commands = commands_in(message)
    assert [command[1] for command in commands] == (
        ["finetuning/fetch.py"]
        if missing == "data"
        else ["data_prep/shard.py", "pretraining/train.py", "pretraining/export.py"]
    )
    for _, script, *words in commands:
        with pytest.raises(SystemExit):
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main(["--help"])
        help_text = capsys.readouterr().out
        assert all(word in help_text for word in words if word.startswith("--")), words
    assert not (tmp_path / "runs").exists()


def test_the_command_alone_takes_the_newest_model_and_all_tasks(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(toy.model, tmp_path / "exported" / "mine")
    for folder in ("RTE", "WNLI"):
        (tmp_path / "data" / "glue" / folder).mkdir(parents=True)
        for split in ("train", "dev", "test"):
            label = "entailment" if folder == "RTE" else "1"
            rows = [
                f"{number}\ta b\tc\t{label if number % 2 else label.replace('ent', 'not_ent', 1).replace('1', '0')}"
                for number in range(6)
            ]
            (tmp_path / "data" / "glue" / folder / f"{split}.tsv").write_text(
                "\n".join(["index\tsentence1\tsentence2\tlabel", *rows])
            )
    monkeypatch.chdir(tmp_path)
    assert call("run_glue", ["--length", "32", "--check"]) == 0
    printed = capsys.readouterr().out
    assert f"results go to {Path('runs') / 'mine' / 'glue'}" in printed
    assert [line.split()[0] for line in printed.splitlines() if "classes" in line] == ["rte", "wnli"]


def test_a_long_grid_is_shown_by_its_best() -> None:
    """All scores are spelled alike, and what failed stands at the end."""
    runs = {f"lr{number}": RunResult(score=number / 1000, seconds=3.0) for number in range(800, 812)}
    runs["lr0"] = RunResult(score=None, failed="the loss is nan")
    rows = list(list_rows(runs))
    assert [row[:2] for row in rows[:2]] == [("lr811", "81.1"), ("lr810", "81.0")]
    assert len(rows) == 11
    assert rows[-1][0] == "and 3 more, 80.1 to failed"
    assert list(list_rows({"bad": runs["lr0"], "same": RunResult(score=0.8, seconds=3.0, degenerate=True)})) == [
        ("same", "80.0", "3.0 s", "degenerate"),
        ("bad", "", "", "failed"),
    ]


def test_no_model_is_promised_where_all_runs_failed(tmp_path: Path) -> None:
    lines = list(build_summary([TaskResult(task="toy", metric="accuracy", runs={}, failed=["lr1"])], tmp_path))
    assert lines[-2:] == ["toy: no run left a model", f"predictions and all figures are in {tmp_path}"]


def test_the_plan_tells_splits_and_windows_apart(toy: Toy) -> None:
    settings = FineTuning.model_validate({"length": 12, "spans": {"question": 4}})
    cutter = Cutter(read_vocabulary(toy.model))
    windows = TextWindows([("a film", "a the plot film " * 10), ("a", "the plot")], cutter, settings)
    assert describe_items(windows) == f"2 questions\n{len(windows)} windows"
    assert len(windows) > 2
    splits: dict[str, Any] = {"dev_matched": range(9815), "dev_mismatched": range(9832)}
    assert describe_splits(splits) == "matched 9,815\nmismatched 9,832"


@pytest.mark.parametrize(
    ("place", "title"),
    [("runs/mini/glue/sst2/model", "mini-sst2"), ("runs/seeds/sst2/model", "seeds-sst2"), ("out/rte/model", "out-rte")],
)
def test_results_of_a_fine_tuned_model_are_called_after_it_and_its_task(place: str, title: str, tmp_path: Path) -> None:
    head = TaskHead("score")
    write_fine_tuned(
        tmp_path / place, SHAPE, head, task_weights(head), Vocabulary(PIECES, cased=False), "a card\n", {}, 16
    )
    assert summarize_model(find_model(str(tmp_path / place))).name == title
