"""WordPiece, BERT's tokenizer kind: training from counts of words, reading, checking and writing.

A piece that continues a word begins with `##`. A vocabulary is a vocab.txt, which has one piece a line; it is written
in a form for transformers too, so that a model is used with the pieces that it was trained on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_table
from data_prep.vocabulary.encoders.encoder import TextEncoder
from data_prep.vocabulary.encoders.splitting import LONGEST_WORD, WordSplitter, cut_long_parts
from data_prep.vocabulary.kinds.declaration import TokenizerKind, check_steps, read_part, read_vocab, repeat_words
from data_prep.vocabulary.vocabulary import TOKENIZER, TOKENIZER_CONFIG, SpecialPieces, Vocabulary, has_capitals

VOCABULARY = "vocab.txt"
PAD, UNK, CLS, SEP, MASK = SPECIAL = SpecialPieces("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_LOST = 0.001
"""Marks per letter of a text that lower case may strip without a warning: й is 1.2% of Russian letters. Marks in
Latin words count a tenth, since uncased BERT reads é as e on purpose: English Wikipedia has 0.14% of them."""
MARK = "##"  # before a piece that continues a word
LONG_WORD = rf"(?:^(?=.*[^\x00-\x7F])|\G(?!^))(?:.{{1,{LONGEST_WORD}}}(?!\p{{M}})|.{{{LONGEST_WORD}}})"
"""A part of a word that is not ASCII, from its start or the end of the part before on."""
ALPHABET = 1000  # characters that get a piece of their own
CLASSES = ("BertTokenizer", "BertTokenizerFast")
"""Classes of transformers that cut text as it is cut here."""
GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that cut text as tokenizer.json says."""
STEPS = {
    ("normalizer", "type"): ("BertNormalizer",),
    ("normalizer", "clean_text"): (None, True),
    ("pre_tokenizer", "type"): ("BertPreTokenizer",),
    ("model", "type"): (None, "WordPiece"),
    ("model", "continuing_subword_prefix"): (None, "##"),
    ("model", "max_input_chars_per_word"): (None, LONGEST_WORD),
    ("model", "unk_token"): (None, UNK),
}
"""Values of tokenizer.json with which text is cut as it is here; None for a key that is not there."""
NORMALIZER = {
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
"""Keys of the normaliser in tokenizer.json, and the same keys in tokenizer_config.json."""


@dataclass(frozen=True)
class WordPiece(Vocabulary):
    """Pieces of words, of which those that continue a word begin with `##`."""

    kind, file, special_pieces = "wordpiece", VOCABULARY, SPECIAL

    def list_rules(self) -> bytes:
        """Lists the pieces and the case."""
        return self._text() + bytes([self.cased])

    @cached_property
    def continues(self) -> Array:
        """Tells for every piece whether it continues a word, which masking of whole words needs."""
        return np.array([piece.startswith(MARK) for piece in self.pieces])

    def spell(self, ids: Sequence[int]) -> str:
        """Spells the words of some pieces, with a blank between two of them."""
        return " ".join(self.pieces[id] for id in ids).replace(f" {MARK}", "").removeprefix(MARK)

    def pipeline(self) -> Tokenizer:
        """Builds the tokenizer. It takes `[MASK]` and the like in a text for text, as the original does."""
        pipeline = Tokenizer(models.WordPiece(self._ids, unk_token=UNK))
        pipeline.normalizer, pipeline.pre_tokenizer = build_text_rules(self.cased)
        return pipeline

    def text_pipeline(self) -> Tokenizer:
        """Builds the tokenizer that also cuts long words that are not ASCII, as `cut_long_parts` does."""
        pipeline, cut = self.pipeline(), pre_tokenizers.Split(Regex(LONG_WORD), "isolated")
        pipeline.pre_tokenizer = pre_tokenizers.Sequence([pipeline.pre_tokenizer, cut])
        return pipeline

    def encoder(self) -> TextEncoder:
        """Makes an encoder that cuts every distinct word once."""
        # compiled by numba, which training does without
        from data_prep.vocabulary.encoders.wordpiece import FastWordPiece

        return FastWordPiece(self.pipeline(), self.cased)

    def find_replaced(self, pieces: Sequence[str]) -> list[list[int]]:
        """Finds the ids of the pieces that each new one was cut into before.

        A piece that was unknown has the ids of its characters, as far as these have pieces; none without any.
        """
        pipeline, ids, found = self.pipeline(), self._ids, []
        for piece in pieces:
            text = piece.removeprefix(MARK)
            cut = pipeline.encode(text, add_special_tokens=False).ids
            if ids[UNK] in cut:
                names = (name for character in text for name in (f"{MARK}{character}", character) if name in ids)
                cut = [ids[name] for name in names]
            found.append(cut)
        return found

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    def list_contents(self) -> Mapping[str, bytes]:
        """Lists vocab.txt, and the files by which transformers loads a tokenizer with the same ids."""
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
            **{f"{name}_token": piece for name, piece in SPECIAL._asdict().items()},
        }
        return {
            VOCABULARY: self._text(),
            TOKENIZER: full.to_str(pretty=False).encode(),
            TOKENIZER_CONFIG: (json.dumps(config, indent=1) + "\n").encode(),
        }

    def _text(self) -> bytes:
        return "".join(f"{piece}\n" for piece in self.pieces).encode()


