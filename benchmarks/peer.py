"""Functions for the peers of all contests: pad their inputs, find missing packages, and silence their messages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data_prep.common.arrays import Array
from pretraining.model.batch import PretrainingBatch


def find_missing_packages(*packages: str) -> list[str]:
    """Returns the packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def silence_transformers() -> None:
    """Silences progress bars, warnings and advice of transformers and its dependencies."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module="transformers|torch|onnx")
    theirs: Any = import_module("transformers.utils.logging")
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()


def pad_inputs(sequences: Sequence[Array], width: int = 0) -> dict[str, Array]:
    """Pads sequences of pieces to inputs of transformers, with their attention mask; to `width` if it is given."""
    lengths = np.array([len(pieces) for pieces in sequences])
    ids = np.zeros((len(sequences), width or lengths.max()), np.int64)
    for row, pieces in zip(ids, sequences, strict=True):
        row[: len(pieces)] = pieces
    return {"input_ids": ids, "attention_mask": (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)}


def pad_batch(batch: PretrainingBatch) -> dict[str, torch.Tensor]:
    """Converts a batch to inputs of transformers, padded to its longest sequence."""
    labels = torch.full_like(batch.pieces, -100)
    labels[batch.chosen] = batch.labels

    def pad(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
        return pad_sequence([*torch.split(values, list(batch.lengths))], batch_first=True, padding_value=filler)

    names = {"input_ids": batch.pieces, "token_type_ids": batch.segments, "attention_mask": torch.ones_like(labels)}
    inputs = {name: pad(values) for name, values in names.items()}
    return {**inputs, "labels": pad(labels, filler=-100), "next_sentence_label": batch.random_next}
