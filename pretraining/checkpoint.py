"""Checkpoints of a run: all that is needed to go on, and the weights by themselves for export.

    RUN/checkpoints/step-00001000/
      checkpoint.json        where the run stands, its recipe, its data, its latest scores; written last
      weights.safetensors    the fp32 weights in full, whatever the ZeRO stage
      state/                 DeepSpeed's: what each rank holds of optimizer and weights

A checkpoint is made beside its place and takes its name when it is complete; older ones go only then.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.errors import DamageError, UserError
from data_prep.files import read_json, write_json
from pretraining.engine import Engine, quiet
from pretraining.shape import Shape

FOLDER = "checkpoints"
RECORD, WEIGHTS, STATE = "checkpoint.json", "weights.safetensors", "state"
TOKENIZER = "tokenizer"
"""folder of a run with the vocabulary"""
UNFINISHED = ".tmp"
NAME = re.compile(r"step-\d{8}")


@dataclass
class Progress:
    """Where a run stands."""

    phase: int = 0
    """counted from 0"""
    phase_step: int = 0
    """steps done of this phase"""
    phase_seconds: float = 0.0
    """of training in this phase"""
    step: int = 0
    """steps done in all phases"""


def save(run: Path, engine: Engine, progress: Progress, record: dict[str, Any], keep: int) -> Path:
    """Saves a checkpoint; all ranks call it together. Only the newest `keep` stay."""
    folder = run / FOLDER / f"step-{progress.step:08}"
    unfinished = folder.with_name(folder.name + UNFINISHED)
    main = dist.get_rank() == 0
    if main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    weights = {name: weight for name, weight in engine.weights() if main}
    with quiet():
        engine.deepspeed.save_checkpoint(str(unfinished), tag=STATE, save_latest=False)
    if main:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, unfinished / WEIGHTS)
        write_json(unfinished / RECORD, {**record, "progress": asdict(progress), "ranks": dist.get_world_size()})
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        for old in finished(run)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return folder


def finished(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    folders = (run / FOLDER).glob("step-*")
    return sorted(path for path in folders if NAME.fullmatch(path.name) and (path / RECORD).exists())


def read_record(checkpoint: Path) -> dict[str, Any]:
    """What checkpoint.json says."""
    record: dict[str, Any] = read_json(checkpoint / RECORD)
    if not isinstance(record, dict) or "progress" not in record:
        raise DamageError(f"{checkpoint / RECORD}: not the record of a checkpoint")
    return record


def restore(checkpoint: Path, engine: Engine) -> Progress:
    """Puts an engine where the checkpoint was made."""
    record = read_record(checkpoint)
    if record["ranks"] != dist.get_world_size():
        raise UserError(
            f"{checkpoint}: was made by {record['ranks']} ranks, and these are {dist.get_world_size()}; "
            f"start {record['ranks']}, or begin a new run with its weights: --init {checkpoint}"
        )
    with quiet():
        loaded, _ = engine.deepspeed.load_checkpoint(str(checkpoint), tag=STATE)
    if loaded is None:
        raise DamageError(f"{checkpoint / STATE}: cannot be read")
    return Progress(**record["progress"])


def find_checkpoint(run: Path, name: str | None = None) -> Path:
    """A checkpoint of a run by its name, by default the last."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    if (run / RECORD).exists():
        return run  # a checkpoint's own folder was named
    there = finished(run)
    if not there:
        raise UserError(f"{run}: has no finished checkpoint")
    if name is None:
        return there[-1]
    for path in there:
        if path.name == name:
            return path
    raise UserError(f"{run}: no checkpoint {name}; there are {', '.join(path.name for path in there)}")


def load_weights(run: Path, name: str | None = None) -> tuple[Shape, dict[str, Tensor], dict[str, Any]]:
    """The shape, the fp32 weights and the record of a run's checkpoint."""
    checkpoint = find_checkpoint(run, name)
    record = read_record(checkpoint)
    try:
        weights = load_file(checkpoint / WEIGHTS)
    except Exception as error:  # safetensors has errors of its own
        raise DamageError(f"{checkpoint / WEIGHTS}: cannot be read: {error}") from error
    vocabulary = checkpoint.parent.parent / TOKENIZER
    return Shape(**record["shape"]), weights, {**record, "vocabulary": str(vocabulary)}
