"""Texts and pairs with a class, several labels or a number: what is laid out, held out, and written of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tasks import CUTTER, laid_out, rows, saying

from finetuning.inputs import Items
from finetuning.tasks.sentences import SentenceItems, format_predictions, hold_out
from pretraining.huggingface.weights import TaskHead

FILE = Path("train.tsv")


def items(*texts: str, second: list[str] | None = None) -> SentenceItems:
    columns = (list(texts),) if second is None else (list(texts), second)
    return SentenceItems(CUTTER, 16, columns, np.arange(len(texts))[:, None])


def test_items_come_in_any_order_again_and_again() -> None:
    pairs: Items = items("a", "b b", "c", second=["d", "e", "f f"])
    encoded = pairs.encode(np.array([2, 0, 2]))
    assert encoded.labels is not None
    assert encoded.labels.values.tolist() == [2, 0, 2]
    assert encoded.sequences.pieces.lengths.tolist() == [6, 5, 6]
    assert encoded.sequences.second.tolist() == [3, 3, 3]
    assert laid_out(pairs, 1) == ["[CLS] b b [SEP] e [SEP]"]


def test_a_share_is_held_out_by_what_the_texts_are() -> None:
    texts = [f"text {number}" for number in range(200)]
    parts, note = hold_out(FILE, {"test": items("a"), "train": items(*texts)}, 0.1)
    assert [*parts] == ["train", "dev", "test"], "runs are compared on the first that is scored"
    train, held = parts["train"], parts["dev"]
    assert (len(train), len(held)) == (180, 20)
    assert sorted([*train.texts[0], *held.texts[0]]) == sorted(texts)
    assert note == "train.tsv: 20 of its 200 rows are held out from training and scored"
    assert held.labels is not None
    assert [texts[label] for label in held.labels[:, 0]] == list(held.texts[0])
    turned = hold_out(FILE, {"train": items(*texts[::-1])}, 0.1)[0]["dev"]
    assert set(turned.texts[0]) == set(held.texts[0])
    more = hold_out(FILE, {"train": items(*texts, *(f"more {number}" for number in range(20)))}, 0.1)[0]["dev"]
    assert len(set(more.texts[0]) & set(held.texts[0])) >= 15


@given(st.lists(st.text(max_size=3), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_there_is_always_something_to_train_on_and_to_score(texts: list[str], share: float) -> None:
    parts, _ = hold_out(FILE, {"train": items(*texts)}, share)
    train, held = parts["train"], parts["dev"]
    assert len(train)
    assert len(held)
    assert sorted([*train.texts[0], *held.texts[0]]) == sorted(texts)


def test_predictions_are_a_table_that_can_be_read() -> None:
    labels = format_predictions(TaskHead("labels", ("toxic", "rude")), rows([[3, -3], [1, 1], [-1, -1]]).values)
    assert labels.decode().splitlines() == [
        "index\tprediction\ttoxic\trude",
        "0\ttoxic\t0.952574\t0.047426",
        "1\ttoxic rude\t0.731059\t0.731059",
        "2\t\t0.268941\t0.268941",
    ]
    assert format_predictions(TaskHead("score"), rows([[2.5], [1.25e-7]]).values) == (
        b"index\tprediction\n0\t2.5\n1\t1.25e-07\n"
    )
    choice = format_predictions(TaskHead("choice"), saying([3], 4).values).decode().splitlines()
    assert choice[0] == "index\tprediction\t0\t1\t2\t3"
    assert choice[1].startswith("0\t3\t")
    spread = format_predictions(TaskHead("classes", ("a\tb", "c\nd")), saying([1], 2).values).decode()
    assert spread.splitlines()[0] == "index\tprediction\ta b\tc d"
    assert pytest.approx(sum(map(float, spread.splitlines()[1].split("\t")[2:]))) == 1
