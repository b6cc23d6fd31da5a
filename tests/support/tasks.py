"""What tests of fine-tuning tasks share: a small vocabulary, items as text, logits that say something, files of SQuAD,
and the files of tasks that README and docs/ speak of."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.common.arrays import Array
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from finetuning.files.splits import FOLDERS
from finetuning.inputs import Cutter, Items, Ragged
from finetuning.tasks.spans import TextWindows

_CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation
VOCABULARY = WordPiece((*SPECIAL, *_CHARACTERS, *(f"##{character}" for character in _CHARACTERS)), cased=False)
"""Pieces of one character."""
pytest.importorskip("numba", reason="numba is not installed, which cuts texts into pieces")
CUTTER = Cutter(VOCABULARY)


def encode(items: Items, *numbers: int) -> Any:
    """These items as model inputs, by default all; of no type, since a test knows which parts there are."""
    return items.encode(np.array(numbers or range(len(items)), np.int64))


def spell(items: Items, *numbers: int) -> list[list[str]]:
    """The pieces of the sequences of these items, by default of all."""
    sequences = encode(items, *numbers).sequences.pieces
    return [[VOCABULARY.pieces[piece] for piece in sequences.row(row)] for row in range(len(sequences))]


def laid_out(items: Items, number: int) -> list[str]:
    """The sequences of an item as text: `[CLS] a b [SEP]`, with its words whole."""
    return [" ".join(row).replace(" ##", "") for row in spell(items, number)]


def labels(items: Items) -> list[float]:
    """What is to be said of the items, whose labels are single ones."""
    return [float(label) for label in encode(items).labels.values]


def saying(classes: Sequence[int], outputs: int) -> Ragged:
    """Logits of a model that says these classes."""
    return rows(np.eye(outputs, dtype=np.float32)[list(classes)])


def rows(logits: Sequence[Sequence[float]] | Array) -> Ragged:
    """Logits of items, a row each."""
    values = np.array(logits, np.float32)
    return Ragged(values, np.arange(1, len(values) + 1))


def write_small_glue(folder: Path) -> None:
    """WNLI and RTE in nine rows, with test splits."""
    for name, answers in (("WNLI", ("1", "0", "1")), ("RTE", ("entailment", "not_entailment"))):
        (folder / name).mkdir(parents=True)
        for split in ("train", "dev", "test"):
            lines = ["index\tsentence1\tsentence2\tlabel"]
            lines += [f"{row}\ta b\ta c\t{answers[row % len(answers)]}" for row in range(9)]
            lines = [line.rpartition("\t")[0] if split == "test" else line for line in lines]
            (folder / name / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines))


# SQuAD


def item(name: str, question: str, golds: Sequence[str], version_2: bool = False) -> dict[str, Any]:
    """A question with the texts of its answers; `write_squad` finds where they are."""
    answers = [{"text": text, "answer_start": None} for text in golds]
    return {"id": name, "question": question, "answers": answers} | ({"is_impossible": not golds} if version_2 else {})


def article(title: str, paragraphs: Sequence[tuple[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """An article of paragraphs, each a context with its questions."""
    for context, items in paragraphs:
        for answer in (answer for each in items for answer in each["answers"]):
            if answer["answer_start"] is None:
                answer["answer_start"] = max(context.find(answer["text"]), 0)
    return {"title": title, "paragraphs": [{"context": context, "qas": items} for context, items in paragraphs]}


def write_squad(path: Path, articles: Sequence[dict[str, Any]]) -> Path:
    """Writes a file of articles; its version follows from the questions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": list(articles)}, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def write_questions(path: Path, items: list[dict[str, Any]], context: str = "x") -> Path:
    """Writes a file of questions on one context."""
    return write_squad(path, [article("t", [(context, items)])])


def random_outputs(windows: TextWindows, seed: int = 1) -> Ragged:
    """Random outputs for all windows, no two spans with the same score."""
    ends = encode(windows).sequences.pieces.ends
    return Ragged(np.random.default_rng(seed).normal(size=(ends[-1], 2)).astype(np.float32), ends)


# The tasks of the pages

ROWS = range(4)
CONTEXT = "The river is longer than the mountain is high, and the empire lay between them."
SENTENCE = "Anna NNP B-NP B-PER\nsees VBZ B-VP O\nRome NNP B-NP B-LOC\n. . O O\n\n"


def write_tasks(folder: Path) -> None:
    """A task of GLUE, SQuAD, SWAG, NER and one's own of a few rows, where the commands look for them."""
    files = {"pairs.tsv": "good\tbad\nthe cats sleep\tthe cats sleeps\nhe is\the are\n"}
    files["reviews.txt"] = "a fine film\ntwo hours that I want back\n"
    for split, swag, ner in (("train", "train", "train"), ("dev", "val", "valid")):
        files[f"data/glue/SST-2/{split}.tsv"] = "sentence\tlabel\n" + "".join(
            f"a fine film of {row} words\t{row % 2}\n" for row in ROWS
        )
        files[f"data/swag/{swag}.csv"] = "sent1,sent2,ending0,ending1,ending2,ending3,label\n" + "".join(
            f"He sees a river.,He,swims.,flies.,reads.,is a river.,{row}\n" for row in ROWS
        )
        files[f"data/ner/{ner}.txt"] = "-DOCSTART- -X- O O\n\n" + SENTENCE * len(ROWS)
        asked = [item(f"{split}{row}", f"What is longer, number {row}?", ["The river"]) for row in ROWS]
        write_questions(folder / f"data/squad/{split}-v1.1.json", asked, CONTEXT)
    for name in ("train", "dev", "unseen"):
        files[f"{name}.csv"] = "review,stars\n" + "".join(f"it was a film of {row} words,{row % 3}\n" for row in ROWS)
    for name in FOLDERS.values():  # empty but for SST-2
        (folder / "data" / "glue" / name).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
