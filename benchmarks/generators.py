"""The algorithm of Google's original data generator for BERT, a peer of preparation.py, written from its description.

It has a tokenizer in plain Python, and writes examples of padded ids. Records are pickled, which takes less time than
TensorFlow's TFRecord files.
"""

from __future__ import annotations

import pickle
import unicodedata
from collections.abc import Callable, Iterator, Sequence
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


class Pair(NamedTuple):
    """Two segments; `random_next` if the second is from another document."""

    first: Pieces
    second: Pieces
    random_next: bool


class Masked(NamedTuple):
    """An example with masks, their positions, and the original pieces."""

    pieces: Pieces
    positions: list[int]
    labels: Pieces


def generate_examples(job: ExamplesJob, out: Path) -> int:
    """Runs the original generator's algorithm; returns the number of examples."""
    ids = {piece: number for number, piece in enumerate(job.vocabulary.read_text().split("\n")[:-1])}
    rng, words = Random(job.seed), list(ids)

    def split_sentence(sentence: str) -> Pieces:
        return [piece for word in split_words(sentence) for piece in split_pieces(word, ids)]

    documents = _read(job.text, split_sentence)
    rng.shuffle(documents)
    numbers = [*range(len(documents))] * job.duplicates  # pairs are drawn anew for each duplicate
    pairs = (pair for number in numbers for pair in _pairs(documents, number, job.length - 3, rng))
    examples = [_example(pair, job.predictions, words, rng) for pair in pairs]
    rng.shuffle(examples)
    with out.open("wb") as file:
        for masked, segments, random_next in examples:
            pickle.dump(_features(masked, segments, random_next, ids, job), file)
    return len(examples)


def _read(text: Path, cut: Callable[[str], Pieces]) -> list[Document]:
    """Reads all documents of a file, in pieces, without empty ones."""
    documents: list[Document] = [[]]
    with text.open(encoding="utf-8") as file:
        for line in file:
            if not (sentence := line.strip()):
                documents.append([])
            elif pieces := cut(sentence):
                documents[-1].append(pieces)
    return [document for document in documents if document]


# The tokenizer.


def split_words(text: str) -> list[str]:
    """Splits a text into words and punctuation marks, in lower case and without accents."""
    spaced = "".join(f" {character} " if _is_chinese(ord(character)) else character for character in _clean(text))
    words: list[str] = []
    for word in spaced.split():
        plain = unicodedata.normalize("NFD", word.lower())
        words += _split("".join(each for each in plain if unicodedata.category(each) != "Mn"))
    return " ".join(words).split()


def _clean(text: str) -> str:
    """Replaces white space by spaces, and removes control characters."""
    kept = []
    for character in text:
        if character in " \t\n\r" or unicodedata.category(character) == "Zs":
            kept.append(" ")
        elif ord(character) not in (0, 0xFFFD) and unicodedata.category(character) not in ("Cc", "Cf"):
            kept.append(character)
    return "".join(kept)


def _is_chinese(code: int) -> bool:
    return (
        0x4E00 <= code <= 0x9FFF
        or 0x3400 <= code <= 0x4DBF
        or 0x20000 <= code <= 0x2A6DF
        or 0x2A700 <= code <= 0x2B73F
        or 0x2B740 <= code <= 0x2B81F
        or 0x2B820 <= code <= 0x2CEAF
        or 0xF900 <= code <= 0xFAFF
        or 0x2F800 <= code <= 0x2FA1F
    )


def _is_punctuation(character: str) -> bool:
    code = ord(character)
    in_ascii = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return in_ascii or unicodedata.category(character).startswith("P")


def _split(word: str) -> list[str]:
    """Splits a word at punctuation marks, each of which becomes a word."""
    parts: list[list[str]] = []
    begins = True
    for character in word:
        is_mark = _is_punctuation(character)
        if is_mark or begins:
            parts.append([])
        parts[-1].append(character)
        begins = is_mark
    return ["".join(part) for part in parts]


