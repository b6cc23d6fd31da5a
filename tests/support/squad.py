"""Files in the format of SQuAD."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from finetuning.inputs import Cutter, Ragged
from finetuning.tasks.spans import TextWindows
from finetuning.tasks.squad_rules import Question, read_squad


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
    path.write_text(json.dumps({"data": list(articles)}, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def questions(folder: Path, items: list[dict[str, Any]], context: str = "x") -> list[Question]:
    """Questions on one context, as they are read."""
    return read_squad(write_squad(folder / "questions.json", [article("t", [(context, items)])]))[1]


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@functools.cache
def cutter() -> Cutter:
    """Cuts every word into its letters, those with accents too."""
    return Cutter(WordPiece((*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *",.-"), cased=False))


def random_outputs(windows: TextWindows, seed: int = 1) -> Ragged:
    """Random outputs for all windows, no two spans with the same score."""
    ends = windows.encode(np.arange(len(windows))).sequences.pieces.ends
    return Ragged(np.random.default_rng(seed).normal(size=(ends[-1], 2)).astype(np.float32), ends)
