"""An encoder for inference.

An architecture may have layers for it that are faster than those of training (`layers.py` has them for BERT). Otherwise
the encoder computes as in training, in its last layer only the rows that are asked for.

n pieces, s sequences, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pretraining.model.batch import Batch
from pretraining.model.dropout import KEEPS
from pretraining.model.encoder import Encoder


class ServedLayers(Protocol):
    """The layers of an encoder, for inference. They read an oriented batch, and the output of its embeddings."""

    def compute_all(self, x: Tensor, batch: Batch) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H)."""

    def compute_one(self, x: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Computes the last hidden states at these places among all pieces, one of every sequence: (s, H)."""


ServeLayers = Callable[[Encoder, bool, bool], ServedLayers]
"""Makes the layers of an encoder; the last arguments are those of `ServedEncoder`."""


class ServedEncoder:
    """An encoder for inference. It may take the layers out of the encoder that it is made from."""

    def __init__(self, encoder: Encoder, serve: ServeLayers | None, sees_one: bool, in_bytes: bool = False) -> None:
        """`serve`: makes faster layers, if the architecture has them; `sees_one`: only one piece of every sequence is
        computed in the last layer; `in_bytes`: products are in 8 bits, which only faster layers can."""
        self.encoder = encoder.eval().requires_grad_(False)
        self.layers = None if serve is None else serve(encoder, sees_one, in_bytes)
        assert self.layers is not None or not in_bytes

    def encode(self, batch: Batch, places: Tensor | None = None) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H), or those at these places, one of every sequence:
        (s, H)."""
        encoder = self.encoder
        if self.layers is None:
            return encoder.encode(batch, places)
        x = encoder.embeddings(encoder.orient(batch), KEEPS)
        if places is None:
            return encoder.restore_order(self.layers.compute_all(x, batch), batch)
        places = batch.reverse_places()[places] if encoder.shape.learns.sees == "after" else places
        return self.layers.compute_one(x, batch, places)
