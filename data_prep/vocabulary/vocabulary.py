"""The WordPiece vocabulary: training it from counts of words, loading, checking, writing and extending it.

It is written in a form for transformers too, so that a model is used with the pieces that it was trained on. Words of
the text are added to the vocabulary of a model that exists, so that they are no longer cut into many pieces: the
new pieces come behind the old ones, whose ids stay. They are whole words: those that occur most often times the pieces
that each would save. What the text becomes by that is counted with the longer vocabulary itself, since a new piece also
takes part in longer words.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, replacing
from data_prep.vocabulary.splitting import WordSplitter

VOCABULARY, TOKENIZER, TOKENIZER_CONFIG = "vocab.txt", "tokenizer.json", "tokenizer_config.json"
PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
STOPS, CLOSINGS = ".!?…。！？।؟۔", ")]’”»」』）】"  # marks that end a sentence, and marks that may follow them
CONTINUES, STOP, CLOSING = 1, 2, 3  # kinds of pieces
LONGEST_WORD = 100  # characters; WordPiece calls anything longer unknown
ALPHABET = 1000  # characters that get a piece of their own
TOGETHER = 1000  # repetitions of a word handed to the trainer as one text


class Special(NamedTuple):
    """The ids of the pieces that stand for no text: padding, unknown words, the marks of an example and its masks."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Vocabulary:
    """The pieces in the order of their ids, and whether they keep case and accents."""

    pieces: tuple[str, ...]
    cased: bool

    def __len__(self) -> int:
        return len(self.pieces)

    @cached_property
    def sha256(self) -> str:
        """Identifies the vocabulary in a manifest or a task: the checksum of its pieces and its case."""
        return hashlib.sha256(self._text() + bytes([self.cased])).hexdigest()

    @property
    def special(self) -> Special:
        """Looks up the ids of the pieces that stand for no text."""
        return Special(*(self.pieces.index(piece) for piece in SPECIAL))

    @cached_property
    def continues(self) -> Array:
        """Tells for every piece whether it continues a word, which masking of whole words needs."""
        return np.array([piece.startswith("##") for piece in self.pieces])

    @cached_property
    def marks(self) -> Array:
        """Tells for every piece whether it continues a word, ends a sentence or closes what has ended: 0 for none."""
        kinds = {**dict.fromkeys(STOPS, STOP), **dict.fromkeys(CLOSINGS, CLOSING)}
        return np.array([kinds.get(piece, CONTINUES * piece.startswith("##")) for piece in self.pieces], np.int8)

    def pipeline(self) -> Tokenizer:
        """Builds the tokenizer. It takes `[MASK]` and the like in a text for text, as the original does."""
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        pipeline = Tokenizer(models.WordPiece(ids, unk_token=UNK))
        pipeline.normalizer, pipeline.pre_tokenizer = build_text_rules(self.cased)
        return pipeline

    def write(self, folder: Path) -> list[FileRecord]:
        """Writes vocab.txt, and the files by which transformers loads a tokenizer with the same ids."""
        full, special = self.pipeline(), self.special
        full.add_special_tokens(list(SPECIAL))
        full.post_processor = processors.TemplateProcessing(
            single=f"{CLS}:0 $A:0 {SEP}:0",
            pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
            special_tokens=[(CLS, special.cls), (SEP, special.sep)],
        )
        full.decoder = decoders.WordPiece()
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": not self.cased,
            "model_max_length": 512,
            **{f"{name}_token": piece for name, piece in zip(Special._fields, SPECIAL, strict=True)},
        }
        contents = {
            VOCABULARY: self._text(),
            TOKENIZER: full.to_str(pretty=False).encode(),
            TOKENIZER_CONFIG: (json.dumps(config, indent=1) + "\n").encode(),
        }
        records = []
        for name, content in contents.items():
            with replacing(folder / name) as file:
                file.write(content)
            records.append(FileRecord.from_file(folder, name, len(self)))
        return records

    def _text(self) -> bytes:
        return "".join(f"{piece}\n" for piece in self.pieces).encode()


