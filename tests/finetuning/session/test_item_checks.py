"""What a command says before it trains: of its data, of files that cannot be used, and of models and settings that do
not fit together."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from support.base_models import swapped, write_bert
from support.finetuning import TASK, Toy, Tune, changed, write_toy
from support.tasks import CUTTER, VOCABULARY, article, item, write_squad

from data_prep.common.files import write_json
from finetuning.session.item_checks import SAMPLE, check_items
from finetuning.tasks.sentences import SentenceItems, SentenceTask
from pretraining.architectures.weights import TaskHead
from pretraining.huggingface.folders import WEIGHTS
from pretraining.huggingface.weights import write_weights

HEAD = "text\tlabel\n"
Check = Callable[..., str]
"""What `--check` says of the toy task with other rows."""


@pytest.fixture
def check(toy: Toy, tmp_path: Path, tune: Tune) -> Check:
    def run(*more: str, task: str = TASK, **rows: str) -> str:
        contents = {"toy.toml": task, **{f"{split}.tsv": content for split, content in rows.items()}}
        return tune(toy.command("out", "--check", *more, data=changed(toy, tmp_path, contents)))

    return run


def test_a_check_tells_classes_repetitions_and_what_is_cut(check: Check) -> None:
    train = [f"film {'a ' * number}\tgood\n" for number in range(8)] + ["film \tbad\n", "film a \tgood\n", "\tbad\n"]
    dev = "film a a \tgood\nnew plot\tgood\nplot plot\tbad\n"
    said = check("--length", "8", train=HEAD + "".join(train), dev=HEAD + dev)
    assert "toy: counts: train bad 2, good 9; dev bad 1, good 2 (the largest alone: 66.7%)" in said
    assert "twice in train: 2 of 11 items, 1 of them with another answer, such as 'film'" in said
    assert "in train and in dev, which flatters the scores: 1 of 3 (33.3%), such as 'film a a'" in said
    assert "texts longer than length = 8 are cut off: 5 of 11 of train" in said


def test_classes_that_train_lacks_are_named_and_of_many_the_first_are_listed(check: Check) -> None:
    task = TASK + 'labels = ["good", "bad", "new"]\n'
    said = check(task=task, train=HEAD + "a\tgood\nb\tbad\n", dev=HEAD + "film\tnew\nplot\tbad\n")
    assert "dev has classes not in train, which no model can learn: new 1" in said
    rows = HEAD + "".join(f"film {number}\tid{number:02}\n" for number in range(30))
    said = check(train=rows, dev=HEAD + "film\tid07\n")
    assert "id11 1 and 18 classes more; dev id07 1 (the largest alone: 100.0%)" in said


def test_nothing_is_said_of_numbers_and_sentences_that_are_well(check: Check) -> None:
    task = TASK.replace('test = "test.tsv"\n', "")
    said = check(task=task.replace("classes", "score"), train=HEAD + "a\t1\nb\t4\n", dev=HEAD + "c\t2\n")
    assert re.findall("^toy: .*", said, re.MULTILINE)[1:] == []
    said = check(task=task.replace("classes", "tags"), train="a B-PER\nb I-PER\n\nthe O\n", dev="a B-PER\n")
    assert re.findall("^toy: .*", said, re.MULTILINE)[1:] == ["toy: counts: train PER 1; dev PER 1"]


def test_questions_are_repetitions_and_their_texts_are_none(toy: Toy, tmp_path: Path, tune: Tune) -> None:
    questions = [item(name, question, ["word"]) for name, question in (("1", "which"), ("2", "what"), ("3", "which"))]
    train = write_squad(tmp_path / "train.json", [article("a", [("a word", questions)])])
    dev = write_squad(tmp_path / "dev.json", [article("b", [("the word", [item("4", "which", ["word"])])])])
    command = ["--model", toy.model, "--train", train, "--dev", dev, "--length", 32, "--spans.question", 8, "--check"]
    assert "squad1: twice in train: 1 of 3 items, such as 'which'\n" in tune(command, "run_squad")


def test_of_long_splits_the_lengths_of_a_sample_are_told_as_such() -> None:
    texts = [f"a premise of {number} words" for number in range(40_000)]
    items = SentenceItems(CUTTER, 16, (texts, texts), np.arange(40_000)[:, None] % 3)
    head = TaskHead("classes", ("a", "b", "c"))
    said = list(check_items(SentenceTask("own", head, "accuracy", ("accuracy",), ("text", "other"), {"train": items})))
    assert f"{SAMPLE:,} of train, a sample (" in said[-1]


# Files


GOOD = f"{HEAD}a good film\tgood\na bad film\tbad\na fine plot\tgood\n"


def test_a_file_is_refused(toy: Toy, tmp_path: Path, tune: Tune) -> None:
    """Other faults of files, tables, labels and descriptions are in the tests of tasks and readers."""
    data = changed(toy, tmp_path, {"dev.tsv": f"{GOOD}a great film\tsuperb\n"})
    errors = tune(toy.command("out", data=data), code=2)
    assert f"{data}/dev.tsv:5: unknown label 'superb'" in errors
    assert (errors.count("error: "), "Traceback" in errors) == (1, False)
    assert not (tmp_path / "out").exists()


# Models and settings that do not fit together


MIX = ("--features.layers", "mix")


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A fit task, whose model `mlm` stands beside others of the same and of another vocabulary."""
    folder = tmp_path_factory.mktemp("fit")
    for name in ("ltr", "rtl"):
        write_bert(folder / name, VOCABULARY, objective=name)
    write_bert(folder / "other", swapped(VOCABULARY, 10, 11), objective="rtl")
    write_bert(folder / "short", VOCABULARY, positions=40, objective="rtl")
    write_bert(folder / "deep", VOCABULARY, objective="rtl", layers=3)
    bare = write_bert(folder / "bare", VOCABULARY, objective="ltr")
    weights = {name: weight for name, weight in load_file(bare / WEIGHTS).items() if name.startswith("bert.")}
    write_weights(weights, bare / WEIGHTS)
    write_json(folder / "read" / "task.json", {"bilstm": {"hidden": 8}})
    return write_toy(folder)


