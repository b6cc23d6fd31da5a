"""The vectors of texts, by the encoder of a model and its pooling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

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


class Embedder:
    """Computes vectors of texts, without padding. On a CPU the layers are those for inference."""

    def __init__(
        self, encoder: Encoder, vocabulary: Vocabulary, pooling: Pooling, in_bytes: bool = False, shared: bool = False
    ) -> None:
        """Takes over an encoder on its device. `in_bytes`: layers multiply in 8 bits. An encoder that ranks have
        `shared` stays as it is: they call all methods together."""
        self.width, self.pooling = encoder.shape.hidden, pooling
        self.device = next(encoder.parameters()).device
        self._cut_texts = SentenceCutter(vocabulary).cut_texts
        self._together = PIECES_OF_GPU if self.device.type == "cuda" else PIECES
        sees_one = pooling.how != "mean"
        self._encode = encoder.encode if shared else serve_encoder(encoder, sees_one, in_bytes).encode

    @classmethod
    def open(
        cls, model: StoredModel, device: torch.device, dtype: torch.dtype = torch.float32, in_bytes: bool = False
    ) -> Embedder:
        """Reads the weights of a stored model, which pools as its folder says, or by the mean."""
        encoder = build_encoder(model.shape)
        encoder.load_state_dict({name: model.encoder[name] for name in encoder.state_dict()})
        encoder = encoder.to(device, dtype).eval().requires_grad_(False)
        return cls(encoder, model.vocabulary, find_pooling(model), in_bytes)

    @torch.inference_mode()
    def compute(self, texts: Sequence[str]) -> Array:
        """Computes the vectors of texts, (texts, width) in fp32. Longer texts keep their beginning."""
        cut, vectors = self._cut_texts(texts), np.empty((len(texts), self.width), np.float32)
        lengths = np.minimum(cut.lengths, self.pooling.length)
        order = np.argsort(lengths, kind="stable")
        ends = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // self._together)) + 1
        for part in np.split(order, ends) if len(order) else []:
            rows = cut.take(part).rows().shorten(self.pooling.length)
            batch = pack(rows, rows.pieces, rows.positions, rows.labels).to(self.device)
            vectors[part] = self.pooling.compute(self._encode, batch).cpu().numpy()
        return vectors


def find_pooling(model: StoredModel) -> Pooling:
    """Finds how a model makes the vector of a text: as its files for sentence-transformers say, or by the mean."""
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
    length = min(limit for limit in limits if limit)
    return replace(read_pooling(folder), length=length, by_dot=compared == "dot")
