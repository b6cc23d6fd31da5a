"""SQuAD's own rules: its files, and the official figures of predictions, of versions 1.1 and 2.0."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from data_prep.common.errors import UserError
from data_prep.common.files import readable

Version = Literal["1.1", "2.0"]
Numbers = dict[str, float]
T = TypeVar("T")

ARTICLES = re.compile(r"\b(a|an|the)\b")
SURROGATE = re.compile("[\ud800-\udfff]")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
KINDS: dict[type, str] = {dict: "a table", list: "a list", str: "text", int: "a whole number"}


class Gold(NamedTuple):
    """An answer that a person gave: its text, and the character of the context where it begins."""

    text: str
    start: int


class Question(NamedTuple):
    """A question on a text. The questions of a paragraph share the string of their context."""

    id: str
    text: str
    context: str
    article: str
    """Tells apart the articles that the contexts come from."""
    golds: tuple[Gold, ...]
    """The answers that people gave; none where the context has no answer."""
    where: str
    """The file and the place in it, for messages."""


def normalize_answer(text: str) -> str:
    """Normalizes an answer: lower case, no ASCII punctuation, no articles, words separated by a blank."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(gold: str, prediction: str) -> int:
    """Returns 1 if two answers are equal when normalized, else 0."""
    return int(normalize_answer(gold) == normalize_answer(prediction))