UNFIT = [
    ("model", ["--features.layers", "concat-last-four"], "has 2 layers; take last or weighted-all"),
    ("ltr", ["--backward", "rtl"], "stands beside another model as frozen features; add --features.layers mix"),
    ("ltr", ["--backward", "other", *MIX], "has another vocabulary than"),
    ("ltr", ["--backward", "short", *MIX], "short has 40 positions; take --length 40"),
    ("ltr", ["--backward", "deep", *MIX], "deep: has 3 layers,"),
    ("model", ["--language_loss", "0.5"], "sees those after it, which are to be predicted; name a model that was"),
    ("rtl", ["--language_loss", "0.5"], "sees those after it"),
    ("ltr", ["--language_loss", "-1"], "language_loss"),
    ("ltr", ["--language_loss", "0.5", *MIX], "frozen encoders do not learn; leave it out, or features.layers"),
    ("bare", ["--language_loss", "0.5"], "bare has no language head; name the run or the export"),
    ("model", ["--bilstm.hidden", "7"], "bilstm.hidden = 7: one half is for each direction; take an even number"),
    ("read", ["--evaluate"], "is scored in its own training; predict.py asks it more"),
    ("model", ["--bilstm.hidden", "8", *MIX], "frozen features have a BiLSTM already"),
]


@pytest.mark.parametrize(("model", "flags", "message"), UNFIT)
def test_what_does_not_fit_is_refused(model: str, flags: list[str], message: str, fit: Toy, tune: Tune) -> None:
    words = [fit.folder / flag if (fit.folder / flag).is_dir() else flag for flag in flags]
    assert message in tune(replace(fit, model=fit.folder / model).command("out", *words), code=2)
    assert not (fit.folder / "out").exists()


def test_results_do_not_go_into_the_second_model_and_a_wide_bilstm_is_told(fit: Toy, tune: Tune) -> None:
    second = ("--backward", fit.folder / "rtl", *MIX)
    refused = tune(replace(fit, model=fit.folder / "ltr").command(fit.folder / "rtl", *second), code=2)
    assert f"is what is read, {fit.folder / 'rtl'}" in refused
    said = tune(fit.command("wide", "--bilstm.hidden", 2_000_000), code=2)
    assert "does not fit into memory; take a smaller model or BiLSTM" in said