def build_text_rules(cased: bool) -> tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]:
    """Builds the normaliser of BERT and its splitter into words."""
    return normalizers.BertNormalizer(lowercase=not cased), pre_tokenizers.BertPreTokenizer()


def describe_lost_marks(text: str) -> str:
    """Describes how many marks lower case strips from the letters of a text, with an example; empty if they are few."""
    words = Counter("".join(c if category(c)[0] in "LM" and c != "\ufe0f" else " " for c in text.lower()).split())
    whole = {word: normalize("NFD", word) for word in words}
    left = {word: "".join(c for c in whole[word] if category(c) != "Mn") for word in words}
    lost = {word: words[word] * (len(whole[word]) - len(left[word])) for word in words if whole[word] != left[word]}
    weights = {word: count / (10 if whole[word] < "\u0250" else 1) for word, count in lost.items()}
    letters = sum(map(str.isalpha, text))
    if sum(weights.values()) <= max(3, MOST_LOST * letters):
        return ""
    word = max(lost, key=lambda word: (min(0, 16 - len(word)), weights[word]))  # Thai has no blanks between words
    return f"{sum(lost.values()):,} marks from {letters:,} letters, such as {word} → {normalize('NFC', left[word])}"


def read_pieces(path: Path, cased: bool) -> WordPiece:
    """Reads a vocab.txt, which has one piece a line; raises UserError where that is not a vocabulary for BERT."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (shard.py trains a vocabulary from the text without --vocab)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    pieces = text.removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n").split("\n")
    return WordPiece(check_pieces(tuple(pieces), path), cased)


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


def _choose_alphabet(counts: Mapping[str, int]) -> list[str]:
    """Chooses the most frequent characters, the first of Unicode where some are equally frequent, in that order."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    return sorted(sorted(characters, key=lambda character: (-characters[character], character))[:ALPHABET])


