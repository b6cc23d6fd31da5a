"""The vector of a text: how it is made of the hidden states of its pieces, and how sentence-transformers says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.common.files import read_json, read_table, write_json
from pretraining.model.batch import Batch

MODULES, POOLING, NORMALIZE = "modules.json", "1_Pooling", "2_Normalize"
CONFIG, LENGTH = "config.json", "sentence_bert_config.json"
VECTOR_FILES = (MODULES, POOLING, NORMALIZE, LENGTH)
PoolingName = Literal["mean", "cls", "last"]
OLDER = "pooling_mode_"
THEIRS: dict[str, PoolingName] = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
"""Poolings by the ends of their keys in sentence-transformers; its newer files name them without _tokens."""


@dataclass(frozen=True)
class Pooling:
    """How the vector of a text is made of the hidden states of its pieces."""

    how: PoolingName = "mean"
    """the mean over all pieces, [CLS] alone, or the last piece alone"""
    normalizes: bool = False
    """whether vectors have the length 1"""
    length: int = sys.maxsize
    """the most pieces of a text that are read"""
    by_dot: bool = False
    """whether vectors are to be compared by their products, not by their cosine"""

    def compute(self, encode: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Computes the vectors (s, H), in fp32, of sequences by the `encode` of an encoder."""
        starts = batch.starts.long()
        if self.how == "mean":
            vectors = torch.segment_reduce(encode(batch).float(), "mean", offsets=starts)
        else:
            vectors = encode(batch, starts[:-1] if self.how == "cls" else starts[1:] - 1).float()
        return F.normalize(vectors, dim=1) if self.normalizes else vectors

    def write(self, folder: Path, hidden: int, length: int | None = None) -> None:
        """Writes the files by which sentence-transformers makes the same vectors; `length`: most pieces of a text."""
        kinds = {"": "Transformer", POOLING: "Pooling", **({NORMALIZE: "Normalize"} if self.normalizes else {})}
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(kinds.items())
        ]
        write_json(folder / MODULES, modules)
        if length is not None:
            write_json(folder / LENGTH, {"max_seq_length": length, "do_lower_case": False})
        flags = {OLDER + key: name == self.how for key, name in THEIRS.items()}
        write_json(folder / POOLING / CONFIG, {"word_embedding_dimension": hidden, **flags})


def read_pooling(folder: Path) -> Pooling:
    """Reads how sentence-transformers makes vectors with a folder: by the mean if the folder does not say. Raises
    UserError for ways that are not known here."""
    if not (folder / MODULES).is_file():
        return Pooling()
    modules = read_json(folder / MODULES)
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise UserError(f"{folder / MODULES}: makes vectors by {', '.join(kinds)}; known are Pooling and Normalize")
    path = folder / str(modules[1].get("path", POOLING)) / CONFIG
    config = read_table(path)
    older = [key.removeprefix(OLDER) for key, value in config.items() if key.startswith(OLDER) and value is True]
    newer = config.get("pooling_mode") or older
    modes, known = [newer] if isinstance(newer, str) else newer, {key.partition("_")[0]: THEIRS[key] for key in THEIRS}
    if len(modes) != 1 or modes[0] not in THEIRS | known:
        raise UserError(f"{path}: makes vectors by {', '.join(modes) or 'nothing'}; known are {', '.join(known)}")
    return Pooling((THEIRS | known)[modes[0]], len(kinds) == 3)
