"""How likely a pre-trained model finds sentences, without any task: the sum of the log-probabilities of their pieces.

A model that sees both directions is asked for one piece after another, each in a copy of its sentence in which this
piece and the later pieces of its own word are masked (Kauf and Ivanova, 2023): unmasked, the rest of a rare word would
give the piece away. One that sees one direction is asked for all pieces at once. [CLS] and [SEP] stand around a
sentence as in pre-training, and are not predicted.

    the  em  ##bar  ##go     ->     [MASK]   em    ##bar   ##go
                                     the   [MASK]  [MASK] [MASK]
                                     the     em    [MASK] [MASK]
                                     the     em    ##bar  [MASK]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from data_prep.common.arrays import Array, ranges
from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Special, Vocabulary
from pretraining.model.batch import PretrainingBatch, pack
from pretraining.model.bert import Bert
from pretraining.model.rows import Rows
from pretraining.model.serving import ServedEncoder
from pretraining.model.shape import PIECE_HEAD
from pretraining.objectives.declaration import find_objective

PIECES, PIECES_OF_GPU = 1 << 11, 1 << 16
"""Pieces of a batch, about: on a CPU larger ones leave the cache, on a GPU smaller ones leave most of it idle."""
MARKS = 2
"""Pieces of a sentence that has no other: [CLS] and [SEP]."""


@dataclass(frozen=True)
class Sentences:
    """Sentences in pieces, each between [CLS] and [SEP]."""

    pieces: Array  # (n,): one sentence after another
    lengths: Array  # (s,)

    @cached_property
    def starts(self) -> Array:
        """(s,) where each sentence begins."""
        starts: Array = np.cumsum(self.lengths) - self.lengths
        return starts

    def sentence_numbers(self, places: Array) -> Array:
        """The numbers of the sentences that hold these places among all pieces."""
        numbers: Array = np.searchsorted(self.starts, places, side="right") - 1
        return numbers

    def have_scores(self, longest: int) -> Array:
        """(s,) whether a model of so many positions can score a sentence: one with pieces, and not with too many."""
        able: Array = (self.lengths > MARKS) & (self.lengths <= longest)
        return able

    def take(self, numbers: Array) -> Sentences:
        """These sentences, in this order; one may come several times."""
        lengths = self.lengths[numbers]
        return Sentences(self.pieces[ranges(self.starts[numbers], lengths)], lengths)

    def rows(self) -> Rows:
        """The sentences as examples without pairs and without masks."""
        count, none = len(self.lengths), np.empty(0, np.int64)
        zeros = np.zeros(count, np.int64)
        where = np.stack([zeros, np.arange(count)], axis=1)
        return Rows(where, self.lengths, self.pieces, self.lengths, zeros, zeros, none, none)


Question = tuple[PretrainingBatch, Array]
"""A batch for a model, and the number of the sentence of each piece that it asks for."""


def mask_copies(sentences: Sentences, wanted: Array, continues: Array, mask: int) -> Question:
    """A copy of its sentence for every wanted piece, in which it and the later pieces of its word are masked.

    `wanted` are places among all pieces; `continues` says of every piece of the vocabulary whether it goes on with a
    word.
    """
    sentence = sentences.sentence_numbers(wanted)
    own, number = np.unique(sentence, return_inverse=True)
    few = sentences.take(own)  # so that a batch costs as much among very many sentences
    place, lengths = wanted - sentences.starts[sentence], few.lengths[number]
    asked = few.starts[number] + place
    words = np.flatnonzero(~continues[few.pieces])  # where words begin; [SEP] ends the last
    word_ends = place + words[np.searchsorted(words, asked, side="right")] - asked
    copies = few.take(number)
    at = ranges(np.zeros_like(lengths), lengths)
    hidden = (np.repeat(place, lengths) <= at) & (at < np.repeat(word_ends, lengths))
    batch = pack(copies.rows(), np.where(hidden, mask, copies.pieces), copies.starts + place, few.pieces[asked])
    return batch, sentence


def make_pass(model: Bert, sentences: Sentences, numbers: Array, special: Special) -> Question:
    """Some of the sentences as a model of one direction learns from them, which is not asked for [CLS] and [SEP]."""
    chosen = sentences.take(numbers)
    batch = find_objective(model.shape).batch(chosen.rows())
    asked = ~torch.isin(batch.labels, torch.tensor([special.cls, special.sep]))
    batch = replace(batch, chosen=batch.chosen[asked], labels=batch.labels[asked])
    return batch, numbers[chosen.sentence_numbers(batch.chosen.numpy())]


class SentenceCutter:
    """Cuts sentences into pieces, with [CLS] and [SEP] around them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from data_prep.vocabulary.wordpiece import FastWordPiece  # compiled by numba, which training does without

        self._special, self._fast = vocabulary.special, FastWordPiece(vocabulary.pipeline(), vocabulary.cased)

    def cut_texts(self, texts: Sequence[str]) -> Sentences:
        found = self._fast.encode_texts(texts)
        counts = np.diff(found.ends, prepend=0)
        starts = np.cumsum(counts + MARKS) - counts - MARKS
        pieces = np.full(counts.sum() + MARKS * len(counts), self._special.sep, np.int64)
        pieces[starts] = self._special.cls
        pieces[ranges(starts + 1, counts)] = found.ids
        return Sentences(pieces, counts + MARKS)


