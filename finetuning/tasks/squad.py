"""SQuAD 1.1 and 2.0: questions whose answers are spans of a paragraph; in 2.0 some have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import write_json
from finetuning.files.splits import name_files
from finetuning.inputs import Cutter, Encoded, Ragged
from finetuning.results import Figures
from finetuning.settings import FineTuning
from finetuning.tasks import squad_rules as rules
from finetuning.tasks.scores import Certainty, bootstrap_spreads, estimate_share_spread
from finetuning.tasks.spans import RankedAnswers, TextWindows, find_answers, find_pieces
from finetuning.tasks.squad_rules import Question, Version
from finetuning.tasks.task import Column, PieceLengths, Seen, Setup, Task
from pretraining.architectures.weights import TaskHead

DEV = "dev"
"""The only split that is scored."""
PREDICTIONS, BEST, ODDS = "predictions.json", "nbest_predictions.json", "null_odds.json"
HELD_OUT = 0.1
"""Share of the questions that is held out and scored if there is no dev file."""


def open_squad(version: Version, train: Path | None, dev: Path | None, setup: Setup) -> SquadTask:
    """Reads SQuAD's files. Answers that are not at their offset are left out of training.

    Without `dev`, articles of `train` are held out for it.
    """
    learned = _read(train, version) if train else ()
    asked = _read(dev, version) if dev else ()
    notes = [name_files({split: [path] for split, path in (("train", train), (DEV, dev)) if path})]
    if not dev:
        count = len(learned)
        learned, asked = hold_out(learned, HELD_OUT)
        articles = len({question.article for question in asked})
        told = f"{len(asked):,} of its {count:,} questions ({articles:,} whole articles)"
        notes.append(f"{train}: {told} are held out from training and scored")
    placed, lost = _keep_placed(learned)
    notes += lost
    return SquadTask(version, placed, asked, setup, notes)


def _read(path: Path, version: Version) -> Sequence[Question]:
    _, questions = rules.read_squad(path)
    if version == "1.1" and (empty := next((each for each in questions if not each.golds), None)):
        raise UserError(f"{empty.where}: has no answer, as in SQuAD 2.0: use version 2.0")
    return questions


def hold_out(questions: Sequence[Question], share: float) -> tuple[list[Question], list[Question]]:
    """Divides questions into training and dev questions, in all runs alike; dev has at least the share.

    Questions on the same article are similar, so that articles are not divided.
    """
    sizes = Counter(question.article for question in questions)
    if len(sizes) < 2:
        raise UserError(f"articles held out for dev: train has {len(sizes)}, and it takes 2: name a dev file instead")
    articles, held, count = list(sizes), set(), 0
    for number in np.random.default_rng(0).permutation(len(articles))[:-1]:
        if count < share * len(questions):
            held.add(articles[number])
            count += sizes[articles[number]]
    return (
        [question for question in questions if question.article not in held],
        [question for question in questions if question.article in held],
    )


def is_placed(question: Question) -> bool:
    """Tells whether the first answer, if any, is at its offset in its context."""
    for gold in question.golds[:1]:
        end = gold.start + len(gold.text)
        return gold.start >= 0 and bool(gold.text.strip()) and question.context[gold.start : end] == gold.text
    return True


def _keep_placed(questions: Sequence[Question]) -> tuple[list[Question], list[str]]:
    """Returns the questions whose answer is at its offset, and a note on the others, if any."""
    placed, lost = list[Question](), list[Question]()
    for each in questions:
        (placed if is_placed(each) else lost).append(each)
    if not lost:
        return placed, []
    first = f"{lost[0].where}: {lost[0].golds[0].text!r} ({lost[0].id})"
    note = f"{len(lost):,} of {len(questions):,} answers are not at their offset, first {first}"
    if not placed:
        raise UserError(f"{note}; nothing is left to learn from: answer_start counts characters of the context from 0")
    return placed, [f"{note}; these questions are left out of training"]


class Lessons(TextWindows):
    """Training windows with the span of the first answer, or (0, 0) if it is not wholly inside."""

    def __init__(self, questions: Sequence[Question], cutter: Cutter, settings: FineTuning) -> None:
        super().__init__([(question.text, question.context) for question in questions], cutter, settings)
        self._golds = [question.golds[0] if question.golds else None for question in questions]

    def encode(self, numbers: Array) -> Encoded:
        encoded = super().encode(numbers)
        questions, begins, ends = (each[numbers] for each in self.places[1:])
        spans = np.full((len(questions), 2), (0, -1))  # last < first where there is no answer
        for row, offsets in enumerate(self.find_offsets(self.context[questions])):
            if gold := self._golds[questions[row]]:
                spans[row] = find_pieces(offsets, gold.start, gold.start + len(gold.text))
        inside = (spans[:, 0] >= begins) & (spans[:, 1] < ends) & (spans[:, 0] <= spans[:, 1])
        labels = np.where(inside[:, None], spans + (self.count_before(numbers) - begins)[:, None], 0)
        return Encoded(encoded.sequences, Ragged.from_table(labels))


class SquadTask(Task):
    """A version of SQuAD with its windows."""

    metric = "f1"
    head = TaskHead("spans")
    train: TextWindows
    dev: Mapping[str, TextWindows]

    def __init__(
        self, version: Version, train: Sequence[Question], dev: Sequence[Question], setup: Setup, notes: Sequence[str]
    ) -> None:
        cutter, settings = setup.cutter, setup.settings
        self.name, self.version, self.settings = f"squad{version[0]}", version, settings
        self.train, self.notes = Lessons(train, cutter, settings), tuple(notes)
        self.learned, self.questions = train, dev
        self._found: tuple[Ragged, Mapping[str, RankedAnswers]] | None = None
        self.dev = {DEV: TextWindows([(each.text, each.context) for each in dev], cutter, settings)} if dev else {}

    def _get_questions(self, split: str) -> tuple[Sequence[Question], TextWindows]:
        return (self.learned, self.train) if split == "train" else (self.questions, self.dev[split])

    def list_columns(self, split: str) -> list[Column]:
        """Lists the questions of a split with their texts, and the answers."""
        questions, items = self._get_questions(split)
        golds = [(number, gold) for number, each in enumerate(questions) for gold in each.golds]
        places = np.array([(number, gold.start) for number, gold in golds], np.int64)
        return [items.asked, items.texts, items.context, [gold.text for _, gold in golds], places]

    def describe_split(self, split: str) -> Seen:
        """Describes the questions of a split with their texts."""
        questions, items = self._get_questions(split)
        limit = self.settings.spans.question
        lengths = (PieceLengths("questions", "spans.question", limit, items.measure_questions),)
        answers = [tuple(gold.text for gold in each.golds) for each in questions]
        answered = sum(map(bool, answers))
        counts = {"answered": answered, "without an answer": len(answers) - answered} if self.version == "2.0" else {}
        return Seen((items.asked, [each.context for each in questions]), answers, lengths, counts)

    def _find_answers(self, split: str, outputs: Ragged) -> Mapping[str, RankedAnswers]:
        """Finds the answers to every question, sorted as in the written files; cached."""
        if self._found is None or self._found[0] is not outputs:
            found = find_answers(self.dev[split], outputs, optional=self.version == "2.0")
            answers = dict(sorted(zip((each.id for each in self.questions), found, strict=True)))
            self._found = outputs, answers
        return self._found[1]

    def _find_threshold(self, answers: Mapping[str, RankedAnswers]) -> float | None:
        """Finds the threshold with the best F1: answers with higher odds are left empty; None in 1.1.

        It is below all odds if leaving every answer empty is best.
        """
        if self.version == "1.1":
            return None
        odds = {name: each.odds for name, each in answers.items()}
        texts = {name: each.text() for name, each in answers.items()}
        scores = {each.id: rules.score_answer("2.0", each, texts[each.id])[1] for each in self.questions}
        answered = {each.id: bool(each.golds) for each in self.questions}
        _, threshold = rules.find_best_threshold(scores, answered, texts, odds)
        return float(np.nextafter(min(odds.values()), -np.inf)) if threshold is None else threshold

    def score(self, split: str, outputs: Ragged) -> Figures:
        """Scores a split by the official rules. In 2.0 `exact` and `f1` are at the threshold with the best F1, and
        `exact_at_zero`, `f1_at_zero` at 0, which is not tuned on dev."""
        answers = self._find_answers(split, outputs)
        if self.version == "1.1":
            numbers = rules.evaluate_1(self.questions, {name: each.text() for name, each in answers.items()})
            return {"exact": numbers["exact_match"] / 100, "f1": numbers["f1"] / 100}
        threshold, odds = self._find_threshold(answers), {name: each.odds for name, each in answers.items()}
        raw, best, plain = (
            rules.evaluate_2(self.questions, {name: each.text(limit) for name, each in answers.items()}, odds, np.inf)
            for limit in (None, threshold, 0.0)
        )
        chosen = best | {name: value for name, value in raw.items() if name.startswith("best_")}
        shares = {name: value for name, value in chosen.items() if not name.endswith("total")}
        scores = {name: value if name.endswith("_thresh") else value / 100 for name, value in shares.items()}
        return scores | {f"{name}_at_zero": plain[name] / 100 for name in ("exact", "f1")}

    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Bootstraps questions, with the threshold of 2.0 fixed."""
        answers = self._find_answers(split, outputs)
        threshold = self._find_threshold(answers)
        texts = {name: each.text(threshold) for name, each in answers.items()}
        scores = [rules.score_answer(self.version, each, texts[each.id]) for each in self.questions]
        right, f1 = np.array(scores, np.float64).T
        found = bootstrap_spreads(len(scores), lambda chosen: {"f1": float(f1[chosen].mean())})
        return Certainty(len(scores), {"exact": estimate_share_spread(right.sum(), len(scores)), **found})

    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        answers = self._find_answers(split, outputs)
        threshold = self._find_threshold(answers)
        write_json(folder / PREDICTIONS, {name: each.text(threshold) for name, each in answers.items()})
        best = {name: [one.as_dict() for one in each.candidates] for name, each in answers.items()}
        write_json(folder / BEST, best)
        if self.version == "2.0":
            write_json(folder / ODDS, {name: each.odds for name, each in answers.items()})

    def describe_use(self, outputs: Ragged) -> dict[str, Any]:
        threshold = self._find_threshold(self._find_answers(DEV, outputs)) if self.dev else None
        return {"length": self.settings.length, **self.settings.spans.model_dump(), "threshold": threshold}
