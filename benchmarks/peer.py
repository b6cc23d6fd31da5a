"""Functions for the peers of all contests: pad their inputs, find missing packages, and silence their messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from pretraining.model.batch import PretrainingBatch


def find_missing_packages(*packages: str) -> list[str]:
    """Returns the packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def require_packages(*packages: str) -> None:
    """Raises UserError if a package of a peer is not installed."""
    if absent := find_missing_packages(*packages):
        raise UserError(f"not installed: {', '.join(absent)}; nothing is compared with it")


def silence_transformers() -> None:
    """Silences progress bars, warnings and advice of transformers and its dependencies."""
    logging.disable(logging.WARNING)
    theirs: Any = import_module("transformers.utils.logging")
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()


def pad_rows(rows: Sequence[Array], width: int = 0, filler: int = 0) -> Array:
    """Pads rows of different lengths to a table, of the longest row's width unless `width` is given."""
    table = np.full((len(rows), width or max(map(len, rows))), filler, np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


def pad_inputs(sequences: Sequence[Array], width: int = 0) -> dict[str, Array]:
    """Pads sequences of pieces to inputs of transformers, with their attention mask."""
    ids = pad_rows(sequences, width)
    lengths = np.array([len(pieces) for pieces in sequences])
    return {"input_ids": ids, "attention_mask": (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)}


def pad_batch(batch: PretrainingBatch) -> dict[str, torch.Tensor]:
    """Converts a batch to inputs of transformers, padded to its longest sequence."""
    flat = torch.full_like(batch.pieces, -100)
    flat[batch.chosen] = batch.labels

    def rows(values: torch.Tensor) -> list[Array]:
        return [values[start:end].numpy() for start, end in pairwise(batch.starts.tolist())]

    inputs = pad_inputs(rows(batch.pieces))
    inputs |= {"token_type_ids": pad_rows(rows(batch.segments)), "labels": pad_rows(rows(flat), filler=-100)}
    tensors = {name: torch.from_numpy(table) for name, table in inputs.items()}
    return {**tensors, "next_sentence_label": batch.random_next}
