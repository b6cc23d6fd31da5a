"""A tag for each word, as in named-entity recognition on CoNLL-2003, scored by entity.

IOB2 (B- opens an entity, I- continues it), IOB1 (I- opens one too, unless it follows another of its type) and marks for
the last and the only word (E- or L-, S- or U-) all become IOB2. Tags without such marks, such as parts of speech, are
scored word by word. Long sentences are divided into items, and neighbouring words fill the sequence.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.common.arrays import Array, ranges
from data_prep.common.errors import UserError, check_all
from data_prep.common.files import replacing
from finetuning.files.splits import find_ner, name_files
from finetuning.files.tag_files import DOCUMENT, HUB_TAGS, Fields, Sentence, hold_out, read_sentences
from finetuning.inputs import Cutter, Encoded, Items, Ragged
from finetuning.results import Figures, name_predictions_file
from finetuning.tasks.scores import Certainty, ClassCounts, bootstrap_spreads, count_answers, describe_classes
from finetuning.tasks.task import Column, Seen, Setup, Task
from pretraining.architectures.weights import TaskHead

OUTSIDE = "O"
BLANKS = re.compile(r"\s+")
MARKED = re.compile(r"[BIELSU]-.+")
IOB = {"B": "B", "I": "I", "E": "I", "L": "I", "S": "B", "U": "B"}
"""Marks of other schemes in IOB."""


@dataclass(frozen=True)
class SplitWords:
    """The words of a split, one after another."""

    texts: list[str]
    sentence_ends: Array
    """The end of each sentence among the words."""
    document_ends: Array
    """The end of each document among the words."""
    tags: Array | None = None
    """The tag of every word, as a number."""


class Windows(NamedTuple):
    """The words that each item tags, and those that it sees."""

    first_tagged: Array
    end_tagged: Array
    first: Array
    end: Array


class TaggedWords(Items):
    """Sentences, or parts of long ones, as items; every word is tagged in exactly one."""

    def __init__(self, words: SplitWords, cutter: Cutter, length: int, document_context: bool) -> None:
        self.words = words
        self._cutter, self._length = cutter, length
        self._context_ends = words.document_ends if document_context else words.sentence_ends

    def __len__(self) -> int:
        return len(self._windows.first)

    def encode(self, numbers: Array) -> Encoded:
        """Lays out windows of words; words around the tagged ones are context."""
        window, before = Windows(*(each[numbers] for each in self._windows)), self._before
        pieces = self._pieces.take(ranges(window.first, window.end - window.first)).values
        ends = np.cumsum(before[window.end] - before[window.first])
        counts = window.end_tagged - window.first_tagged
        tagged = ranges(window.first_tagged, counts)
        places, ends_tagged = 1 + before[tagged] - np.repeat(before[window.first], counts), np.cumsum(counts)
        labels = None if self.words.tags is None else Ragged(self.words.tags[tagged], ends_tagged)
        sequences = self._cutter.lay_out(Ragged(pieces, ends), None, self._length)
        return Encoded(sequences, labels, Ragged(places, ends_tagged))

    @cached_property
    def _pieces(self) -> Ragged:
        """The pieces of every word: at least one, at most a window."""
        cut = self._cutter.cut_words(self.words.texts)
        kept = cut.take_stretches(np.arange(len(cut)), 0, np.minimum(cut.lengths, self._length - 2))
        values = np.insert(kept.values, kept.starts[kept.lengths == 0], self._cutter.special.unk)
        return Ragged(values, np.cumsum(np.maximum(kept.lengths, 1)))

    @cached_property
    def _before(self) -> Array:
        """The number of pieces before every word, and in total."""
        return np.concatenate([[0], self._pieces.ends])

    @cached_property
    def _windows(self) -> Windows:
        """The words that each item tags and sees, with equal context before and after where possible."""
        before, ends, room = self._before, self._context_ends, self._length - 2
        first, end = self._divide(self.words.sentence_ends, room)
        context = np.searchsorted(ends, first, "right")
        pieces_left = before[first] - before[np.concatenate([[0], ends])[context]]
        pieces_right = before[ends[context]] - before[end]
        spare = room - (before[end] - before[first])
        left = np.minimum(pieces_left, np.maximum(spare // 2, spare - pieces_right))
        right = np.minimum(pieces_right, spare - left)
        return Windows(
            first,
            end,
            np.searchsorted(before, before[first] - left, "left"),
            np.searchsorted(before, before[end] + right, "right") - 1,
        )

    def _divide(self, ends: Array, room: int) -> tuple[Array, Array]:
        """Divides sentences longer than a window into parts of half a window, so that each has context."""
        before, starts = self._before, np.concatenate([[0], ends])[:-1]
        cuts = []
        for sentence in np.flatnonzero(before[ends] - before[starts] > room):
            at = starts[sentence]
            while at < ends[sentence]:
                cuts.append(at)
                at = max(at + 1, np.searchsorted(before, before[at] + room // 2, "right") - 1)
        first = np.union1d(starts[starts < ends], np.array(cuts, np.int64))
        return first, np.append(first, ends[-1:])[1:]


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
    reads = (partial(read_sentences, paths, fields, split != "test") for split, paths in files.items())
    splits = dict(zip(files, check_all(*reads), strict=True))
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
            splits = {split: _convert_to_iob2(sentences) for split, sentences in splits.items()}
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

    def _get_tagged(self, split: str) -> tuple[SplitWords, Array]:
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
        return Seen((texts,), answers, counts=counts)

    def answer_by_baseline(self) -> tuple[str, dict[str, Ragged]] | None:
        """Gives every word its most frequent tag in train, of equally frequent ones the more frequent overall, and an
        unknown word the most frequent tag overall."""
        words, tags = self._get_tagged("train")
        total = np.bincount(tags, minlength=len(self.head.labels))
        counts = Counter(zip(words.texts, tags.tolist(), strict=True))
        best = dict(sorted(counts, key=lambda pair: (counts[pair], total[pair[1]], -pair[1])))  # the last one stays
        found, common = {}, int(total.argmax())
        for split in self.dev:
            asked, _ = self._get_tagged(split)
            said = [best.get(word, common) for word in asked.texts]
            found[split] = Ragged(np.eye(len(total), dtype=np.float32)[said], asked.sentence_ends)
        return "most frequent tag of each word", found

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
        counts = count_answers(tags, predicted, len(names)) if tallies is None else ClassCounts(*tallies.sum(0))
        return Certainty(len(starts), bootstrap_spreads(len(starts), figures), describe_classes(names, counts))

    @property
    def _types(self) -> list[str]:
        """The types of entities."""
        return sorted({label[2:] for label in self.head.labels if label != OUTSIDE})

    def _count_entities(self, words: SplitWords, tags: Array, predicted: Array) -> Array:
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
        written, labels = ([BLANKS.sub("_", text) for text in texts] for texts in (words.texts, self.head.labels))
        columns = [written]
        for tags in (words.tags, outputs.values.argmax(1)):
            if tags is not None:
                columns.append(np.array(labels)[tags].tolist())
        lines = [" ".join(row) + "\n" for row in zip(*columns, strict=True)]
        for end in words.sentence_ends.tolist():
            lines[end - 1] += "\n"
        with replacing(name_predictions_file(folder, split, ".txt")) as file:
            file.write("".join(lines).encode(errors="replace"))

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


def _convert_to_iob2(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Converts the tags of sentences to IOB2; UserError for a tag of no entity."""
    for sentence in sentences:
        for word, tag in enumerate(sentence.tags or ()):
            if tag != OUTSIDE and not MARKED.fullmatch(tag):
                raise UserError(f"{sentence.name_place(word)}: tag {tag!r}; there should be O, or B- or I- with a type")
    return [replace(each, tags=to_iob2(each.tags)) if each.tags else each for each in sentences]


def _list_labels(sentences: Sequence[Sentence], by_entity: bool) -> tuple[str, ...]:
    """Lists the tags; both of each type of entity, as IOB1 has hardly any B-."""
    found = {tag for sentence in sentences for tag in sentence.tags or ()}
    if not by_entity:
        return tuple(sorted(found))
    types = sorted({tag[2:] for tag in found if tag != OUTSIDE})
    return (OUTSIDE, *(f"{mark}-{name}" for name in types for mark in "BI"))


def _join_words(sentences: Sequence[Sentence], labels: Sequence[str]) -> SplitWords:
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
    return SplitWords(texts, np.array(sentence_ends), ends, np.array(tags) if len(tags) == len(texts) else None)