class Scorer:
    """Scores sentences in fp32 by a pre-trained model, whose layers it takes."""

    def __init__(self, model: Bert, vocabulary: Vocabulary, device: torch.device) -> None:
        require_pieces(model)
        self.model = model.float().to(device).eval().requires_grad_(False)
        self.vocabulary, self.device, self.longest = vocabulary, device, model.shape.positions
        self.cut_texts = SentenceCutter(vocabulary).cut_texts
        self._together = PIECES_OF_GPU if device.type == "cuda" else PIECES
        self._served = None if model.shape.one_way else ServedEncoder(model, sees_one=True)

    def score(
        self, texts: Sequence[str], before: Callable[[], None] = lambda: None, rank: int = 0, ranks: int = 1
    ) -> Array:
        """(s,) the log-likelihoods of sentences, each computed once; not a number where one has more pieces than the
        model has positions, or none.

        Of several ranks each computes a part of every sum; what is computed together is the same for any number of
        them. `before` is called before a batch, as often on all ranks.
        """
        unique, numbers = np.unique(np.array(texts, dtype=object), return_inverse=True)
        sentences = self.cut_texts(unique.tolist())
        able = sentences.have_scores(self.longest)
        scores = np.where(able, 0.0, np.nan)
        parts = self.parts(sentences)
        for turn in range(0, len(parts), ranks):
            before()
            for part in parts[turn + rank : turn + rank + 1]:
                np.add.at(scores, *self.score_part(sentences, part))
        if not np.isfinite(scores[able]).all():
            raise UserError("the model says no numbers of some sentences: it has diverged, or is damaged")
        return scores[numbers]

    def parts(self, sentences: Sentences) -> list[Array]:
        """What is computed together, of sentences of like lengths that have scores: numbers of sentences, or where each
        piece is asked for by itself, of pieces."""
        order = np.argsort(sentences.lengths, kind="stable")
        order = order[sentences.have_scores(self.longest)[order]]
        if self._served is not None:
            counts = sentences.lengths[order] - MARKS
            order = ranges(sentences.starts[order] + 1, counts)
            pieces = np.repeat(counts + MARKS, counts)
        else:
            pieces = sentences.lengths[order]
        ends = np.flatnonzero(np.diff(np.cumsum(pieces) // self._together)) + 1
        return [part for part in np.split(order, ends) if len(part)]

    def flops(self, texts: Sequence[str]) -> float:
        """Useful operations of scoring these sentences, each once: matrix products alone, a multiplication and an
        addition each. In the last layer one piece of a copy asks, so that keys and values are never made."""
        shape, sentences = self.model.shape, self.cut_texts([*dict.fromkeys(texts)])
        lengths = sentences.lengths[sentences.have_scores(self.longest)]
        h, asked = shape.hidden, lengths - MARKS
        head = 2.0 * (h * h + h * shape.vocabulary) * asked.sum()
        if self._served is None:
            return float(head + shape.encoder_flops(lengths.tolist()))
        below = replace(shape, layers=shape.layers - 1).encoder_flops(np.repeat(lengths, asked).tolist())
        last = 2.0 * (4 * h * h + 2 * h * shape.intermediate) * asked.sum()
        return float(head + below + last + 4.0 * h * shape.heads * (asked * lengths).sum())

    @torch.inference_mode()
    def score_part(self, sentences: Sentences, part: Array) -> tuple[Array, Array]:
        """The numbers of sentences, once for every piece that a part asks for, and the log-probabilities of these."""
        if self._served is None:
            batch, numbers = make_pass(self.model, sentences, part, self.vocabulary.special)
        else:
            batch, numbers = mask_copies(sentences, part, self.vocabulary.continues, self.vocabulary.special.mask)
        batch, model, served = batch.to(self.device), self.model, self._served
        states = model.encode(batch, batch.chosen) if served is None else served.one(batch, batch.chosen)
        found = model.head(PIECE_HEAD).log_probabilities(states, model.embeddings.word.weight, batch.labels)
        return numbers, found.double().cpu().numpy()


def require_pieces(model: Bert) -> None:
    """Raises UserError for a model that predicts no pieces."""
    objective = find_objective(model.shape)
    if PIECE_HEAD not in objective.heads(model.shape):
        raise UserError(f"a model that {objective.learns} says of no piece how likely it is, so it scores no sentence")
