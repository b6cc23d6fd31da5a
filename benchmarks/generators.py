"""The algorithm of Google's original data generator for BERT, a peer of preparation.py, written from its description.

Its tokenizer is Google's in plain Python, which transformers has. Examples are padded ids; records are pickled, which
takes less time than TensorFlow's TFRecord files.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

Pieces = list[str]
Document = list[Pieces]
LONGEST_WORD = 200  # characters; a longer word is unknown
SHORT, MASKED = 0.1, 0.15  # shares of shortened examples, and of masked pieces


class ExamplesJob(NamedTuple):
    """The input and the settings of the generator."""

    text: Path
    """The format of the original: a sentence a line, an empty line after each document."""
    vocabulary: Path
    length: int = 128
    duplicates: int = 1
    seed: int = 12345

    @property
    def predictions(self) -> int:
        """The largest number of masked pieces of an example, 20 of 128."""
        return self.length * 5 // 32


class GeneratedExample(NamedTuple):
    """Two segments with masks; the original pieces at the masked positions; whether the second segment is random."""

    pieces: Pieces
    segments: list[int]
    positions: list[int]
    labels: Pieces
    random_next: bool


class OriginalGenerator:
    """The original generator for a job; `generate` may be called again, and makes the same examples."""

    def __init__(self, job: ExamplesJob) -> None:
        googles: Any = import_module("transformers.models.bert.tokenization_bert_legacy")
        self._job, self._rng = job, Random()
        self._ids = {piece: number for number, piece in enumerate(job.vocabulary.read_text().split("\n")[:-1])}
        self._words = list(self._ids)
        self._split_words = googles.BasicTokenizer().tokenize
        self._split_pieces = googles.WordpieceTokenizer(self._ids, "[UNK]", LONGEST_WORD).tokenize
        self._documents: list[Document] = []

    def generate(self, out: Path) -> int:
        """Makes all examples of the text; returns their number."""
        self._rng.seed(self._job.seed)
        self._documents = self._read_documents()
        self._rng.shuffle(self._documents)
        numbers = [*range(len(self._documents))] * self._job.duplicates  # pairs are drawn anew for each duplicate
        examples = [self._mask(*pair) for number in numbers for pair in self._make_pairs(number)]
        self._rng.shuffle(examples)
        with out.open("wb") as file:
            for example in examples:
                pickle.dump(self._make_features(example), file)
        return len(examples)

    def split_sentence(self, sentence: str) -> Pieces:
        """Cuts a sentence into pieces."""
        return [piece for word in self._split_words(sentence) for piece in self._split_pieces(word)]

    def _read_documents(self) -> list[Document]:
        """Reads all documents in pieces, without empty ones."""
        documents: list[Document] = [[]]
        with self._job.text.open(encoding="utf-8") as file:
            for line in file:
                if not (sentence := line.strip()):
                    documents.append([])
                elif pieces := self.split_sentence(sentence):
                    documents[-1].append(pieces)
        return [document for document in documents if document]

    def _make_pairs(self, number: int) -> Iterator[tuple[Pieces, Pieces, bool]]:
        """Yields pairs of segments of a document; half of the second ones come from another document."""
        document, rng, room = self._documents[number], self._rng, self._job.length - 3
        target = rng.randint(2, room) if rng.random() < SHORT else room
        chunk: list[Pieces] = []
        at = size = 0
        while at < len(document):
            chunk.append(document[at])
            size += len(document[at])
            if at == len(document) - 1 or size >= target:
                end = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
                first = [piece for sentence in chunk[:end] for piece in sentence]
                random_next = len(chunk) == 1 or rng.random() < 0.5
                if random_next:
                    second = self._draw_elsewhere(number, target - len(first))
                    at -= len(chunk) - end  # unused sentences begin the next pair
                else:
                    second = [piece for sentence in chunk[end:] for piece in sentence]
                self._truncate(first, second)
                if first and second:
                    yield first, second, random_next
                chunk, size = [], 0
            at += 1

    def _draw_elsewhere(self, own: int, target: int) -> Pieces:
        """Returns at least `target` pieces of another document, from a random sentence on."""
        for _ in range(10):
            other = self._rng.randint(0, len(self._documents) - 1)
            if other != own:
                break
        pieces: Pieces = []
        document = self._documents[other]
        for sentence in document[self._rng.randint(0, len(document) - 1) :]:
            pieces.extend(sentence)
            if len(pieces) >= target:
                break
        return pieces

    def _truncate(self, first: Pieces, second: Pieces) -> None:
        """Removes pieces from the longer segment, at a random end, until both fit."""
        while len(first) + len(second) > self._job.length - 3:
            longer = first if len(first) > len(second) else second
            longer.pop(0 if self._rng.random() < 0.5 else -1)

    def _mask(self, first: Pieces, second: Pieces, random_next: bool) -> GeneratedExample:
        """Masks pieces of a pair: of ten, eight become [MASK], one a random piece, one stays."""
        rng, pieces = self._rng, ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
        candidates = [number for number, piece in enumerate(pieces) if piece not in ("[CLS]", "[SEP]")]
        rng.shuffle(candidates)
        chosen = sorted(candidates[: min(self._job.predictions, max(1, round(len(pieces) * MASKED)))])
        labels = [pieces[number] for number in chosen]
        for number in chosen:
            if rng.random() < 0.8:
                pieces[number] = "[MASK]"
            elif rng.random() < 0.5:
                pieces[number] = self._words[rng.randint(0, len(self._words) - 1)]
        segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        return GeneratedExample(pieces, segments, chosen, labels, random_next)

    def _make_features(self, example: GeneratedExample) -> dict[str, list[Any]]:
        """Converts an example to padded ids."""
        guessed, rest = len(example.positions), [0] * (self._job.length - len(example.pieces))
        unused = [0] * (self._job.predictions - guessed)
        return {
            "input_ids": [self._ids[piece] for piece in example.pieces] + rest,
            "input_mask": [1] * len(example.pieces) + rest,
            "segment_ids": example.segments + rest,
            "masked_lm_positions": example.positions + unused,
            "masked_lm_ids": [self._ids[piece] for piece in example.labels] + unused,
            "masked_lm_weights": [1.0] * guessed + [0.0] * len(unused),
            "next_sentence_labels": [int(example.random_next)],
        }