def build_text_rules(cased: bool) -> tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]:
    """Builds the normaliser of BERT and its splitter into words."""
    return normalizers.BertNormalizer(lowercase=not cased), pre_tokenizers.BertPreTokenizer()


def load_vocabulary(path: Path, cased: bool) -> Vocabulary:
    """Reads a vocab.txt, which has one piece a line; raises UserError where that is not a vocabulary for BERT."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (shard.py trains a vocabulary from the text without --vocab)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    pieces = text.removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n").split("\n")
    return Vocabulary(check_pieces(tuple(pieces), path), cased)


def check_pieces(pieces: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Returns the pieces of a file; raises UserError where they are not a vocabulary for BERT."""
    missing = [piece for piece in SPECIAL if piece not in pieces]
    if missing:
        raise UserError(f"{path}: lacks the special pieces {', '.join(missing)}: not a BERT vocabulary?")
    first: dict[str, int] = {}
    for line, piece in enumerate(pieces, 1):
        if piece in first:
            raise UserError(f"{path}: line {line} repeats {piece!r} of line {first[piece]}; each piece needs one id")
        first[piece] = line
    return pieces


def count_words(numbers: Array, words: Sequence[str], cased: bool) -> Counter[str]:
    """Counts how often every word occurs once it is normalised; `numbers` has the word of every occurrence.

    Words that are too long to be anything but unknown teach nothing, and would take the trainer for ever.
    """
    splitter = WordSplitter(*build_text_rules(cased))
    parts = iter(splitter.split([word for word in words if not word.isascii()]))
    counts: Counter[str] = Counter()
    for word, count in zip(words, np.bincount(numbers).tolist(), strict=True):
        for part in (word,) if word.isascii() else next(parts):
            counts[part] += count
    return Counter({word: count for word, count in counts.items() if len(word) <= LONGEST_WORD})


def train_vocabulary(counts: Mapping[str, int], size: int, cased: bool) -> Vocabulary:
    """Learns a vocabulary of at most `size` pieces from the counts of words.

    The same counts give the same pieces, for which the trainer needs help: it numbers characters in the order of a
    hash table and breaks ties by those numbers. Characters handed to it as special pieces have their numbers from us.
    """
    alphabet = _choose_alphabet(counts)
    inner = {f"##{character}" for word in counts for character in word[1:]}
    given = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet if f"##{character}" in inner)]
    if size < len(given):
        raise UserError(f"--vocab-size {size}: the characters of the text alone need {len(given)} pieces; take more")
    learner = Tokenizer(models.WordPiece(unk_token=UNK))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=given,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(_repeat_words(counts), trainer)
    ids = learner.get_vocab()
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__)), cased)