def token_f1(version: Version, gold: str, prediction: str) -> float:
    """Computes F1 of the words of two answers. For two empty answers it is 1 in version 2.0 and 0 in 1.1."""
    golds, words = normalize_answer(gold).split(), normalize_answer(prediction).split()
    if version == "2.0" and not (golds and words):
        return float(golds == words)
    shared = sum((Counter(golds) & Counter(words)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(golds)
    return 2 * precision * recall / (precision + recall)


def score_answer(version: Version, question: Question, prediction: str) -> tuple[float, float]:
    """Computes exact match and F1 of a prediction, each against the gold answer that it fits best."""
    texts = [gold.text for gold in question.golds]
    if version == "2.0":
        texts = [text for text in texts if normalize_answer(text)] or [""]
    return (
        max(exact_match(text, prediction) for text in texts),
        max(token_f1(version, text, prediction) for text in texts),
    )


def evaluate_1(questions: Iterable[Question], predictions: Mapping[str, str]) -> Numbers:
    """Computes the percentages of the official script of 1.1, where a question without a prediction counts as wrong."""
    scores = [
        score_answer("1.1", question, predictions[question.id]) if question.id in predictions else (0.0, 0.0)
        for question in questions
    ]
    found = _average_scores(scores, "")
    return {"exact_match": found["exact"], "f1": found["f1"]}


def evaluate_2(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> Numbers:
    """Computes the figures of the official script of 2.0: percentages, totals, and with `odds` the best thresholds.

    Every question needs a prediction. `odds` says how sure it is that a question has no answer: above the threshold
    its prediction counts as empty.
    """
    raw = {question.id: score_answer("2.0", question, predictions[question.id]) for question in questions}
    answered = {question.id: bool(question.golds) for question in questions}
    empty = {name for name in raw if odds is not None and odds[name] > threshold}
    scores = {name: (float(not answered[name]),) * 2 if name in empty else raw[name] for name in raw}
    found = _average_scores(list(scores.values()), "")
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        found |= _average_scores([scores[name] for name in scores if answered[name] is wanted], prefix)
    for number, name in enumerate(("exact", "f1") if odds is not None else ()):
        best, at = find_best_threshold({key: raw[key][number] for key in raw}, answered, predictions, odds or {})
        found |= {f"best_{name}": 100.0 * best, f"best_{name}_thresh": 0.0 if at is None else at}
    return found


def _average_scores(scores: Sequence[tuple[float, ...]], prefix: str) -> Numbers:
    """Computes the mean scores of some questions as percentages, and their number; nothing for no questions."""
    if not scores:
        return {}
    exact, f1 = (100.0 * sum(values) / len(scores) for values in zip(*scores, strict=True))
    return {f"{prefix}exact": exact, f"{prefix}f1": f1, f"{prefix}total": len(scores)}


def find_best_threshold(
    scores: Mapping[str, float],
    answered: Mapping[str, bool],
    predictions: Mapping[str, str],
    odds: Mapping[str, float],
) -> tuple[float, float | None]:
    """Finds the threshold of the odds, above which predictions are emptied, with the best mean score; returns the score
    and the threshold.

    The threshold is None if it is best to empty all of them. Equal odds keep their order, as in the official script.
    """
    ranked = sorted((name for name in odds if name in scores), key=lambda name: odds[name])
    gains = [scores[name] if answered[name] else -1.0 if predictions[name] else 0.0 for name in ranked]
    reached = np.cumsum([float(sum(not answered[name] for name in scores)), *gains])
    best = int(reached.argmax())
    return float(reached[best]) / len(scores), odds[ranked[best - 1]] if best else None


def read_squad(path: Path) -> tuple[Version, list[Question]]:
    """Reads SQuAD's JSON; UserError with the place of what is wrong.

    Returns the version, of which 2.0 has questions without an answer, and the questions.
    """
    version, questions = _read_json(path)
    if not questions:
        raise UserError(f"{path}: no questions in it")
    first: dict[str, str] = {}
    for question in questions:
        if question.id in first:
            raise UserError(f"{question.where}: repeats the id {question.id!r} of {first[question.id]}")
        first[question.id] = question.where
        if version == "1.1" and not question.golds:
            raise UserError(f"{question.where}: no answer, which every question of SQuAD 1.1 has")
    return version, questions


def read_by_id(path: Path, kind: type[T], what: str) -> dict[str, T]:
    """Reads a JSON table of ids with predictions or odds."""
    content = _load(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a table of ids with {what}")
    for name, value in content.items():
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or isinstance(value, bool) or value != value:
            raise UserError(f"{path}: {name!r}: {_abbreviate(value)} stands where {what} are expected")
    return content


def _load(path: Path) -> Any:
    with readable(path):
        content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a whole JSON file: {error}") from error


def _read_json(path: Path) -> tuple[Version, list[Question]]:
    content = _load(path)
    questions, has_flag = [], False
    for article, articles in _list_tables(content, "data", f"{path}"):
        title = str(article.get("title", articles) if isinstance(article, dict) else articles)
        for paragraph, where in _list_tables(article, "paragraphs", articles):
            context = _get_field(paragraph, "context", str, where)
            for item, place in _list_tables(paragraph, "qas", where):
                golds = tuple(
                    Gold(_get_field(gold, "text", str, at, empty=True), _get_field(gold, "answer_start", int, at))
                    for gold, at in _list_tables(item, "answers", place)
                )
                if item.get("is_impossible") and golds:
                    raise UserError(f"{place}: says is_impossible, and has answers: leave out one of them")
                has_flag |= "is_impossible" in item
                name, text = (_get_field(item, key, str, place) for key in ("id", "question"))
                questions.append(Question(name, text, context, title, golds, place))
    said = str(content.get("version", "")).lower().removeprefix("v")
    return "2.0" if has_flag or said.startswith("2") else "1.1", questions


def _list_tables(table: Any, name: str, where: str) -> Iterator[tuple[Any, str]]:
    """The entries of a list in a table of JSON, each with its place in the file."""
    place = f"{where}: {name}" if ": " not in where else f"{where}.{name}"
    for number, entry in enumerate(_get_field(table, name, list, where, empty=True)):
        yield entry, f"{place}[{number}]"


def _get_field(table: Any, name: str, kind: type[T], where: str, empty: bool = False) -> T:
    """A value of a table of JSON; raises UserError unless it is there, of this type, and not empty."""
    value = table.get(name) if isinstance(table, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (value == "" and not empty):
        raise UserError(f"{where}: {name!r} should be {KINDS[kind]}; it is {_abbreviate(value)}")
    if isinstance(value, str) and not value.isascii() and SURROGATE.search(value):
        raise UserError(f"{where}: {name!r} has half of a character (a lone surrogate, \\ud8.. to \\udf..)")
    return value


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 40 else f"{text[:40]}…"
