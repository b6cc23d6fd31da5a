"""The vectors of texts, by the encoder of a model and its pooling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_table
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.architectures.declaration import build_encoder, serve_encoder
from pretraining.checkpoint.models import StoredModel, fetch_together
from pretraining.huggingface.folders import read_task
from pretraining.huggingface.pooling import CONFIG, LENGTH, MODULES, POOLING, Pooling, read_pooling
from pretraining.model.batch import pack
from pretraining.model.encoder import Encoder
from pretraining.scoring.sentences import PIECES, PIECES_OF_GPU, SentenceCutter

SIMILARITY = "config_sentence_transformers.json"


class EmbeddingWay(NamedTuple):
    """How the vector of a text is made, and compared."""

    pooling: Pooling
    length: int
    """the most pieces of a text that are read"""
    by_dot: bool = False
    """whether vectors are to be compared by their products, not by their cosine"""


class Embedder:
    """Computes vectors of texts, without padding. On a CPU the layers are those for inference."""

    def __init__(
        self, encoder: Encoder, vocabulary: Vocabulary, way: EmbeddingWay, in_bytes: bool = False, shared: bool = False
    ) -> None:
        """Takes over an encoder on its device. `in_bytes`: layers multiply in 8 bits. An encoder that ranks have
        `shared` stays as it is: they call all methods together."""
        self.width, self.way = encoder.shape.hidden, way
        self.device = next(encoder.parameters()).device
        self._cut_texts = SentenceCutter(vocabulary).cut_texts
        self._together = PIECES_OF_GPU if self.device.type == "cuda" else PIECES
        sees_one = way.pooling.how != "mean"
        self._encode = encoder.encode if shared else serve_encoder(encoder, sees_one, in_bytes).encode

    @classmethod
    def open(
        cls, model: StoredModel, device: torch.device, dtype: torch.dtype = torch.float32, in_bytes: bool = False
    ) -> Embedder:
        """Reads the weights of a stored model, which pools as its folder says, or by the mean."""
        encoder = build_encoder(model.shape)
        encoder.load_state_dict({name: model.encoder[name] for name in encoder.state_dict()})
        encoder = encoder.to(device, dtype).eval().requires_grad_(False)
        return cls(encoder, model.vocabulary, read_way(model), in_bytes)

    @torch.inference_mode()
    def compute(self, texts: Sequence[str]) -> Array:
        """Computes the vectors of texts, (texts, width) in fp32. Longer texts keep their beginning."""
        cut, vectors = self._cut_texts(texts), np.empty((len(texts), self.width), np.float32)
        lengths = np.minimum(cut.lengths, self.way.length)
        order = np.argsort(lengths, kind="stable")
        ends = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // self._together)) + 1
        for part in np.split(order, ends) if len(order) else []:
            rows = cut.take(part).rows().shorten(self.way.length)
            batch = pack(rows, rows.pieces, rows.positions, rows.labels).to(self.device)
            vectors[part] = self.way.pooling.compute(self._encode, batch).cpu().numpy()
        return vectors


def read_way(model: StoredModel) -> EmbeddingWay:
    """Reads how a model makes the vector of a text: as its files for sentence-transformers say, or by the mean."""
    folder = model.folder
    if model.on_hub:
        folder = fetch_together(model.name, [MODULES, f"{POOLING}/{CONFIG}", LENGTH, SIMILARITY], folder.name)
    lengths, config = (read_table(folder / name) if (folder / name).is_file() else {} for name in (LENGTH, SIMILARITY))
    limits = [model.trained, read_task(folder).get("length"), lengths.get("max_seq_length")]
    compared = config.get("similarity_fn_name")
    if compared not in (None, "cosine", "dot"):
        raise UserError(f"{folder / SIMILARITY}: compares vectors by {compared}; known are cosine and dot")
    if prompts := [name for name, prompt in (config.get("prompts") or {}).items() if prompt]:
        warnings.warn(f"{folder}: its prompts are not put before texts: {', '.join(prompts)}", stacklevel=2)
    return EmbeddingWay(read_pooling(folder) or Pooling(), min(limit for limit in limits if limit), compared == "dot")
