"""Reads an exported folder back, by our code and by transformers, and compares the logits."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Special
from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import TaskHead
from pretraining.huggingface.folders import read_fine_tuned, read_folder
from pretraining.huggingface.weights import is_theirs, name_class
from pretraining.model.batch import Batch, PretrainingBatch, pack
from pretraining.model.rows import Rows
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Objective, build_model, find_objective

TOLERANCE, SMALL = 2e-5, 5.0
"""Tolerance of logits as a share of the largest, for sums in another order; above SMALL it grows with the logits.
Measured in fp32 with random weights of growing size, as a share of the largest logit: at most 7e-6 with logits up to
10, 7e-5 up to 26, and 3e-4 up to 500, with saturated attention."""
PREDICTIONS = 16
"""Number of positions of a test sequence whose logits are compared."""
POOLER = "add_pooling_layer"
"""The argument of those classes of transformers that have a pooler."""
LogitsOf = Callable[[Shape, TaskHead, Mapping[str, Tensor], Batch], Tensor]
"""Computes the logits of a fine-tuned model from its weights: a row for every sequence, or for every piece if the head
reads pieces."""


def verify_export(folder: Path, shape: Shape, wanted: Mapping[str, Tensor], special: Special) -> dict[str, float]:
    """Reads a folder back into new models, one after another, and compares their logits of the probe with those of its
    source.

    Returns the largest difference for each reader; raises UserError if one exceeds the tolerance.
    """
    batch, objective = make_probe(shape, special), find_objective(shape)
    found = {"Cloze": _read_logits(folder, shape, special)}
    if is_theirs(shape) and (model := _load_theirs(folder, name_class(shape))) is not None:
        found["transformers"] = _compute_their_logits(model, objective, batch)
    return {reader: _compare_logits(folder, reader, wanted, logits) for reader, logits in found.items()}


def verify_fine_tuned(
    folder: Path, shape: Shape, head: TaskHead, state: Mapping[str, Tensor], logits_of: LogitsOf, special: Special
) -> dict[str, float]:
    """Reads a fine-tuned model back, by our code and by transformers, and compares its logits of the probe with those
    of its source. Returns the largest difference for each reader; raises UserError if one exceeds the tolerance."""
    batch, shape = make_probe(shape, special), shape.encoder
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):  # leaves the random state of a trainer alone
        own = {name: value.cpu().float() for name, value in state.items()}
        wanted = {head.kind: logits_of(shape, head, own, batch)}
        read_shape, read_head, read_state = read_fine_tuned(folder)
        if (read_shape, read_head) != (shape, head):
            raise UserError(f"{folder}: not exported: {read_shape}, {read_head} were read back; wanted {shape}, {head}")
        found = {"Cloze": {head.kind: logits_of(read_shape, read_head, read_state, batch)}}
        if is_theirs(shape, head) and (model := _load_theirs(folder, name_class(shape, head))) is not None:
            found["transformers"] = {head.kind: _compute_their_task_logits(model, head, batch)}
    return {reader: _compare_logits(folder, reader, wanted, logits) for reader, logits in found.items()}


def make_probe(shape: Shape, special: Special) -> PretrainingBatch:
    """Makes a fixed batch of random pieces: one sequence of the maximum length, which begins with every special piece,
    and shorter ones. It avoids the piece that transformers takes for padding wherever it is."""
    draw = np.random.default_rng(0)
    lengths = np.array([shape.positions, max(shape.positions // 3, 1), min(shape.positions, 7)])
    positions = [np.unique(np.linspace(0, length - 1, PREDICTIONS).astype(int)) for length in lengths]
    predictions = np.array([len(places) for places in positions])
    pieces, labels = (draw.integers(0, shape.vocabulary, count) for count in (lengths.sum(), predictions.sum()))
    pieces[: lengths[0]][: len(special)] = special[: lengths[0]]
    padding = find_architecture(shape.architecture).find_padding(shape)
    pieces = np.where(pieces == padding, (pieces + 1) % shape.vocabulary, pieces)
    boundaries = lengths // 2 if shape.segments > 1 else lengths
    rows = Rows.from_memory(lengths, pieces, boundaries, predictions, np.concatenate(positions), labels)
    return pack(rows, rows.pieces, rows.masked, rows.labels)


def _read_logits(folder: Path, shape: Shape, special: Special) -> dict[str, Tensor]:
    """Reads a folder, which must have this shape, and computes our logits."""
    read_shape, state, missing = read_folder(folder)
    learns = shape.learns
    read_shape = read_shape.change_learning(objective=learns.objective, settings=learns.settings)  # not in a folder
    if read_shape != shape or missing:
        raise UserError(f"{folder}: not exported: {read_shape} was read back, without {missing}; wanted {shape}")
    return compute_probe(shape, state, special)


@torch.inference_mode()
def compute_probe(shape: Shape, state: Mapping[str, Tensor], special: Special) -> dict[str, Tensor]:
    """Computes our logits of the exported heads for the probe, with these weights and no copy of them."""
    batch = make_probe(shape, special)
    with torch.device("meta"):
        model = build_model(shape)
    model.load_state_dict(model.state_dict() | dict(state), assign=True)
    model.eval()
    return find_objective(shape).logits(model, model.states_for_heads(batch), batch)


def _load_theirs(folder: Path, kind: str) -> Any:
    """Loads a folder into a class of transformers, which must find every weight; None without transformers. A class
    without a head has no pooler here."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = getattr(transformers, kind)
        bare = {POOLER: False} if POOLER in inspect.signature(theirs).parameters else {}
        model, report = theirs.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **bare
        )
    except Exception as error:  # any fault that it finds
        raise UserError(f"{folder}: not exported: transformers cannot load it: {error}") from error
    if faults := {name: found for name, found in report.items() if found}:
        raise UserError(f"{folder}: not exported: transformers reports {faults}")
    return model.eval()


