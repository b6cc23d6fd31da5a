"""A tag for each word, as in named-entity recognition on CoNLL-2003, scored by entity.

IOB2 (B- opens an entity, I- continues it), IOB1 (I- opens one too, unless it follows another of its type) and marks for
the last and the only word (E- or L-, S- or U-) all become IOB2. Tags without such marks, such as parts of speech, are
scored word by word.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from finetuning.files.splits import find_ner, name_files
from finetuning.files.tag_files import DOCUMENT, HUB_TAGS, Fields, Sentence, hold_out, read_sentences
from finetuning.ragged import Ragged
from finetuning.results import Figures, name_predictions_file
from finetuning.tasks.scores import Certainty, Tally, bootstrap_spreads, describe_classes, tally
from finetuning.tasks.tagged_words import TaggedWords, Words
from finetuning.tasks.task import Column, Compared, Lengths, Seen, Setup, Task
from pretraining.architectures.weights import TaskHead

OUTSIDE = "O"
BLANKS = re.compile(r"\s+")
MARKED = re.compile(r"[BIELSU]-.+")
IOB = {"B": "B", "I": "I", "E": "I", "L": "I", "S": "B", "U": "B"}
"""Marks of other schemes in IOB."""


def open_ner(folder: Path, setup: Setup) -> Task:
    """Reads CoNLL-2003, or data in its files, from a folder."""
    return open_tags("ner", find_ner(folder, setup.trained is not None), setup, Fields(names=HUB_TAGS))


def open_tags(
    name: str, files: Mapping[str, Sequence[Path]], setup: Setup, fields: Fields, held_out: float = 0.0
) -> Task:
    """Reads the files of `train`, `dev` and perhaps `test`; `fields` is for Parquet and JSON lines.

    Without `dev`, the share `held_out` of `train` takes its place. Without `train`, the labels are the model's.
    """
    notes = [name_files(files)]
    splits = {split: read_sentences(paths, fields, split != "test") for split, paths in files.items()}
    if "dev" not in splits:
        train, dev, note = hold_out(files["train"][0], splits["train"], held_out)
        splits = {"train": train, "dev": dev, **{split: each for split, each in splits.items() if split != "train"}}
        notes.append(note)
    return Tagging(name, splits, setup, fields.words, notes)


class Tagging(Task):
    """A task with a tag for each word."""

    def __init__(
        self, name: str, splits: Mapping[str, Sequence[Sentence]], setup: Setup, field: str, notes: Sequence[str]
    ) -> None:
        """`field` is the name of the words for predictions, `notes` are lines for the user on the files."""
        labels, length = setup.trained.labels if setup.trained else (), setup.settings.length
        self.name, self._length, self._field, notes = name, length, field, list(notes)
        self._context = context = setup.settings.tags.document_context
        learned = {tag for each in splits.get("train", ()) for tag in each.tags or ()}
        self._by_entity = any(map(MARKED.fullmatch, learned or labels))
        if self._by_entity:
            splits = {split: _convert_to_iob2(sentences, notes) for split, sentences in splits.items()}
        labels = _list_labels(splits["train"], self._by_entity) if "train" in splits else labels
        items = {}
        for split, sentences in splits.items():
            items[split] = TaggedWords(_join_words(sentences, labels), setup.cutter, length, context)
            if context and not any(sentence.parts_documents for sentence in sentences):
                notes.append(f"{sentences[0].place} no {DOCUMENT} parts documents: all of it counts as one")
        self.head, self.metric = TaskHead("tags", labels), "f1" if self._by_entity else "accuracy"
        self.train, self.notes = items.get("train", items["dev"]), tuple(notes)
        self._items = {"train": self.train, **items}
        asked = {split: each for split, each in items.items() if split != "train"}
        self.dev = {split: each for split, each in asked.items() if each.words.tags is not None}
        self.test = {split: each for split, each in asked.items() if each.words.tags is None}

    def _get_tagged(self, split: str) -> tuple[Words, Array]:
        """Returns the words of a split with their tags."""
        words = self._items[split].words
        assert words.tags is not None
        return words, words.tags

    def list_columns(self, split: str) -> list[Column]:
        """Lists the words of a split with their tags, if known, and the ends of sentences and documents."""
        words = self._items[split].words
        tags = [] if words.tags is None else [words.tags]
        return [words.texts, *tags, words.sentence_ends, words.document_ends]

    def describe_split(self, split: str) -> Seen:
        """Describes the sentences of a split, with the number of entities of each type, or of words of each tag."""
        words, tags = self._get_tagged(split)
        ends = words.sentence_ends.tolist()
        texts = [" ".join(words.texts[begin:end]) for begin, end in itertools.pairwise([0, *ends])]
        counts = dict(zip(self.head.labels, np.bincount(tags, minlength=len(self.head.labels)).tolist(), strict=True))
        if self._by_entity:
            counts = {tag[2:]: count for tag, count in counts.items() if tag.startswith("B-")}
        answers = [each.tobytes() for each in np.split(tags, ends[:-1])]
        lengths = Lengths("sentences", "length", self._length, self._items[split].measure_whole, cuts=False)
        return Seen((texts,), answers, (lengths,), counts)

    def score(self, split: str, outputs: Ragged) -> Figures:
        """Scores entities, right if their words and type are, as the official conlleval does; and words."""
        words, tags = self._get_tagged(split)
        predicted = outputs.values.argmax(1)
        accuracy = {"accuracy": float(np.mean(predicted == tags))}
        if not self._by_entity:
            return accuracy
        tallies = self._count_entities(words, tags, predicted).sum(0)
        types = zip(self._types, tallies.T.tolist(), strict=True)
        by_type = {f"f1_{name}": _compute_f1(*each)["f1"] for name, each in types if any(each)}
        return {**_compute_f1(*tallies.sum(1).tolist()), **accuracy, **by_type}

    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Bootstraps whole sentences: tags within a sentence are correlated."""
        words, tags = self._get_tagged(split)
        predicted = outputs.values.argmax(1)
        starts = np.concatenate([[0], words.sentence_ends[:-1]])
        right = np.add.reduceat(predicted == tags, starts, dtype=np.int64)
        sizes = np.diff(words.sentence_ends, prepend=0)
        tallies = self._count_entities(words, tags, predicted) if self._by_entity else None

        def figures(chosen: Array) -> Figures:
            found = {"accuracy": float(right[chosen].sum() / sizes[chosen].sum())}
            if tallies is None:
                return found
            hit, true, said = tallies[chosen].sum((0, 2)).tolist()
            return {**_compute_f1(hit, true, said), "f1": 2 * hit / max(true + said, 1), **found}

        names = self.head.labels if tallies is None else self._types
        counts = tally(tags, predicted, len(names)) if tallies is None else Tally(*tallies.sum(0))
        return Certainty(len(starts), bootstrap_spreads(len(starts), figures), describe_classes(names, counts))

    @property
    def _written(self) -> list[str]:
        """The tags as predictions have them, where blanks part columns."""
        return [BLANKS.sub("_", label) for label in self.head.labels]

    @property
    def _types(self) -> list[str]:
        """The types of entities."""
        return sorted({label[2:] for label in self.head.labels if label != OUTSIDE})

    def _count_entities(self, words: Words, tags: Array, predicted: Array) -> Array:
        """Counts entities (sentences, 3, types): found, right and predicted ones of each type."""
        from seqeval.metrics.sequence_labeling import get_entities  # which machines for measurements lack

        numbers, names = {name: number for number, name in enumerate(self._types)}, np.array(self.head.labels)
        found = np.zeros((len(words.sentence_ends), 3, len(numbers)), np.int64)
        of_sentences = (np.split(names[each], words.sentence_ends[:-1]) for each in (tags, predicted))
        for sentence, each in enumerate(zip(*of_sentences, strict=True)):
            true, said = (set(get_entities(own.tolist())) for own in each)
            for row, entities in enumerate((true & said, true, said)):
                for name, _, _ in entities:
                    found[sentence, row, numbers[name]] += 1
        return found

    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes a word a line with its true tag, if known, and the predicted one, as conlleval reads them."""
        words = self._items[split].words
        columns = [[BLANKS.sub("_", word) for word in words.texts]]
        for tags in (words.tags, outputs.values.argmax(1)):
            if tags is not None:
                columns.append(np.array(self._written)[tags].tolist())
        lines = [" ".join(row) + "\n" for row in zip(*columns, strict=True)]
        for end in words.sentence_ends.tolist():
            lines[end - 1] += "\n"
        with replacing(name_predictions_file(folder, split, ".txt")) as file:
            file.write("".join(lines).encode(errors="replace"))

    def read_compared(self, split: str, folder: Path) -> Compared:
        """Reads the written tags of a split."""
        text = name_predictions_file(folder, split, ".txt").read_text("utf-8")
        rows = [line.split(" ") for line in text.split("\n") if line]
        numbers = {name: number for number, name in enumerate(self._written)}
        right, said = (np.array([numbers[row[column]] for row in rows], np.int64) for column in (1, 2))
        return Compared(right, said, self.head.labels)

    def describe_use(self, outputs: Ragged) -> dict[str, Any]:  # noqa: ARG002
        return {"length": self._length, "fields": [self._field], "document_context": self._context}


def _compute_f1(right: int, true: int, said: int) -> Figures:
    """Computes F1, precision and recall; 0 where undefined."""
    precision, recall = right / max(said, 1), right / max(true, 1)
    return {"f1": 2 * precision * recall / ((precision + recall) or 1), "precision": precision, "recall": recall}


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Converts the tags of a sentence to IOB2: B- on the first word of every entity, and on no other."""
    plain = list(map(_convert_to_iob, tags))
    return list(map(_open_entity, [OUTSIDE, *plain], plain))


