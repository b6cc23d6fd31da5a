"""Scores sentences by a pre-trained model, or lets it fill in or continue a text.

The score of a sentence is the sum of the log-probabilities of its pieces.

A bidirectional model predicts each piece in a copy of the sentence in which this piece and the later pieces of its word
are masked (Kauf and Ivanova, 2023): unmasked, the rest of a rare word would give the piece away. A model of one
direction predicts all pieces at once. [CLS] and [SEP] surround the sentence as in pre-training, and are not predicted.

    the  em  ##bar  ##go     ->     [MASK]   em    ##bar   ##go
                                     the   [MASK]  [MASK] [MASK]
                                     the     em    [MASK] [MASK]
                                     the     em    ##bar  [MASK]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from data_prep.common.arrays import Array, ranges
from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Special, Vocabulary
from pretraining.architectures.declaration import serve_encoder
from pretraining.checkpoint.models import StoredModel
from pretraining.model.batch import PretrainingBatch, pack
from pretraining.model.encoder import PretrainingModel
from pretraining.model.rows import Rows
from pretraining.model.shape import PIECE_HEAD
from pretraining.objectives.declaration import find_objective

PIECES, PIECES_OF_GPU = 1 << 11, 1 << 16
"""Approximate pieces of a batch: larger ones exceed the cache of a CPU, smaller ones leave a GPU idle."""
BEST, MOST = 5, 40
"""Pieces that are listed for a [MASK], and those that continue a text at most."""
MARKS = 2
"""Number of marks around a sentence: [CLS] and [SEP]."""


@dataclass(frozen=True)
class Sentences:
    """Sentences in pieces, each between [CLS] and [SEP]."""

    pieces: Array  # (n,): one sentence after another
    lengths: Array  # (s,)

    @cached_property
    def starts(self) -> Array:
        """(s,) where each sentence begins."""
        return np.cumsum(self.lengths) - self.lengths

    def sentence_numbers(self, places: Array) -> Array:
        """Finds the numbers of the sentences that hold these places among all pieces."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def have_scores(self, longest: int) -> Array:
        """(s,) whether a model with `longest` positions can score a sentence: it has pieces, and not too many."""
        return (self.lengths > MARKS) & (self.lengths <= longest)

    def take(self, numbers: Array) -> Sentences:
        """Selects sentences, in this order, with repetitions."""
        lengths = self.lengths[numbers]
        return Sentences(self.pieces[ranges(self.starts[numbers], lengths)], lengths)

    def rows(self) -> Rows:
        """Converts the sentences to examples without pairs and masks."""
        none = np.empty(0, np.int64)
        return Rows.from_memory(self.lengths, self.pieces, self.lengths, np.zeros_like(self.lengths), none, none)


Question = tuple[PretrainingBatch, Array]
"""A batch for a model, and for each predicted piece the number of its sentence."""


def mask_copies(sentences: Sentences, wanted: Array, continues: Array, mask: int, shift: int = 0) -> Question:
    """Copies the sentence of each wanted piece, and masks it and the later pieces of its word.

    `wanted`: places among all pieces. `continues`: for each piece of the vocabulary, whether it continues a word.
    `shift`: how many places before a piece the model predicts it.
    """
    sentence = sentences.sentence_numbers(wanted)
    own, number = np.unique(sentence, return_inverse=True)
    few = sentences.take(own)  # so that the cost of a batch does not grow with the number of sentences
    place, lengths = wanted - sentences.starts[sentence], few.lengths[number]
    asked = few.starts[number] + place
    words = np.flatnonzero(~continues[few.pieces])  # where words begin; [SEP] ends the last
    word_ends = place + words[np.searchsorted(words, asked, side="right")] - asked
    copies = few.take(number)
    at = ranges(np.zeros_like(lengths), lengths)
    hidden = (np.repeat(place, lengths) <= at) & (at < np.repeat(word_ends, lengths))
    chosen = copies.starts + place - shift
    return pack(copies.rows(), np.where(hidden, mask, copies.pieces), chosen, few.pieces[asked]), sentence


