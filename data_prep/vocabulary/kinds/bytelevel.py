"""Byte-level BPE, the tokenizer kind of GPT-2, RoBERTa and ModernBERT: training, reading, checking and writing.

Pieces are of bytes, each spelled as a letter, and a blank before a word belongs to it (`Ġ`): every text has pieces, and
none is unknown. A vocabulary is a tokenizer.json, or vocab.json with merges.txt. It is read by its content: classes of
transformers have changed what they do with such files. The id of a piece says nothing of when it is merged: RoBERTa's
ids are in the order of fairseq's dictionary.

The text of a document is its sentences with a blank between two of them, as a tokenizer sees a running text: a sentence
that follows another begins with a blank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_table
from data_prep.vocabulary.encoders.encoder import TextEncoder
from data_prep.vocabulary.encoders.splitting import LONGEST_WORD
from data_prep.vocabulary.kinds.declaration import TokenizerKind, check_steps, order_pieces, repeat_words
from data_prep.vocabulary.vocabulary import TOKENIZER, TOKENIZER_CONFIG, SpecialPieces, Vocabulary

PIECES, MERGES = "vocab.json", "merges.txt"
SPECIAL = SpecialPieces("<pad>", "<unk>", "<s>", "</s>", "<mask>")
ORDER = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""The special pieces in the order of their ids in a vocabulary that is trained here, which is RoBERTa's order."""
KNOWN = (SPECIAL, SpecialPieces("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
END_OF_TEXT = "<|endoftext|>"
"""GPT-2's only special piece, which parts texts. It stands for all others where there are no others."""
STEPS = {
    ("normalizer", "type"): (None, "NFC"),
    ("pre_tokenizer", "type"): ("ByteLevel",),
    ("pre_tokenizer", "use_regex"): (None, True),
    ("model", "dropout"): (None, 0, 0.0),
    ("model", "continuing_subword_prefix"): (None, ""),
    ("model", "end_of_word_suffix"): (None, ""),
    ("model", "byte_fallback"): (None, False),
    ("model", "ignore_merges"): (None, False),
}
"""Values of tokenizer.json with which text is cut as it is here; None for a step or a key that is not there."""
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
LETTERS = [chr(byte if byte in _SHOWN else 256 + _HIDDEN.index(byte)) for byte in range(256)]
"""How pieces spell every byte: as the character of its number where that one shows, else as one from U+0100 on."""
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


@dataclass(frozen=True)
class ByteLevel(Vocabulary):
    """Pieces of bytes, most of which begin with a blank or continue a word."""

    kind, file, has_blanks = "bytelevel", TOKENIZER, True

    content: str
    """The tokenizer.json."""
    named: SpecialPieces

    @property
    def special_pieces(self) -> SpecialPieces:
        """The pieces that stand for no text."""
        return self.named

    @cached_property
    def _table(self) -> dict[str, Any]:
        return dict(json.loads(self.content))

    @cached_property
    def _merges(self) -> list[tuple[str, str]]:
        return list(read_merges(self._table["model"]["merges"]))

    @property
    def _added(self) -> list[dict[str, Any]]:
        """The pieces that are found in a text before words are, such as ModernBERT's runs of blanks."""
        return [token for token in self._table.get("added_tokens") or () if not token["special"]]

    @property
    def _has_prefix(self) -> bool:
        return bool(self._table["pre_tokenizer"].get("add_prefix_space"))

    @property
    def separators(self) -> int:
        """The number of marks between the two texts of a pair, which is two in RoBERTa."""
        marks = self._table.get("post_processor") or {}
        pair = [index for index, part in enumerate(marks.get("pair") or ()) if "Sequence" in part]
        return pair[1] - pair[0] - 1 if len(pair) == 2 else 1 + (marks.get("type") == "RobertaProcessing")

    def list_rules(self) -> bytes:
        """Lists the pieces, their merges, and what happens to a text before and after."""
        rules = [self.pieces, self._merges, self.special_pieces, self._added, self._has_prefix]
        return json.dumps([*rules, self._table.get("normalizer")], sort_keys=True).encode()

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes that each piece stands for; a piece that was added, such as one of blanks, for its characters."""
        spelled = ({*piece} <= BYTES.keys() for piece in self.pieces)
        pairs = zip(self.pieces, spelled, strict=True)
        return [bytes(BYTES[letter] for letter in piece) if of_bytes else piece.encode() for piece, of_bytes in pairs]

    @cached_property
    def continues(self) -> Array:
        """Tells for every piece whether it continues a word: it has no blank, and begins with a letter or a digit, or
        within a character."""
        starts = [one.decode(errors="replace")[:1] for one in self._bytes]
        return np.array([start.isalnum() or start == "\ufffd" for start in starts]) & self.is_close

    @cached_property
    def is_close(self) -> Array:
        """Tells for every piece whether a text has it close to the piece before, without a blank."""
        special = set(self.special_pieces)
        pairs = zip(self.pieces, self._bytes, strict=True)
        return np.array([not one[:1].isspace() and piece not in special for piece, one in pairs])

    def spell(self, ids: Sequence[int]) -> str:
        """Spells the text of some pieces that follow one another, without a blank before it."""
        return b"".join(self._bytes[id] for id in ids).decode(errors="replace").removeprefix(" ")

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """Every piece as pages and messages show it: its text with its blank, and the bytes of split characters."""
        return tuple(one.decode(errors="backslashreplace") for one in self._bytes)

    def split_at_masks(self, text: str) -> list[str]:
        """Splits a text at its masks, which take the blanks before them along, as in transformers."""
        *parts, last = super().split_at_masks(text)
        return [*(part.rstrip() for part in parts), last]

    def pipeline(self) -> Tokenizer:
        """Builds the tokenizer. It takes the special pieces in a text for text, and offsets leave out blanks."""
        pipeline = Tokenizer.from_str(self.content)
        pipeline.encode_special_tokens = True
        pipeline.post_processor = processors.ByteLevel(trim_offsets=True, add_prefix_space=self._has_prefix)
        return pipeline

    def encoder(self) -> TextEncoder:
        """Makes an encoder that cuts every distinct word once."""
        from data_prep.vocabulary.encoders.bytelevel import FastByteLevel, Merges  # compiled by numba

        merges = Merges.from_pieces(self._table["model"]["vocab"], self._merges, LETTERS)
        added = [token["content"] for token in self._added]
        return FastByteLevel(self.pipeline(), merges, LETTERS, added, self._has_prefix)

    def find_replaced(self, pieces: Sequence[str]) -> list[list[int]]:
        """Finds the ids of the pieces that each of some pieces, new to this vocabulary, was cut into before."""
        pipeline = self.pipeline()
        texts = [piece if {*piece} <= BYTES.keys() else spell_bytes(piece) for piece in pieces]
        return [[token.id for token in pipeline.model.tokenize(text)] for text in texts]

    def list_contents(self) -> Mapping[str, bytes]:
        """Lists the files by which transformers and others load a tokenizer with the same ids."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # classes of models rebuild a tokenizer in their own way
            "model_max_length": 512,
            "add_prefix_space": self._has_prefix,
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": piece for name, piece in self.special_pieces._asdict().items()},
        }
        vocab = json.dumps({piece: number for number, piece in enumerate(self.pieces)}, ensure_ascii=False)
        lines = ["#version: 0.2", *(" ".join(pair) for pair in self._merges)]
        return {
            TOKENIZER: self.content.encode(),
            TOKENIZER_CONFIG: (json.dumps(config, indent=1) + "\n").encode(),
            PIECES: vocab.encode(),
            MERGES: ("\n".join(lines) + "\n").encode(),
        }


def spell_bytes(text: str) -> str:
    """Spells a text as pieces do, with a letter for each byte."""
    return "".join(LETTERS[byte] for byte in text.encode())


def read_merges(merges: Any) -> Iterator[tuple[str, str]]:
    """Reads merges: pairs, or as older files have them, two pieces with a blank between them."""
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def make_vocabulary(tokenizer: dict[str, Any], config: Mapping[str, Any], path: Path) -> ByteLevel:
    """Makes a vocabulary of the content of a tokenizer.json; raises UserError where it cuts text in another way."""
    check_steps(tokenizer, STEPS, path)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    try:
        ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
        merges = list(read_merges(model["merges"]))
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # tokenizers raises bare ones
        raise UserError(f"{path}: no byte-level BPE: {error}; copy it again") from error
    pieces = order_pieces(ids, path)
    merged = {piece for left, right in merges for piece in (left, right, left + right)}
    if not {*LETTERS} | merged <= model["vocab"].keys():
        raise UserError(f"{path}: lacks pieces of bytes or of merges; train it with all of ByteLevel.alphabet()")
    content = json.dumps({**tokenizer, "truncation": None, "padding": None}, ensure_ascii=False, separators=(",", ":"))
    return ByteLevel(pieces, True, content, _find_special(ids, config, path))


def _find_special(ids: Mapping[str, int], config: Mapping[str, Any], path: Path) -> SpecialPieces:
    """Finds the special pieces: those that tokenizer_config.json names, else by their usual names."""
    found = {}
    for role in SpecialPieces._fields:
        said = config.get(f"{role}_token")
        said = said.get("content") if isinstance(said, dict) else said
        names = [said, *(getattr(known, role) for known in KNOWN)]
        found[role] = next((name for name in names if name in ids), None)
    if found["cls"] == found["sep"] and END_OF_TEXT in ids and found["mask"] is None:
        found = dict.fromkeys(found, END_OF_TEXT)
    if lacking := [role for role, name in found.items() if name is None]:
        cure = f"name them in {TOKENIZER_CONFIG} (as {lacking[0]}_token)"
        raise UserError(f"{path}: has no piece for {', '.join(lacking)}: {cure}")
    return SpecialPieces(**{role: str(name) for role, name in found.items()})


def add_marks(tokenizer: Tokenizer, special: SpecialPieces) -> dict[str, Any]:
    """Adds to a model of BPE what its tokenizer.json needs: special pieces, and the marks around one text or two."""
    names = [*dict.fromkeys(name for name in (*ORDER, END_OF_TEXT) if tokenizer.token_to_id(name) is not None)]
    tokenizer.add_special_tokens([AddedToken(name, lstrip=name == special.mask, special=True) for name in names])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if SPECIAL.cls in names:
        sep, cls = ((name, int(tokenizer.token_to_id(name) or 0)) for name in (SPECIAL.sep, SPECIAL.cls))
        tokenizer.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=False)
    return dict(json.loads(tokenizer.to_str()))


