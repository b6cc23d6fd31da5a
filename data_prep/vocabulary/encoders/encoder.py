"""Cuts texts into the ids of pieces: what an encoder is, and the slow one that every kind has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from data_prep.common.arrays import Array


class Pieces(NamedTuple):
    """The pieces of several sentences, one sentence after another."""

    ids: Array  # (pieces,) int32
    ends: Array  # (sentences,) where every sentence ends in ids
    characters: int = 0  # of all words, and of those that became [UNK], where the kind has that and they are counted
    lost: int = 0


class TextEncoder(ABC):
    """Cuts sentences into pieces."""

    @abstractmethod
    def encode(self, text: Array, ends: Array) -> Pieces:
        """Cuts the sentences of `text` into pieces; `text` is bytes of UTF-8, in which the sentences end at `ends`."""

    def encode_texts(self, texts: Sequence[str]) -> Pieces:
        """Cuts texts into pieces; halves of characters, which JSON can hold and UTF-8 cannot, become `?`."""
        encoded = [text.encode(errors="replace") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return self.encode(np.frombuffer(b"".join(encoded), np.uint8), ends)


class PipelineEncoder(TextEncoder):
    """Encodes sentences with a pipeline of `tokenizers`."""

    def __init__(self, pipeline: Tokenizer) -> None:
        self._pipeline = pipeline

    def encode(self, text: Array, ends: Array) -> Pieces:
        """Cuts the sentences of `text` into pieces."""
        content, starts = text.tobytes(), np.concatenate([[0], ends[:-1]])[: len(ends)].tolist()
        sentences = [content[start:end].decode() for start, end in zip(starts, ends.tolist(), strict=True)]
        ids = [one.ids for one in self._pipeline.encode_batch(sentences, add_special_tokens=False)]
        return Pieces(np.array([id for one in ids for id in one], np.int32), np.cumsum([len(one) for one in ids]))
