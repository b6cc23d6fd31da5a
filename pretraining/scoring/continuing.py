"""Continues a text with a model that predicts each piece from those before it.

Every new piece costs a pass over all pieces so far, so that the time grows with the square of their number.
"""

from __future__ import annotations

import numpy as np
import torch

from data_prep.common.errors import UserError
from pretraining.checkpoint.models import StoredModel
from pretraining.model.batch import pack
from pretraining.model.shape import PIECE_HEAD
from pretraining.objectives.declaration import find_objective
from pretraining.scoring.sentences import SentenceCutter, Sentences


@torch.inference_mode()
def continue_text(model: StoredModel, text: str, most: int, temperature: float, seed: int, device: torch.device) -> str:
    """Returns a text, as the model reads it, with up to `most` pieces that follow it: fewer where a sequence or the
    positions of the model end.

    At a temperature of 0 each is the likeliest; otherwise it is drawn from the probabilities at that temperature.
    """
    network = model.build_pretrained(predicts=True).float().to(device)
    if network.shape.learns.sees != "before":
        raise UserError(
            f"--continue: {model.name} {find_objective(network.shape).learns}; name one that predicts the piece after"
        )
    vocabulary = model.vocabulary
    pieces = SentenceCutter(vocabulary).cut_texts([text]).pieces[:-1]  # without [SEP], which would end it
    if len(pieces) >= network.shape.positions:
        positions = f"{model.name} has {network.shape.positions} positions"
        raise UserError(f"--continue: the text has {len(pieces)} pieces, and {positions}: none is left to continue in")
    random = torch.Generator(device).manual_seed(seed)
    for _ in range(min(most, network.shape.positions - len(pieces))):
        place = np.array([len(pieces) - 1])
        batch = pack(Sentences(pieces, np.array([len(pieces)])).rows(), pieces, place, place).to(device)
        states = network.encode(batch, batch.chosen)
        logits = network.head(PIECE_HEAD).logits(states, network.embeddings.word.weight)[0, : len(vocabulary)]
        scaled = logits / (temperature or 1.0)
        drawn = torch.multinomial(scaled.softmax(0), 1, generator=random) if temperature else logits.argmax(0, True)
        if int(drawn) == vocabulary.special.sep:
            break
        pieces = np.append(pieces, int(drawn))
    return vocabulary.spell(pieces[1:].tolist())