def _choose_alphabet(counts: Mapping[str, int]) -> list[str]:
    """Chooses the most frequent characters, the first of Unicode where some are equally frequent, in that order."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    return sorted(sorted(characters, key=lambda character: (-characters[character], character))[:ALPHABET])


def _repeat_words(counts: Mapping[str, int]) -> Iterator[str]:
    """Repeats every word as often as it occurs, since the trainer takes texts, not counts."""
    for word in sorted(counts):
        for done in range(0, counts[word], TOGETHER):
            yield " ".join([word] * min(TOGETHER, counts[word] - done))


LEAST = 5
"""Times that a word must occur: what is rarer teaches the model too little of its new piece."""
UNKNOWN = 0
WORDS_TOGETHER = 10_000
"""Words that are cut at a time, which bounds memory."""


@dataclass(frozen=True)
class Extension:
    """A vocabulary with new words, and what it does to the words that were counted."""

    vocabulary: Vocabulary
    added: tuple[str, ...]
    """The new words in the order of their ids: those that save most come first."""
    before: int
    """Pieces of the text whose words were counted, by the vocabulary as it was."""
    after: int
    """Pieces of the same text by the longer one."""
    asked: int
    """The largest number of words to add."""

    def __str__(self) -> str:
        first, more = ", ".join(self.added[:10]), ", …" if len(self.added) > 10 else ""
        number, fewer = len(self.added), len(self.added) < self.asked
        return (
            f"{number:,} words{f' of {self.asked:,} asked for' if fewer else ''} added to "
            f"{len(self.vocabulary) - number:,} pieces: {first}{more}; "
            f"they make {self.before:,} pieces of text {self.after:,} ({self.after / self.before - 1:+.1%})"
            + (f"; a word must occur {LEAST} times to be added" if fewer else "")
        )


def extend_vocabulary(base: Vocabulary, counts: Mapping[str, int], number: int) -> Extension:
    """Adds the words that are cut most, as many as there are up to `number`, each as a piece of its own.

    A word that the vocabulary knows nothing of saves as many pieces as if it had been cut into its characters. A new
    piece may not make another word of the text unknown, whose rest no piece continues: it is left out then.
    """
    sizes = _count_pieces(base, counts)
    saved = {word: count * _count_saved_pieces(word, sizes[word]) for word, count in counts.items() if count >= LEAST}
    ranked = sorted((word for word in saved if saved[word]), key=lambda word: (-saved[word], word))
    refused: set[str] = set()
    while True:
        added = tuple(islice((word for word in ranked if word not in refused), number))
        if not added:
            raise UserError("--extend: no word of the text is worth a piece of its own; leave it out")
        longer = Vocabulary((*base.pieces, *added), base.cased)
        now, new = _count_pieces(longer, counts), set(added)
        lost = {_find_longest_start(word, new) for word, size in now.items() if size == UNKNOWN != sizes[word]}
        lost |= {word for word in added if now[word] != 1}  # the tokenizer normalises it into something else
        if not lost:
            break
        refused |= lost
    before, after = (sum(counts[word] * max(size, 1) for word, size in each.items()) for each in (sizes, now))
    return Extension(longer, added, before, after, number)


def _count_pieces(vocabulary: Vocabulary, words: Iterable[str]) -> dict[str, int]:
    """Counts the pieces of every word; `UNKNOWN` for a word that becomes [UNK]."""
    pipeline, given, sizes = vocabulary.pipeline(), sorted(words), {}
    for first in range(0, len(given), WORDS_TOGETHER):
        some = given[first : first + WORDS_TOGETHER]
        for word, encoding in zip(some, pipeline.encode_batch(some, add_special_tokens=False), strict=True):
            pieces = encoding.tokens
            sizes[word] = UNKNOWN if UNK in pieces else len(pieces)
    return sizes


def _count_saved_pieces(word: str, size: int) -> int:
    """Counts the pieces that an occurrence of a word saves once it is a piece itself."""
    return max(len(word) - 1, 1) if size == UNKNOWN else size - 1


def _find_longest_start(word: str, added: Collection[str]) -> str:
    """Finds the longest new piece that a word begins with, the one by which it is cut now."""
    return next(word[:size] for size in range(len(word), 0, -1) if word[:size] in added)


def find_replaced_pieces(base: Vocabulary, pieces: Sequence[str]) -> list[list[int]]:
    """Finds the ids of the old pieces that each new one replaces: those that it was cut into before.

    A piece that was unknown has the ids of its characters, as far as these have pieces; none where no character has.
    """
    ids = {piece: number for number, piece in enumerate(base.pieces)}
    pipeline, unknown, found = base.pipeline(), base.special.unk, []
    for piece in pieces:
        text = piece.removeprefix("##")
        cut = pipeline.encode(text, add_special_tokens=False).ids
        if unknown in cut:
            names = (name for character in text for name in (f"##{character}", character) if name in ids)
            cut = [ids[name] for name in names]
        found.append(cut)
    return found
