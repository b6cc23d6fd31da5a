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
    """Returns a text, as the model reads it, with up to `most` pieces that follow it: fewer where a sequence
    ends, or the length that the model was trained on.

    At a temperature of 0 each is the likeliest; otherwise it is drawn from the probabilities at that temperature.
    """
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
    random, special = torch.Generator(device).manual_seed(seed), vocabulary.special
    never = [*{special.pad, special.cls, special.mask} - {special.sep}]
    for _ in range(min(most, longest - len(pieces))):
        place = np.array([len(pieces) - 1])
        batch = pack(Sentences(pieces, np.array([len(pieces)])).rows(), pieces, place, place).to(device)
        states = network.encode(batch, batch.chosen)
        logits = network.head(PIECE_HEAD).logits(states, network.embeddings.word.weight)[0, : len(vocabulary)]
        logits[never] = -torch.inf
        likely = (logits.double() - logits.max()).div(temperature or 1.0).softmax(0)
        drawn = torch.multinomial(likely, 1, generator=random) if temperature else logits.argmax(0, True)
        if int(drawn) == special.sep:
            break
        pieces = np.append(pieces, int(drawn))
    return vocabulary.spell(pieces[1:].tolist())