def _check_class(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises UserError where a folder's tokenizer is not BERT's, so that its pieces would stand for other text."""
    if (kind := config.get("tokenizer_class")) not in (None, *CLASSES, *GENERAL * ("model" in tokenizer)):
        raise UserError(f"{folder / TOKENIZER_CONFIG}: cuts text by {kind}; only {CLASSES[0]} is known here")
    if (words := config.get("word_tokenizer_type", "basic")) != "basic":
        raise UserError(f"{folder / TOKENIZER_CONFIG}: finds words by {words}; only as {CLASSES[0]} does is known here")
    check_steps(tokenizer, STEPS if "model" in tokenizer else {}, folder / TOKENIZER)
    added = [one["content"] for one in tokenizer.get("added_tokens") or () if not one.get("special")]
    if added:
        raise UserError(f"{folder / TOKENIZER}: keeps {added[0]!r} whole in every text (added_tokens); take another")


def _read_table(tokenizer: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Reads the pieces of a tokenizer.json."""
    return check_pieces(read_vocab(tokenizer, folder / TOKENIZER), folder / TOKENIZER)


class WordPieceKind(TokenizerKind):
    """How WordPiece is read and trained."""

    vocabulary, title, model, plain = WordPiece, "WordPiece", "WordPiece", (VOCABULARY,)

    def load(self, folder: Path, cased: bool) -> Vocabulary:
        """Reads the vocab.txt of a folder of shards, whose manifest says whether it is cased."""
        return read_pieces(folder / VOCABULARY, cased)

    def read(self, folder: Path, tokenizer: dict[str, Any]) -> Vocabulary:
        """Reads the vocabulary of a folder, with its casing."""
        path = folder / TOKENIZER_CONFIG
        config = read_table(path) if path.is_file() else {}
        if (folder / VOCABULARY).is_file():
            pieces = read_pieces(folder / VOCABULARY, cased=False).pieces
        elif tokenizer:
            pieces = _read_table(tokenizer, folder)
        else:
            raise UserError(
                f"{folder}: neither {VOCABULARY} nor {TOKENIZER}: copy them from where the model comes from"
            )
        _check_class(folder, tokenizer, config)
        others = _read_table(tokenizer, folder) if "model" in tokenizer else pieces
        if others != pieces:
            cure = "copy both again from where the model comes from"
            raise UserError(f"{folder}: {VOCABULARY} and {TOKENIZER} have other pieces: {cure}")
        normalizer = read_part(tokenizer, "normalizer", folder / TOKENIZER)
        said = {new: normalizer.get(old) for old, new in NORMALIZER.items()}
        tables = (config, said) if config.get("tokenizer_class") in GENERAL else (said, config)  # the last one wins
        says = {name: value for table in tables for name, value in table.items() if value is not None}
        lower = says.get("do_lower_case", not has_capitals(pieces))
        needed = {"strip_accents": lower, "tokenize_chinese_chars": True}
        for name in (name for name, value in needed.items() if says.get(name, value) != value):
            how = f"{name} = {json.dumps(says[name])}"
            raise UserError(f"{folder}: cuts text with {how}; here accents go with case, and Chinese is cut apart")
        return WordPiece(pieces, cased=not lower)

    def make_up(self, size: int, cased: bool) -> Vocabulary:
        """Makes up a vocabulary of this size, with numbers for words."""
        return WordPiece((*SPECIAL, *map(str, range(size)))[:size], cased)

    def count_words(self, text: Array, ends: Array, cased: bool) -> Mapping[str, int]:
        """Counts how often every word occurs once it is normalised.

        Words in ASCII that are too long to be anything but unknown teach nothing, and would take the trainer for ever.
        """
        from data_prep.vocabulary.encoders.words import WordTable  # compiled by numba

        found = WordTable(cased).count(text, ends)
        splitter = WordSplitter(*build_text_rules(cased))
        parts = iter(cut_long_parts(splitter.split([word for word in found if not word.isascii()])))
        counts = Counter[str]()
        for word, count in found.items():
            for part in (word,) if word.isascii() else next(parts):
                counts[part] += count
        return Counter({word: count for word, count in counts.items() if len(word) <= LONGEST_WORD})

    def train(self, counts: Mapping[str, int], size: int, cased: bool) -> Vocabulary:
        """Learns a vocabulary of at most `size` pieces from the counts of words.

        The same counts give the same pieces, for which the trainer needs help: it numbers characters in the order of a
        hash table and breaks ties by those numbers. Characters handed to it as special pieces have theirs from us.
        """
        alphabet = _choose_alphabet(counts)
        inner = {f"{MARK}{character}" for word in counts for character in word[1:]}
        given = [*SPECIAL, *alphabet, *(piece for piece in map(MARK.__add__, alphabet) if piece in inner)]
        if size < len(given):
            raise UserError(f"--vocab-size {size}: the text's characters alone need {len(given)} pieces; take more")
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
        learner.train_from_iterator(repeat_words(counts), trainer)
        ids = learner.get_vocab()
        return WordPiece(tuple(sorted(ids, key=ids.__getitem__)), cased)


KIND = WordPieceKind()
