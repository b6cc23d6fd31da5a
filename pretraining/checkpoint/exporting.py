"""A checkpoint as a folder of transformers, checked before it is called exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.huggingface.folders import CONFIG, read_folder, read_vocabulary, write_folder
from pretraining.huggingface.model_card import (
    model_card,
)
from pretraining.huggingface.verify import (
    verify_export,
)
from pretraining.model.shape import Shape


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


def export(
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    vocabulary: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Exported:
    """Writes a run's checkpoint, the last one by default, as a folder of transformers; one process does it."""
    shape, state, metadata = _read_source(run, checkpoint)
    if vocabulary is None and "vocabulary" not in metadata:
        raise UserError(f"{run}: does not say where its vocabulary is; name the folder of its shards: --vocabulary")
    vocabulary = vocabulary or Path(metadata["vocabulary"])
    _check_vocabulary(vocabulary, metadata)
    written = {name: weight.to("cpu", dtype).float() for name, weight in state.items()}  # as they will be read
    results: list[tuple[str, float]] = []
    card = model_card(shape, metadata)
    write_folder(
        out,
        shape,
        state,
        vocabulary,
        card,
        dtype,
        check=lambda folder: results.extend(verify_export(folder, shape, written)),
    )
    readers, differences = zip(*results, strict=True)
    return Exported(out, shape.num_parameters(), max(differences), readers)


def _read_source(run: Path, checkpoint: str | None) -> tuple[Shape, dict[str, Tensor], dict[str, Any]]:
    """Sizes and weights, and what is known of their making: see model_card; "vocabulary" names a folder with one."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    if not (run / CONFIG).exists():
        from pretraining.checkpoint.reading import load_weights

        found: tuple[Shape, dict[str, Tensor], dict[str, Any]] = load_weights(run, checkpoint)
        return found
    if checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: {run} is a folder of transformers, which has no checkpoints")
    shape, state, missing = read_folder(run)
    if missing:
        heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in missing))
        raise UserError(f"{run}: lacks {heads}; only a model with both heads can be exported")
    return shape, state, {"vocabulary": str(run)}


def _check_vocabulary(folder: Path, metadata: Mapping[str, Any]) -> None:
    """UserError unless it is the one that the model was trained with, where that is known."""
    expected = metadata.get("data", {}).get("vocabulary")
    if read_vocabulary(folder).sha256 != expected and expected is not None:
        raise UserError(f"{folder}: not the vocabulary that the model was trained with; name its folder: --vocabulary")
