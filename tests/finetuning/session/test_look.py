"""What a command says of its data before it trains: classes, repetitions, empty texts, and what is cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.finetuning import TASK, Toy, call, changed
from support.squad import article, item, write_squad
from support.tasks import CUTTER

from finetuning.session.look import SAMPLE, look
from finetuning.tasks.sentences import SentenceItems, SentenceTask
from pretraining.huggingface.weights import TaskHead

pytestmark = pytest.mark.usefixtures("leaves_group")
HEAD = "text\tlabel\n"


def said_of(
    toy: Toy, folder: Path, capsys: pytest.CaptureFixture[str], *more: str, task: str = TASK, **rows: str
) -> str:
    """What `--check` says of a task with other rows."""
    contents = {"toy.toml": task, **{f"{split}.tsv": content for split, content in rows.items()}}
    assert call("run_task", toy.command("out", "--check", *more, data=changed(toy, folder, contents))) == 0
    return capsys.readouterr().out


def test_a_check_tells_classes_repetitions_and_what_is_cut(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = [f"film {'a ' * number}\tgood\n" for number in range(8)] + ["film \tbad\n", "film a \tgood\n", "\tbad\n"]
    dev = "film a a \tgood\nnew plot\tgood\nplot plot\tbad\n"
    said = said_of(toy, tmp_path, capsys, "--length", "8", train=HEAD + "".join(train), dev=HEAD + dev)
    assert "toy: counts: train bad 2, good 9; dev bad 1, good 2 (the largest alone: 66.7%)" in said
    assert "twice in train: 2 of 11 items, 1 of them with another answer, such as 'film'" in said
    assert "in train and in dev, which flatters the scores: 1 of 3 (33.3%), such as 'film a a'" in said
    assert "empty texts: 1 of train" in said
    assert "texts longer than length = 8 are cut off: 5 of 11 of train" in said


def test_names_that_differ_by_case_and_classes_that_train_lacks(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = TASK + 'labels = ["Good", "good ", "bad", "new"]\n'
    train, dev = HEAD + "a\tGood\nthe\tgood \nb\tbad\n", HEAD + "film\tnew\nplot\tbad\n"
    said = said_of(toy, tmp_path, capsys, task=task, train=train, dev=dev)
    assert "'Good' and 'good ' differ by case or blanks" in said
    assert "dev has what train never has, so that nobody can learn it: new 1" in said
    assert "there are more classes (4) than training items (3)" in said


def test_a_column_that_is_no_class(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = HEAD + "".join(f"film {number}\tid{number}\n" for number in range(30))
    said = said_of(toy, tmp_path, capsys, train=rows, dev=HEAD + "film\tid7\n")
    assert "30 classes for 30 training items" in said
    assert "train has 30 of 30 classes, from 1 (id0) to 1 items (id0); dev has 1 of 30 classes" in said


def test_nothing_is_said_of_numbers_and_sentences_that_are_well(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = 'name = "toy"\ntrain = "train.tsv"\ndev = "dev.tsv"\nkind = '
    said = said_of(toy, tmp_path, capsys, task=task + '"score"', train=HEAD + "a\t1\nb\t4\n", dev=HEAD + "c\t2\n")
    assert [line for line in said.splitlines() if line.startswith("toy: ")][1:] == [
        "toy: numbers: train 1 to 4, mean 2.5; dev 2 to 2, mean 2"
    ]
    tags = {"train": "a B-PER\nb I-PER\n\nthe O\n", "dev": "a B-PER\n"}
    said = said_of(toy, tmp_path, capsys, task=task + '"tags"', **tags)
    assert [line for line in said.splitlines() if line.startswith("toy: ")][1:] == [
        "toy: counts: train PER 1; dev PER 1"
    ]


def test_questions_are_repetitions_and_their_texts_are_none(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [item(name, question, ["word"]) for name, question in (("1", "which"), ("2", "what"), ("3", "which"))]
    train = write_squad(tmp_path / "train.json", [article("a", [("a word", questions)])])
    dev = write_squad(tmp_path / "dev.json", [article("b", [("the word", [item("4", "which", ["word"])])])])
    command = [
        "--model",
        toy.model,
        "--train",
        train,
        "--dev",
        dev,
        "--length",
        "32",
        "--spans.question",
        "8",
        "--check",
    ]
    assert call("run_squad", [str(word) for word in command]) == 0
    said = capsys.readouterr().out
    assert "squad1: twice in train: 1 of 3 items, such as 'which'\n" in said


def test_of_long_splits_the_lengths_of_a_sample_are_told_as_such() -> None:
    texts = [f"a premise of {number} words" for number in range(40_000)]
    items = SentenceItems(CUTTER, 16, (texts, texts), np.arange(40_000)[:, None] % 3)
    head = TaskHead("classes", ("a", "b", "c"))
    said = list(look(SentenceTask("own", head, "accuracy", ("accuracy",), ("text", "other"), {"train": items})))
    assert f"{SAMPLE:,} of train, a sample (100.0%;" in said[-1]