@cache
def _convert_to_iob(tag: str) -> str:
    return tag if tag == OUTSIDE else IOB[tag[0]] + tag[1:]


@cache
def _open_entity(before: str, tag: str) -> str:
    """Converts a tag to IOB2, given the one before it."""
    return "B" + tag[1:] if tag[0] == "I" and tag[1:] != before[1:] else tag


def _convert_to_iob2(sentences: Sequence[Sentence], notes: list[str]) -> list[Sentence]:
    """Converts the tags of sentences to IOB2; notes other schemes and faults."""
    kept, opened, in_vain = [], [], 0
    for sentence in sentences:
        old = sentence.tags or []
        for word, tag in enumerate(old):
            if tag != OUTSIDE and not MARKED.fullmatch(tag):
                raise UserError(f"{sentence.name_place(word)}: tag {tag!r}; there should be O, or B- or I- with a type")
        new = to_iob2(old)
        for word, (tag, converted, before) in enumerate(zip(old, new, [OUTSIDE, *new], strict=False)):
            if tag[0] == "I" and converted[0] == "B":
                opened.append(sentence.name_place(word))
            in_vain += tag[0] == "B" and before[1:] != tag[1:]
        kept.append(replace(sentence, tags=new) if old else sentence)
    if opened and not in_vain:
        notes.append(f"{sentences[0].place} IOB1, read as IOB2")
    elif opened:
        said = f"{len(opened):,} entities open with I- in a file of IOB2, this the first; read as B-"
        notes.append(f"{opened[0]}: {said}")
    return kept