def split_pieces(word: str, vocabulary: dict[str, int]) -> Pieces:
    """Splits a word into the longest pieces from its start; [UNK] if it has none."""
    characters = list(word)
    if len(characters) > LONGEST_WORD:
        return ["[UNK]"]
    pieces, start = [], 0
    while start < len(characters):
        end = len(characters)
        while start < end:
            piece = "".join(characters[start:end])
            if start:
                piece = f"##{piece}"
            if piece in vocabulary:
                break
            end -= 1
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


# Pairs and masks.


def _pairs(documents: list[Document], number: int, room: int, rng: Random) -> Iterator[Pair]:
    """Yields pairs of segments of a document; half of the second ones come from another document."""
    document, at = documents[number], 0
    target = rng.randint(2, room) if rng.random() < SHORT else room
    chunk: list[Pieces] = []
    size = 0
    while at < len(document):
        chunk.append(document[at])
        size += len(document[at])
        if at == len(document) - 1 or size >= target:
            end = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            first = [piece for sentence in chunk[:end] for piece in sentence]
            random_next = len(chunk) == 1 or rng.random() < 0.5
            if random_next:
                second = _elsewhere(documents, number, target - len(first), rng)
                at -= len(chunk) - end  # unused sentences begin the next pair
            else:
                second = [piece for sentence in chunk[end:] for piece in sentence]
            _truncate(first, second, room, rng)
            if first and second:
                yield Pair(first, second, random_next)
            chunk, size = [], 0
        at += 1


def _elsewhere(documents: list[Document], own: int, target: int, rng: Random) -> Pieces:
    """Returns at least `target` pieces of another document, from a random sentence on."""
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != own:
            break
    pieces: Pieces = []
    for sentence in documents[other][rng.randint(0, len(documents[other]) - 1) :]:
        pieces.extend(sentence)
        if len(pieces) >= target:
            break
    return pieces


def _truncate(first: Pieces, second: Pieces, room: int, rng: Random) -> None:
    """Removes pieces from the longer segment, at a random end, until both fit."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


def _mask(pieces: Sequence[str], predictions: int, words: list[str], rng: Random) -> Masked:
    """Masks pieces: of ten, eight become [MASK], one a random piece, one stays."""
    candidates = [number for number, piece in enumerate(pieces) if piece not in ("[CLS]", "[SEP]")]
    rng.shuffle(candidates)
    chosen = sorted(candidates[: min(predictions, max(1, round(len(pieces) * MASKED)))])
    changed = list(pieces)
    for number in chosen:
        if rng.random() < 0.8:
            changed[number] = "[MASK]"
        elif rng.random() < 0.5:
            changed[number] = words[rng.randint(0, len(words) - 1)]
    return Masked(changed, chosen, [pieces[number] for number in chosen])


def _example(pair: Pair, predictions: int, words: list[str], rng: Random) -> tuple[Masked, list[int], bool]:
    pieces, segments = ["[CLS]"], [0]
    for number, segment in enumerate((pair.first, pair.second)):
        for piece in segment:
            pieces.append(piece)
            segments.append(number)
        pieces.append("[SEP]")
        segments.append(number)
    return _mask(pieces, predictions, words, rng), segments, pair.random_next


def _features(
    masked: Masked, segments: list[int], random_next: bool, ids: dict[str, int], job: ExamplesJob
) -> dict[str, list[Any]]:
    """Converts an example to padded ids."""
    size, guessed = len(masked.pieces), len(masked.positions)
    rest, unused = [0] * (job.length - size), [0] * (job.predictions - guessed)
    return {
        "input_ids": [ids[piece] for piece in masked.pieces] + rest,
        "input_mask": [1] * size + rest,
        "segment_ids": segments + rest,
        "masked_lm_positions": masked.positions + unused,
        "masked_lm_ids": [ids[piece] for piece in masked.labels] + unused,
        "masked_lm_weights": [1.0] * guessed + [0.0] * len(unused),
        "next_sentence_labels": [int(random_next)],
    }
