"""Answers as spans of a text: the windows of long texts, and the best spans in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from finetuning.inputs import Cutter, Encoded, Ragged
from finetuning.settings import FineTuning

BEST, SPARE = 20, 5
"""Answers of a question that are compared and written, as in BERT's code; and the spans of a window that are kept, as a
multiple of these: several may have the same text."""


class Places(NamedTuple):
    """The windows of questions, and their limits."""

    first: Array  # (questions + 1,): the first window of every question
    question: Array  # (windows,): whose window it is
    begins: Array  # (windows,), as the next: in the pieces of the text
    ends: Array


class TextWindows:
    """Questions with texts as sequences that fit the model: a long text makes several overlapping windows.

    The windows of a question follow one another; each is an item without labels. Texts are cut into pieces when the
    number of windows, or one of them, is first needed.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], cutter: Cutter, settings: FineTuning) -> None:
        """Takes pairs of a question and its text; a repeated text is cut once."""
        self.length, self.spans, self.cutter = settings.length, settings.spans, cutter
        self.marks = 2 + cutter.vocabulary.separators
        if self.length <= self.spans.question + self.marks:
            raise UserError(
                f"length = {self.length} leaves no room for text beside a question of {self.spans.question} pieces: "
                f"lengthen it, or shorten spans.question"
            )
        self.asked = [question for question, _ in pairs]
        numbers: dict[str, int] = {}
        self.context = np.array([numbers.setdefault(text, len(numbers)) for _, text in pairs], np.int64)
        self.texts = list(numbers)
        self._offsets: dict[int, Array] = {}

    @cached_property
    def questions(self) -> Ragged:
        """The kept pieces of the questions."""
        whole = self.cutter.cut_texts(self.asked)
        return whole.take_stretches(np.arange(len(whole)), 0, np.minimum(whole.lengths, self.spans.question))

    def measure_questions(self, numbers: Array) -> Array:
        """Returns the pieces of these questions, of which `spans.question` are kept."""
        return self.cutter.cut_texts([self.asked[number] for number in numbers.tolist()]).lengths

    @cached_property
    def pieces(self) -> Ragged:
        """The pieces of the texts."""
        return self.cutter.cut_texts(self.texts)

    @cached_property
    def places(self) -> Places:
        """The windows of every question."""
        room = self.length - self.marks - self.questions.lengths
        step = np.minimum(self.spans.stride, room)
        size = self.pieces.lengths[self.context]
        counts = 1 + np.maximum(-((room - size) // step), 0)
        first = np.concatenate([[0], np.cumsum(counts)])
        question = np.repeat(np.arange(len(counts)), counts)
        begins = (np.arange(len(question)) - first[question]) * step[question]
        return Places(first, question, begins, np.minimum(begins + room[question], size[question]))

    def __len__(self) -> int:
        return len(self.places.question)

    def encode(self, numbers: Array) -> Encoded:
        questions, begins, ends = (each[numbers] for each in self.places[1:])
        texts = self.pieces.take_stretches(self.context[questions], begins, ends)
        return Encoded(self.cutter.lay_out(self.questions.take(questions), texts, self.length), None)

    def count_before(self, numbers: Array) -> Array:
        """Counts the pieces before the text in these windows: [CLS], the question and [SEP]."""
        return self.questions.lengths[self.places.question[numbers]] + self.marks - 1

    def find_offsets(self, contexts: Array) -> list[Array]:
        """Finds the start and end of each piece of these texts in characters; each text is cut once."""
        missing = [number for number in dict.fromkeys(contexts.tolist()) if number not in self._offsets]
        if missing:
            _, offsets = self.cutter.cut_with_offsets([self.texts[number] for number in missing])
            assert (offsets.lengths == self.pieces.lengths[missing]).all(), "two ways to cut a text differ"
            for row, number in enumerate(missing):
                self._offsets[number] = offsets.row(row).astype(np.int32)
        return [self._offsets[number] for number in contexts.tolist()]

    def find_owned(self, number: int) -> Array:
        """Finds the pieces that have more context in this window than in any other of the question.

        The context of a piece is its shorter side, and slightly more in a longer window; ties go to the first window.
        """
        first, question, all_begins, all_ends = self.places
        begin, end = all_begins[number], all_ends[number]
        start, stop = first[question[number] : question[number] + 2]
        near = start + np.flatnonzero((all_begins[start:stop] < end) & (all_ends[start:stop] > begin))
        begins, ends, pieces = all_begins[near, None], all_ends[near, None], np.arange(begin, end)
        side = np.minimum(pieces - begins, ends - 1 - pieces)
        context = np.where(side < 0, -np.inf, side + 0.01 * (ends - begins))
        return near[context.argmax(0)] == number if len(pieces) else np.zeros(0, bool)


def find_pieces(offsets: Array, start: int, end: int) -> tuple[int, int]:
    """Finds the first and the last piece with characters from `start` up to `end`; last < first if there is none."""
    first = np.searchsorted(offsets[:, 1], start, side="right")
    last = np.searchsorted(offsets[:, 0], end, side="left") - 1
    return int(first), int(last)


@dataclass(frozen=True)
class Candidate:
    """A possible answer: a span of the text, or empty for no answer."""

    text: str
    start: int
    """Its start in the text, in characters."""
    start_logit: float
    end_logit: float
    probability: float
    """Normalized over the candidates of the question."""

    def as_dict(self) -> dict[str, str | float]:
        """Returns the fields that are written to files of predictions."""
        return {name: value for name, value in vars(self).items() if name != "start"}


class RankedAnswers(NamedTuple):
    """The candidates of a question."""

    candidates: tuple[Candidate, ...]
    """The most probable first; one is empty where questions may have no answer."""
    odds: float
    """Score of no answer minus that of the best answer; without any answer, its score."""

    def text(self, threshold: float | None = None) -> str:
        """Returns the best answer, or an empty one if the odds exceed the threshold."""
        if threshold is not None and self.odds > threshold:
            return ""
        return next((each.text for each in self.candidates if each.text), "")


def find_answers(windows: TextWindows, outputs: Ragged, optional: bool) -> Iterator[RankedAnswers]:
    """Yields the answers to every question from the logits of windows, rows of (pieces, 2) for starts and ends.

    Spans of at most `spans.answer` pieces compete, each in the window where its first piece has the most context.
    `optional`: questions may have no answer, which [CLS] represents.
    """
    rows = windows.find_offsets(windows.context)
    before, places = windows.count_before(np.arange(len(windows))), windows.places
    for question, offsets in enumerate(rows):
        spans, logits, nulls = [], [], []
        for number in range(places.first[question], places.first[question + 1]):
            row = outputs.row(number).astype(np.float64)
            begin, end = places.begins[number], places.ends[number]
            nulls.append((float(row[0, 0]), float(row[0, 1])))
            seen = row[before[number] : before[number] + end - begin]
            found = _best_spans(seen, windows.find_owned(number), windows.spans.answer)
            spans.append(found + begin)
            logits.append(np.stack([seen[found[:, 0], 0], seen[found[:, 1], 1]], 1))
        best = np.concatenate(spans)
        stretches = np.stack([offsets[best[:, 0], 0], offsets[best[:, 1], 1]], 1)
        context, null = windows.texts[windows.context[question]], min(nulls, key=sum)
        yield _rank_answers(context, stretches, np.concatenate(logits), null, optional)


def _best_spans(logits: Array, owned: Array, longest: int) -> Array:
    """Finds the best spans (n, 2) of a window, first and last piece, the best first."""
    reach = min(longest, len(logits))
    if not reach:
        return np.zeros((0, 2), np.int64)
    ends = np.concatenate([logits[:, 1], np.full(reach - 1, -np.inf)])
    scores = np.where(owned, logits[:, 0], -np.inf)[:, None] + sliding_window_view(ends, reach)
    starts = _find_greatest(scores.max(1), SPARE * BEST)  # the best spans begin there and nowhere else
    scores = scores[starts].reshape(-1)
    best = _find_greatest(scores, SPARE * BEST)
    best = best[scores[best] > -np.inf]
    first = starts[best // reach]
    return np.stack([first, first + best % reach], 1)


def _find_greatest(values: Array, number: int) -> Array:
    """Finds the indices of the greatest values, the greatest first."""
    return np.argsort(-values, kind="stable")[:number]


def _rank_answers(
    context: str, stretches: Array, logits: Array, null: tuple[float, float], optional: bool
) -> RankedAnswers:
    """Makes answers of the best spans (n, 2) of a text in characters: at most BEST, each text once."""
    order = np.argsort(-logits.sum(1), kind="stable")
    found: dict[str, tuple[int, float, float]] = {}
    for (start, end), pair in zip(stretches[order].tolist(), logits[order].tolist(), strict=True):
        if len(found) == BEST:
            break
        if end > start:
            found.setdefault(context[start:end], (start, *pair))
    kept = [(first + last, text, start, first, last) for text, (start, first, last) in found.items()]
    odds = sum(null) - (kept[0][0] if kept else 0.0)
    if optional:
        kept.append((sum(null), "", 0, *null))
        kept.sort(key=lambda each: -each[0])
    totals = np.array([each[0] for each in kept])
    shares = np.exp(totals - totals.max(initial=-np.inf))
    shares = (shares / shares.sum()).tolist()
    return RankedAnswers(tuple(Candidate(*each[1:], share) for each, share in zip(kept, shares, strict=True)), odds)
