"""What every vocabulary can be asked, whatever its tokenizer kind: ids, marks, spelling, a tokenizer and an encoder.

A class of `kinds/` derives from `Vocabulary` for each kind. Nobody else knows how pieces are spelled.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from data_prep.common.arrays import Array
from data_prep.common.files import FileRecord, replacing
from data_prep.vocabulary.encoders.encoder import PipelineEncoder, TextEncoder

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
STOPS, CLOSINGS = ".!?…。！？।؟۔", ")]’”»」』）】"  # marks that end a sentence, and marks that may follow them
CONTINUES, STOP, CLOSING = 1, 2, 3  # kinds of pieces


class SpecialPieces(NamedTuple):
    """The pieces that stand for no text, in the order of `Special`."""

    pad: str
    unk: str
    cls: str
    sep: str
    mask: str


class Special(NamedTuple):
    """The ids of the pieces that stand for no text: padding, unknown words, the marks of an example and its masks."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Vocabulary(ABC):
    """The pieces in the order of their ids, and whether they keep case and accents."""

    kind: ClassVar[str]
    """The name of its tokenizer kind, which is that of the kind's file."""
    file: ClassVar[str]
    """The file that it is read from."""
    has_blanks: ClassVar[bool] = False
    """Whether pieces have blanks, so that a sentence has one before it where it follows another."""

    pieces: tuple[str, ...]
    cased: bool

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def separators(self) -> int:
        """The number of marks between the two texts of a pair."""
        return 1

    @cached_property
    def sha256(self) -> str:
        """Identifies the vocabulary in a manifest or a task: the checksum of all that decides how text is cut."""
        return hashlib.sha256(self.list_rules()).hexdigest()

    @abstractmethod
    def list_rules(self) -> bytes:
        """Lists all that decides how text is cut, in bytes that never change."""

    @property
    @abstractmethod
    def special_pieces(self) -> SpecialPieces:
        """The pieces that stand for no text."""

    @property
    def special(self) -> Special:
        """Looks up the ids of the pieces that stand for no text."""
        return Special(*map(self.pieces.index, self.special_pieces))

    @property
    @abstractmethod
    def continues(self) -> Array:
        """Tells for every piece whether it continues a word, which masking of whole words needs."""

    @property
    def is_close(self) -> Array:
        """Tells for every piece whether a text has it close to the piece before, without a blank."""
        return self.continues

    @abstractmethod
    def spell(self, ids: Sequence[int]) -> str:
        """Spells the text of some pieces that follow one another."""

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """Every piece as pages and messages show it."""
        return self.pieces

    def spell_alone(self, id: int) -> str:
        """Spells a piece as it is shown where blanks stand between pieces anyway."""
        return self.spellings[id].strip()

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The characters of every piece, without what marks its place in a word; none for one that stands for none."""
        special = set(self.special_pieces)
        return tuple("" if piece in special else self.spell([id]) for id, piece in enumerate(self.pieces))

    @cached_property
    def marks(self) -> Array:
        """Tells for every piece whether it continues a word, ends a sentence or closes what has ended: 0 for none."""
        kinds = {**dict.fromkeys(STOPS, STOP), **dict.fromkeys(CLOSINGS, CLOSING)}
        marks = [kinds.get(text, 0) for text in self.texts]
        return np.where(self.continues, CONTINUES, np.array(marks)).astype(np.int8)

    def split_at_masks(self, text: str) -> list[str]:
        """Splits a text at its masks, which users write as the piece is spelled."""
        return text.split(self.special_pieces.mask)

    @abstractmethod
    def pipeline(self) -> Tokenizer:
        """Builds the tokenizer. It takes the special pieces in a text for text."""

    def text_pipeline(self) -> Tokenizer:
        """Builds the tokenizer for text of any language; a kind may cut what `pipeline` takes for one unknown word."""
        return self.pipeline()

    def encoder(self) -> TextEncoder:
        """Makes an encoder of many texts; a kind may have a faster one, with the ids of `text_pipeline`."""
        return PipelineEncoder(self.text_pipeline())

    @abstractmethod
    def find_replaced(self, pieces: Sequence[str]) -> list[list[int]]:
        """Finds the ids of the pieces that each of some pieces, new to this vocabulary, was cut into before."""

    @abstractmethod
    def list_contents(self) -> Mapping[str, bytes]:
        """Lists the files of the vocabulary, with those by which transformers loads a tokenizer with the same ids."""

    def write(self, folder: Path) -> list[FileRecord]:
        """Writes the files of the vocabulary."""
        records = []
        for name, content in self.list_contents().items():
            with replacing(folder / name) as file:
                file.write(content)
            records.append(FileRecord.from_file(folder, name, len(self)))
        return records


def has_capitals(pieces: Sequence[str]) -> bool:
    """Tells whether a piece has a letter that text in lower case never has; special pieces stand in brackets."""
    return any(not piece.startswith("[") and piece != piece.lower() for piece in pieces)
