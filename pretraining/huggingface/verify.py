"""Reads an exported folder back, by us and by transformers, and compares what both compute."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.huggingface.folders import read_folder
from pretraining.huggingface.weights import architecture
from pretraining.model.batch import PretrainingBatch
from pretraining.model.bert import Bert, Logits
from pretraining.model.shape import Shape

TOLERANCE, RELATIVE = 1e-4, 1e-5
"""How far logits may be apart, and how much more by the size of the largest: sums in another order differ by that."""
PREDICTIONS = 16
"""Positions of a test sequence whose logits are compared."""


def verify_export(folder: Path, shape: Shape, state: Mapping[str, Tensor]) -> list[tuple[str, float]]:
    """Reads a written folder back into fresh models and compares their logits with those of its source.

    Returns who read it with the largest difference found; raises UserError if one is larger than it may be.
    """
    batch = probe(shape)
    wanted = _our_logits(shape, state, batch)
    read_shape, read_state, missing = read_folder(folder)
    if read_shape != shape or missing:
        raise UserError(f"{folder}: not exported: {read_shape} was read back, without {missing}; wanted {shape}")
    results = [("Cloze", _difference(folder, "Cloze", wanted, _our_logits(read_shape, read_state, batch)))]
    theirs = _their_logits(folder, shape, batch)
    if theirs is not None:
        results.append(("transformers", _difference(folder, "transformers", wanted, theirs)))
    return results


def probe(shape: Shape) -> PretrainingBatch:
    """Makes a few sequences of random pieces, always the same: one as long as the model takes, and shorter ones."""
    draw = np.random.default_rng(0)
    lengths = [shape.positions, max(shape.positions // 3, 1), min(shape.positions, 7)]
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    halves = np.repeat(lengths, lengths) // 2
    segments = (positions >= halves) * min(1, shape.segments - 1)
    chosen = [
        start + np.unique(np.linspace(0, length - 1, PREDICTIONS).astype(int))
        for start, length in zip(starts, lengths, strict=False)
    ]
    where = np.concatenate(chosen)
    return PretrainingBatch(
        pieces=torch.from_numpy(draw.integers(0, shape.vocabulary, starts[-1])),
        segments=torch.from_numpy(segments.astype(np.int64)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts.astype(np.int32)),
        chosen=torch.from_numpy(where),
        labels=torch.from_numpy(draw.integers(0, shape.vocabulary, len(where))),
        random_next=torch.zeros(len(lengths), dtype=torch.int64),
        lengths=tuple(lengths),
        examples=np.zeros((len(lengths), 2), np.int64),
    )


@torch.inference_mode()
def _our_logits(shape: Shape, state: Mapping[str, Tensor], batch: PretrainingBatch) -> Logits:
    with torch.random.fork_rng(devices=[]):  # a trainer that goes on draws as if nothing had been
        model = Bert(shape)
    model.load_state_dict(state)
    model.eval()
    return model.heads(model.encode(batch), batch)


@torch.inference_mode()
def _their_logits(folder: Path, shape: Shape, batch: PretrainingBatch) -> Logits | None:
    """Computes logits by transformers itself, sequence by sequence; None where it is not installed."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return None
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = getattr(transformers, architecture(shape)).from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # whatever it finds wrong
        raise UserError(f"{folder}: not exported: transformers cannot load it: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if faults := {name: found for name, found in report.items() if found}:
        raise UserError(f"{folder}: not exported: transformers reports {faults}")
    model.eval()
    masked, next_sentence = [], []
    starts = batch.starts.tolist()
    for start, end in pairwise(starts):
        pieces, segments = batch.pieces[None, start:end], batch.segments[None, start:end]
        output = model(input_ids=pieces, token_type_ids=segments, attention_mask=torch.ones_like(pieces))
        chosen = batch.chosen[(batch.chosen >= start) & (batch.chosen < end)] - start
        masked.append(output[0][0, chosen])
        next_sentence += output[1:]  # nothing where the model has no such head
    return Logits(torch.cat(masked), torch.cat(next_sentence) if next_sentence else None)


def _difference(folder: Path, reader: str, wanted: Logits, found: Logits) -> float:
    """Measures the largest difference of two models' logits; UserError if rounding does not explain it."""
    largest = 0.0
    for name, ours, theirs in zip(("masked", "next-sentence"), wanted, found, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, "the architecture that was written says which heads are read"
            continue
        allowed = TOLERANCE + RELATIVE * float(ours.abs().max())
        difference = float((ours - theirs).abs().max())
        if not difference <= allowed:  # so that NaN is refused
            raise UserError(
                f"{folder}: not exported: {name} logits read back by {reader} differ from the source's by "
                f"{difference:.3g}, more than {allowed:.3g}; an earlier export is left as it was"
            )
        largest = max(largest, difference)
    return largest