def make_pass(model: PretrainingModel, sentences: Sentences, numbers: Array, special: Special) -> Question:
    """Makes a batch of sentences for a model of one direction, without predictions of [CLS] and [SEP]."""
    chosen = sentences.take(numbers)
    batch = find_objective(model.shape).batch(chosen.rows())
    asked = ~torch.isin(batch.labels, torch.tensor([special.cls, special.sep]))
    batch = replace(batch, chosen=batch.chosen[asked], labels=batch.labels[asked])
    return batch, numbers[chosen.sentence_numbers(batch.chosen.numpy())]


class SentenceCutter:
    """Cuts sentences into pieces, with [CLS] and [SEP] around them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._special, self._fast = vocabulary.special, vocabulary.encoder()

    def cut_texts(self, texts: Sequence[str]) -> Sentences:
        found = self._fast.encode_texts(texts)
        counts = np.diff(found.ends, prepend=0)
        starts = np.cumsum(counts + MARKS) - counts - MARKS
        pieces = np.full(counts.sum() + MARKS * len(counts), self._special.sep, np.int64)
        pieces[starts] = self._special.cls
        pieces[ranges(starts + 1, counts)] = found.ids
        return Sentences(pieces, counts + MARKS)


class Scorer:
    """Scores sentences by a pre-trained model."""

    def __init__(
        self, model: PretrainingModel, vocabulary: Vocabulary, device: torch.device, as_it_is: bool = False
    ) -> None:
        """Takes the model over, and converts it to fp32. One that is `as_it_is` stays so: in evaluation, on its device;
        ranks that share it score the same sentences together."""
        self.model = model if as_it_is else model.float().to(device).eval().requires_grad_(False)
        self.vocabulary, self.device, self.longest = vocabulary, device, model.shape.positions
        self.cut_texts = SentenceCutter(vocabulary).cut_texts
        self._together = PIECES_OF_GPU if device.type == "cuda" else PIECES
        is_served = not (as_it_is or model.shape.one_way)
        self._encode = serve_encoder(model, sees_one=True).encode if is_served else model.encode

    def score(
        self, texts: Sequence[str], before: Callable[[], None] = lambda: None, rank: int = 0, ranks: int = 1
    ) -> Array:
        """Computes (s,) log-likelihoods, each distinct sentence once; NaN for a sentence without pieces, or with more
        than the model has positions.

        Each of several ranks computes some batches, which do not depend on the number of ranks, so the results must be
        added. `before` is called before each batch, equally often on all ranks.
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
        """Splits sentences that have scores into batches of like lengths: by numbers of sentences or, for a
        bidirectional model, of pieces."""
        order = np.argsort(sentences.lengths, kind="stable")
        order = order[sentences.have_scores(self.longest)[order]]
        if not self.model.shape.one_way:
            counts = sentences.lengths[order] - MARKS
            order = ranges(sentences.starts[order] + 1, counts)
            pieces = np.repeat(counts + MARKS, counts)
        else:
            pieces = sentences.lengths[order]
        ends = np.flatnonzero(np.diff(np.cumsum(pieces) // self._together)) + 1
        return [part for part in np.split(order, ends) if len(part)]

    @torch.inference_mode()
    def score_part(self, sentences: Sentences, part: Array) -> tuple[Array, Array]:
        """Computes the log-probabilities of the pieces of a batch; returns the sentence number of each, and these."""
        if self.model.shape.one_way:
            batch, numbers = make_pass(self.model, sentences, part, self.vocabulary.special)
        else:
            vocabulary, shift = self.vocabulary, find_objective(self.model.shape).shift
            batch, numbers = mask_copies(sentences, part, vocabulary.continues, vocabulary.special.mask, shift)
        batch, model = batch.to(self.device), self.model
        states = self._encode(batch, batch.chosen)
        found = model.head(PIECE_HEAD).log_probabilities(states, model.embeddings.word.weight, batch.labels)
        return numbers, found.double().cpu().numpy()


class Filling(NamedTuple):
    """A piece for a [MASK], and its probability."""

    piece: str
    probability: float


@torch.inference_mode()
def fill_masks(model: StoredModel, text: str, device: torch.device) -> list[list[Filling]]:
    """Returns the likeliest pieces for every [MASK] of a text, the likeliest first."""
    parts, mask = model.vocabulary.split_at_masks(text), model.vocabulary.special_pieces.mask
    if len(parts) < 2:
        raise UserError(f"--fill {text!r}: has no {mask}, which stands for what the model is to say")
    network = model.build_pretrained(predicts=True)
    if network.shape.one_way:
        raise UserError(
            f"--fill: {model.name} {find_objective(network.shape).learns}, and has never seen a {mask}; name a "
            "model that learned from masked pieces"
        )
    sentence, masks = insert_masks(parts, model)
    length = len(sentence.pieces)
    if length > network.shape.positions:
        raise UserError(f"--fill: the text has {length} pieces, and {model.name} {network.shape.positions} positions")
    chosen = masks - find_objective(network.shape).shift
    batch = pack(sentence.rows(), sentence.pieces, chosen, sentence.pieces[masks]).to(device)
    states = network.float().to(device).encode(batch, batch.chosen)
    logits = network.head(PIECE_HEAD).logits(states, network.embeddings.word.weight)[:, : len(model.vocabulary)]
    found = logits.softmax(1).topk(min(BEST, logits.shape[1]))
    pieces = model.vocabulary.spellings
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [[Filling(pieces[piece], share) for piece, share in zip(*row, strict=True)] for row in rows]


def insert_masks(parts: Sequence[str], model: StoredModel) -> tuple[Sentences, Array]:
    """Joins parts of a text by [MASK]; returns the sentence in pieces, and the places of its masks."""
    special = model.vocabulary.special
    cut = model.vocabulary.encoder().encode_texts(parts)
    between = np.insert(cut.ids.astype(np.int64), cut.ends[:-1], special.mask)
    pieces = np.concatenate([[special.cls], between, [special.sep]])
    masks = 1 + cut.ends[:-1] + np.arange(len(parts) - 1)
    return Sentences(pieces, np.array([len(pieces)])), masks


@torch.inference_mode()
def continue_text(model: StoredModel, text: str, device: torch.device) -> str:
    """Returns a text, as the model reads it, with the likeliest pieces that follow it: up to `MOST`, fewer where a
    sequence ends, or the length that the model was trained on. Each costs a pass over all pieces so far."""
    network = model.build_pretrained(predicts=True).float().to(device)
    if network.shape.learns.sees != "before":
        raise UserError(
            f"--continue: {model.name} {find_objective(network.shape).learns}; name one that predicts the piece after"
        )
    vocabulary = model.vocabulary
    pieces = SentenceCutter(vocabulary).cut_texts([text]).pieces[:-1]  # without [SEP], which would end it
    longest = min(model.trained, network.shape.positions)
    if len(pieces) >= longest:
        trained = f"{model.name} was trained on {longest}"
        raise UserError(f"--continue: the text has {len(pieces)} pieces, and {trained}: none is left to continue in")
    special = vocabulary.special
    never = [*{special.pad, special.cls, special.mask} - {special.sep}]
    for _ in range(min(MOST, longest - len(pieces))):
        place = np.array([len(pieces) - 1])
        batch = pack(Sentences(pieces, np.array([len(pieces)])).rows(), pieces, place, place).to(device)
        states = network.encode(batch, batch.chosen)
        logits = network.head(PIECE_HEAD).logits(states, network.embeddings.word.weight)[0, : len(vocabulary)]
        logits[never] = -torch.inf
        likeliest = int(logits.argmax())
        if likeliest == special.sep:
            break
        pieces = np.append(pieces, likeliest)
    return vocabulary.spell(pieces[1:].tolist())