def _list_labels(sentences: Sequence[Sentence], by_entity: bool) -> tuple[str, ...]:
    """Lists the tags; both of each type of entity, as IOB1 has hardly any B-."""
    found = {tag for sentence in sentences for tag in sentence.tags or ()}
    if not by_entity:
        return tuple(sorted(found))
    types = sorted({tag[2:] for tag in found if tag != OUTSIDE})
    return (OUTSIDE, *(f"{mark}-{name}" for name in types for mark in "BI"))


def _join_words(sentences: Sequence[Sentence], labels: Sequence[str]) -> Words:
    """Joins the words of a split; UserError for a tag that is not among the labels."""
    numbers = {label: number for number, label in enumerate(labels)}
    texts: list[str] = []
    tags: list[int] = []
    sentence_ends, document_ends = [], []
    for sentence in sentences:
        if sentence.parts_documents:
            document_ends.append(len(texts))
            continue
        try:
            tags += [numbers[tag] for tag in sentence.tags or ()]
        except KeyError as error:
            at = sentence.name_place((sentence.tags or []).index(error.args[0]))
            fault = f"{at}: tag {error} is not in the training split, so it cannot be learnt"
            raise UserError(fault) from None
        texts += sentence.words
        sentence_ends.append(len(texts))
    ends = np.unique([end for end in [*document_ends, len(texts)] if end])
    return Words(texts, np.array(sentence_ends), ends, np.array(tags) if len(tags) == len(texts) else None)
