"""Predicts the pieces at each [MASK] of a text by a pre-trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import MASK
from pretraining.checkpoint.models import StoredModel
from pretraining.model.batch import pack
from pretraining.model.shape import PIECE_HEAD
from pretraining.objectives.declaration import find_objective
from pretraining.scoring.sentences import Sentences, require_pieces


class Filling(NamedTuple):
    """A piece for a [MASK], and its probability."""

    piece: str
    probability: float


@torch.inference_mode()
def fill_masks(model: StoredModel, text: str, best: int, device: torch.device) -> list[list[Filling]]:
    """Returns the `best` likeliest pieces for every [MASK] of a text, the likeliest first."""
    parts = text.split(MASK)
    if len(parts) < 2:
        raise UserError(f"--fill {text!r}: has no {MASK}, which stands for what the model is to say")
    bert = model.build_pretrained()
    require_pieces(bert)
    if bert.shape.one_way:
        raise UserError(
            f"--fill: {model.name} {find_objective(bert.shape).learns}, and has never seen a {MASK}; name a model that "
            "learned from masked pieces"
        )
    sentence, masks = insert_masks(parts, model)
    length = len(sentence.pieces)
    if length > bert.shape.positions:
        raise UserError(f"--fill: the text has {length} pieces, and {model.name} {bert.shape.positions} positions")
    batch = pack(sentence.rows(), sentence.pieces, masks, sentence.pieces[masks]).to(device)
    states = bert.float().to(device).encode(batch, batch.chosen)
    logits = bert.head(PIECE_HEAD).logits(states, bert.embeddings.word.weight)[:, : len(model.vocabulary)]
    found = logits.softmax(1).topk(min(best, logits.shape[1]))
    pieces = model.vocabulary.pieces
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [[Filling(pieces[piece], share) for piece, share in zip(*row, strict=True)] for row in rows]


def insert_masks(parts: Sequence[str], model: StoredModel) -> tuple[Sentences, Array]:
    """Joins parts of a text by [MASK]; returns the sentence in pieces, and the places of its masks."""
    from data_prep.vocabulary.wordpiece import FastWordPiece  # compiled by numba, which training does without

    vocabulary, special = model.vocabulary, model.vocabulary.special
    cut = FastWordPiece(vocabulary.pipeline(), vocabulary.cased).encode_texts(parts)
    between = np.insert(cut.ids.astype(np.int64), cut.ends[:-1], special.mask)
    pieces = np.concatenate([[special.cls], between, [special.sep]])
    masks = 1 + cut.ends[:-1] + np.arange(len(parts) - 1)
    return Sentences(pieces, np.array([len(pieces)])), masks