class ByteLevelKind(TokenizerKind):
    """How byte-level BPE is read and trained."""

    vocabulary, title, model, plain = ByteLevel, "byte-level BPE", "BPE", (PIECES, MERGES)
    is_cased, is_extensible = True, False

    def read(self, folder: Path, tokenizer: dict[str, Any]) -> Vocabulary:
        """Reads the vocabulary of a folder: its tokenizer.json, else its vocab.json and merges.txt."""
        config = read_table(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
        if "model" not in tokenizer:
            try:
                model = models.BPE.from_file(str(folder / PIECES), str(folder / MERGES))
            except Exception as error:  # tokenizers raises bare ones
                raise UserError(f"{folder}: {PIECES} and {MERGES} are no BPE: {error}; copy them again") from error
            tokenizer = add_marks(Tokenizer(model), SPECIAL)
        return make_vocabulary(tokenizer, config, folder / TOKENIZER)

    def make_up(self, size: int, cased: bool) -> Vocabulary:  # noqa: ARG002
        """Makes up a vocabulary of this size, or a little larger, with numbers for words."""
        pieces = (*ORDER, *LETTERS, *(str(10 + number) for number in range(size)))[: max(size, len(ORDER) + 256)]
        model = models.BPE({piece: number for number, piece in enumerate(pieces)}, [])
        return make_vocabulary(add_marks(Tokenizer(model), SPECIAL), {}, Path(TOKENIZER))

    def count_words(self, text: Array, ends: Array, cased: bool) -> Mapping[str, int]:  # noqa: ARG002
        """Counts how often every word occurs, each with the blank before it."""
        from data_prep.vocabulary.encoders.bytelevel import SpacedWordTable  # compiled by numba

        counts = SpacedWordTable().count(text, ends)
        return Counter({word: count for word, count in counts.items() if len(word) <= LONGEST_WORD})

    def train(self, counts: Mapping[str, int], size: int, cased: bool) -> Vocabulary:  # noqa: ARG002
        """Learns a vocabulary of at most `size` pieces; the same counts give the same pieces."""
        if size < len(ORDER) + 256:
            raise UserError(f"--vocab-size {size}: special pieces and bytes alone need {len(ORDER) + 256}; take more")
        learner = Tokenizer(models.BPE())
        learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=size, min_frequency=2, special_tokens=[*ORDER], initial_alphabet=LETTERS, show_progress=False
        )
        spelled = {spell_bytes(word): count for word, count in counts.items()}
        learner.train_from_iterator(repeat_words(spelled), trainer)
        return make_vocabulary(add_marks(learner, SPECIAL), {}, Path(TOKENIZER))


KIND = ByteLevelKind()
