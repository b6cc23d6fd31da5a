"""Checkpoints of a run: all that is needed to go on, and the weights by themselves for export.

    RUN/checkpoints/step-00001000/
      checkpoint.json        where the run stands, its recipe, its data, its latest scores; written last
      weights.safetensors    the fp32 weights in full, whatever the ZeRO stage
      state/                 DeepSpeed's: what each rank holds of optimizer and weights

A checkpoint is made beside its place and takes its name when it is complete; older ones go only then.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.errors import DamageError, UserError
from data_prep.files import read_json, write_json
from pretraining.engine import Engine, name_dtype, quiet
from pretraining.shape import Shape

FOLDER = "checkpoints"
RECORD, WEIGHTS, STATE = "checkpoint.json", "weights.safetensors", "state"
TOKENIZER = "tokenizer"
"""folder of a run with the vocabulary"""
UNFINISHED = ".tmp"
FULL = 1 << 16
"""bytes left where a disk counts as full"""
TORCH_WRITES = re.compile("PytorchStreamWriter|inline_container")
"""in the errors of torch.save, which have no type of their own"""
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
    with _as_user_error(unfinished):
        if main:
            for left in folder.parent.glob("*" + UNFINISHED):
                shutil.rmtree(left)
            unfinished.mkdir(parents=True)
        dist.barrier()
        weights = {name: weight for name, weight in engine.weights() if main}
        with quiet():
            engine.deepspeed.save_checkpoint(str(unfinished), tag=STATE, save_latest=False)
        if main:
            save_file({name: weight.contiguous() for name, weight in weights.items()}, unfinished / WEIGHTS)
            for script in unfinished.glob("*.py"):  # DeepSpeed's, to make a file such as `WEIGHTS`
                script.unlink()
            content = {**record, "progress": asdict(progress), "made_by": _makers(engine)}
            write_json(unfinished / RECORD, content)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
            for old in finished(run)[:-keep]:
                shutil.rmtree(old)
        dist.barrier()
    return folder


@contextmanager
def _as_user_error(folder: Path) -> Iterator[None]:
    """A full disk is told as what it is, and gets back what was written in vain."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not TORCH_WRITES.search(str(error)):
            raise  # another rank's end, for instance
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        reason = os.strerror(errno.ENOSPC) if full or _free(folder.parent) < FULL else str(error).splitlines()[0]
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{folder}: cannot be written: {reason}\n"
            "make room, or keep fewer checkpoints (--checkpoints.keep); the same command goes on from the last one"
        ) from error


def _free(folder: Path) -> int:
    """Bytes that can still be written there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return FULL


def _makers(engine: Engine) -> dict[str, Any]:
    """What must be the same where a checkpoint is continued."""
    return {
        "ranks": dist.get_world_size(),
        "parallel.zero": engine.zero,
        "precision.dtype": name_dtype(engine.dtype),
    }


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
    here, there = _makers(engine), record["made_by"]
    if here != there:
        differing = [name for name in here if here[name] != there.get(name)]
        shown = [", ".join(f"{name} {makers.get(name)}" for name in differing) for makers in (there, here)]
        raise UserError(
            f"{checkpoint}: was made with {shown[0]}, and this is {shown[1]}\n"
            f"go on with the same, or begin a new run with its weights: --init {checkpoint}"
        )
    try:
        with quiet():
            loaded, _ = engine.deepspeed.load_checkpoint(str(checkpoint), tag=STATE)
    except Exception as error:  # whatever torch.load finds wrong
        raise DamageError(
            f"{checkpoint / STATE}: cannot be read: {str(error).splitlines()[0]}\n"
            f"remove {checkpoint} to go on from the checkpoint before it"
        ) from error
    assert loaded is not None
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
