"""A checkpoint as a folder of transformers, checked before it is called exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import TOKENIZER, find_checkpoint
from pretraining.huggingface.folders import CONFIG, read_folder, read_vocabulary, write_folder
from pretraining.huggingface.model_card import Provenance, model_card
from pretraining.huggingface.verify import verify_export
from pretraining.model.shape import Shape
from pretraining.training.state import RunRecord


@dataclass(frozen=True)
class Exported:
    """What came of an export."""

    folder: Path
    parameters: int
    difference: float
    """the largest between logits of the source and of what was written"""
    readers: tuple[str, ...]
    """who read it back"""

    def __str__(self) -> str:
        readers = " and ".join(self.readers)
        return f"{self.folder}: exported {self.parameters:,} parameters; logits read back by {readers} agree " + (
            f"to {self.difference:.1g}" if self.difference else "exactly"
        )


@dataclass(frozen=True)
class Source:
    """A model to export, and what is known of its making."""

    shape: Shape
    weights: Mapping[str, Tensor]
    vocabulary: Path
    """folder with the vocabulary that belongs to it"""
    vocabulary_sha256: str | None = None
    provenance: Provenance | None = None
    """how the weights came to be, where that is known"""


def export(
    source: Path,
    out: Path,
    checkpoint: str | None = None,
    vocabulary: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Exported:
    """Writes a run's checkpoint, the last one by default, as a folder of transformers; one process does it."""
    model = read_source(source, checkpoint)
    vocabulary = vocabulary or model.vocabulary
    if model.vocabulary_sha256 not in (None, read_vocabulary(vocabulary).sha256):
        raise UserError(
            f"{vocabulary}: not the vocabulary that the model was trained with; name its folder: --vocabulary"
        )
    written = {name: weight.to("cpu", dtype).float() for name, weight in model.weights.items()}  # as they will be read
    results: list[tuple[str, float]] = []
    write_folder(
        out,
        model.shape,
        model.weights,
        vocabulary,
        model_card(model.shape, model.provenance),
        dtype,
        check=lambda folder: results.extend(verify_export(folder, model.shape, written)),
    )
    readers, differences = zip(*results, strict=True)
    return Exported(out, model.shape.num_parameters(), max(differences), readers)


def read_source(source: Path, checkpoint: str | None) -> Source:
    """Reads a model from a run or from a folder of transformers."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder")
    if not (source / CONFIG).exists():
        return _read_run(source, checkpoint)
    if checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: {source} is a folder of transformers, which has no checkpoints")
    shape, weights, missing = read_folder(source)
    if missing:
        heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in missing))
        raise UserError(f"{source}: lacks {heads}; only a model with both heads can be exported")
    return Source(shape, weights, source)


def _read_run(source: Path, checkpoint: str | None) -> Source:
    folder = find_checkpoint(source, checkpoint)
    record, weights = load_checkpoint(folder)
    run = RunRecord.of(record)
    metrics = {} if run.scores is None else run.scores.figures()
    provenance = Provenance(run.data, run.recipe, metrics, run.state.step, run.base)
    return Source(record.shape, weights, folder.parent.parent / TOKENIZER, run.data.vocabulary, provenance)