def _split_sequences(batch: Batch) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Yields begin, end and inputs for transformers of every sequence."""
    for start, end in pairwise(batch.starts.tolist()):
        pieces, segments = batch.pieces[None, start:end], batch.segments[None, start:end]
        given = {"input_ids": pieces, "attention_mask": torch.ones_like(pieces)}
        given |= {"token_type_ids": segments} if segments.any() else {}
        yield start, end, given


@torch.inference_mode()
def _compute_their_logits(model: Any, objective: Objective, batch: PretrainingBatch) -> dict[str, Tensor]:
    """Computes the logits of pre-training by transformers, sequence by sequence."""
    found = []
    for start, end, given in _split_sequences(batch):
        chosen = batch.chosen[(batch.chosen >= start) & (batch.chosen < end)] - start
        found.append(objective.pick_their_logits(model(**given), chosen))
    return {name: torch.cat([logits[name] for logits in found]) for name in found[0]}


def _compute_their_task_logits(model: Any, head: TaskHead, batch: Batch) -> Tensor:
    """Computes the logits of a task by transformers: a row for every sequence, or for every piece."""
    rows = []
    for _, _, given in _split_sequences(batch):
        if head.kind == "choice":
            given = {name: value[None] for name, value in given.items()}  # one text to choose from
        output = model(**given)
        if head.kind == "spans":
            rows.append(torch.stack([output.start_logits[0], output.end_logits[0]], dim=1))
        elif head.kind == "embeddings":
            rows.append(output.last_hidden_state[0])
        else:
            rows.append(output.logits[0] if head.kind == "tags" else output.logits)
    return torch.cat(rows)


def _compare_logits(folder: Path, reader: str, wanted: Mapping[Any, Tensor], found: Mapping[Any, Tensor]) -> float:
    """Measures the largest difference of two models' logits, by their heads; raises UserError if one exceeds the
    tolerance."""
    assert found.keys() == wanted.keys(), "the architecture that was written says which heads are read"
    largest = 0.0
    for called, logits in wanted.items():
        assert logits.shape == found[called].shape, f"{called} logits of {logits.shape} and {found[called].shape}"
        size = float(logits.abs().max())
        allowed = TOLERANCE * size * max(1.0, size / SMALL)
        difference = float((logits - found[called]).abs().max())
        if not difference <= allowed:  # so that NaN is refused
            raise UserError(
                f"{folder}: not exported: {called} logits read back by {reader} differ from the source's by "
                f"{difference:.3g}, more than {allowed:.3g}; an earlier export is left as it was"
            )
        largest = max(largest, difference)
    return largest
