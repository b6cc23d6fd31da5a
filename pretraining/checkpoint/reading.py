"""Checkpoints of a run: all that is needed to go on, on any number of ranks and under any ZeRO stage.

    RUN/checkpoints/step-00001000/
      checkpoint.json                        where the run stands, its recipe, its data, its latest scores, and the
                                             checksums of the files beside it and of itself; written last
      weight-00000-of-00002.safetensors      what each rank held of the fp32 weights
      exp_avg-00000-of-00002.safetensors     and of the optimizer's two averages
      exp_avg_sq-00000-of-00002.safetensors

Each tensor in a file is a stretch of a parameter, called NAME:START. So a checkpoint does not know how many ranks will
read it: each takes the stretches that its own share needs. Nothing in it is executed when it is read.

`saving.py` writes them.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, json_bytes, read_json
from pretraining.engine.engine import Engine
from pretraining.engine.partition import Part
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape
from pretraining.processes.group import SharedError, gather

FOLDER = "checkpoints"
RECORD = "checkpoint.json"
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
SEAL = "sha256"
"""of the rest of checkpoint.json, in it"""
DAMAGED = "DAMAGED"
"""a file in a checkpoint that was found so, with the reason"""
REPLACED = ".old"
"""what a checkpoint's name ends with while another takes its place"""
TOKENIZER = "tokenizer"
"""folder of a run with the vocabulary"""
NAME = re.compile(r"step-(\d{8,})")


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


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    found = NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else -1


def with_names(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest last; each was complete when it got its name."""
    return sorted((path for path in (run / FOLDER).glob("step-*") if step_of(path) >= 0), key=step_of)


def finished(run: Path) -> list[Path]:
    """Those that are complete and were not found damaged."""
    return [path for path in with_names(run) if is_finished(path)]


def is_finished(checkpoint: Path) -> bool:
    return (checkpoint / RECORD).exists() and not (checkpoint / DAMAGED).exists()


def read_record(checkpoint: Path) -> dict[str, Any]:
    """What checkpoint.json says."""
    try:
        record: dict[str, Any] = read_json(checkpoint / RECORD)
    except FileNotFoundError:
        raise DamageError(f"{checkpoint / RECORD}: missing") from None
    if not isinstance(record, dict) or not {"progress", "files"} <= record.keys():
        raise DamageError(f"{checkpoint / RECORD}: not the record of a checkpoint")
    if record.pop(SEAL, None) != seal(record):
        raise DamageError(f"{checkpoint / RECORD}: its SHA-256 is not the one in it: it changed after it was written")
    return record


def seal(record: dict[str, Any]) -> str:
    """The checksum of a record."""
    return hashlib.sha256(json_bytes(record)).hexdigest()


def put_back(run: Path) -> None:
    """Gives its name again to a checkpoint that was about to be replaced when the run was killed."""
    for old in (run / FOLDER).glob(f"step-*{REPLACED}"):
        if not old.with_suffix("").exists():
            with suppress(OSError):
                old.rename(old.with_suffix(""))


def newest_whole(run: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are what they were when they were written. All ranks call it together.

    Those that are not are named, marked and left where they are. None where there is no checkpoint; where all are
    damaged, an error: a run that begins anew is not what the user expects.
    """
    if dist.get_rank() == 0:
        put_back(run)
    there: list[tuple[Path, bool]] = gather([(path, (path / DAMAGED).exists()) for path in with_names(run)])[0]
    for checkpoint in (path for path, damaged in reversed(there) if not damaged):
        faults = {fault for fault in gather(find_fault(checkpoint, dist.get_rank(), dist.get_world_size())) if fault}
        if not faults:
            return checkpoint
        if dist.get_rank() == 0:
            reason = "\n".join(sorted(faults))
            warn(f"{reason}\n{checkpoint} is left as it is, and the checkpoint before it is taken")
            with suppress(OSError):  # then it is found damaged again next time
                (checkpoint / DAMAGED).write_text(f"{reason}\nRemove this file if the checkpoint was repaired.\n")
    if there:
        raise SharedError(
            f"{run / FOLDER}: every checkpoint is damaged: {', '.join(path.name for path, _ in there)}\n"
            f"repair one and remove the file {DAMAGED} from it, or begin anew in another --run folder"
        )
    return None


def find_fault(checkpoint: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint; each rank checks its part of the files."""
    try:
        for record in read_record(checkpoint)["files"][rank::ranks]:
            FileRecord(**record).check(checkpoint)
    except (DamageError, TypeError) as error:
        return str(error)
    except OSError as error:
        return f"{checkpoint}: cannot be read: {error.strerror}"
    return None


class Stored:
    """The tensors of one kind in a checkpoint, whichever ranks wrote them."""

    def __init__(self, checkpoint: Path, kind: str):
        self._stretches: dict[str, list[tuple[int, int, Any, str]]] = defaultdict(list)
        names = [record["path"] for record in read_record(checkpoint)["files"]]
        for path in (checkpoint / name for name in names if name.startswith(f"{kind}-")):
            try:
                file: Any = safe_open(path, "pt")
                for key in file.keys():  # noqa: SIM118
                    name, _, start = key.rpartition(":")
                    length = file.get_slice(key).get_shape()[0]
                    self._stretches[name].append((int(start), length, file, key))
            except (OSError, SafetensorError, ValueError) as error:
                raise DamageError(f"{path}: cannot be read: {error}") from error
        self._where = checkpoint

    def read(self, name: str, into: Tensor, start: int = 0) -> None:
        """Copies elements of a parameter, from `start` on, into a flat tensor."""
        end, missing = start + into.numel(), into.numel()
        for first, length, file, key in self._stretches[name]:
            begin, stop = max(start, first), min(end, first + length)
            if begin < stop:
                into[begin - start : stop - start].copy_(file.get_slice(key)[begin - first : stop - first])
                missing -= stop - begin
        if missing:
            raise DamageError(f"{self._where}: {missing:,} elements of {name} are not in it")


@torch.no_grad()
def restore(checkpoint: Path, engine: Engine) -> Progress:
    """Puts an engine where the checkpoint was made; the model has had its weights since before the engine was."""
    record = read_record(checkpoint)
    for kind in MOMENTS:
        stored = Stored(checkpoint, kind)
        for share in engine.flat_tensors:
            state = engine.optimizer.state_of(share.tensor)
            state["step"].fill_(record["optimizer_steps"])
            for part in share.parts:
                stored.read(part.name, share.of(part, state[kind]), part.start)
    engine.loss_scaler = record["loss_scaler"]
    return Progress(**record["progress"])


def snapshot(engine: Engine, kind: str) -> dict[str, Tensor]:
    """Copies of what this rank writes of one kind, in the host's memory."""
    found = {}
    for share in engine.flat_tensors:
        flat = share.tensor if kind == WEIGHT else engine.optimizer.state_of(share.tensor)[kind]
        for part in share.parts if share.group is not None else _divided(share.parts):
            values = share.of(part, flat.detach())
            found[f"{part.name}:{part.start}"] = values.clone() if values.device.type == "cpu" else values.cpu()
    return found


def _divided(parts: tuple[Part, ...]) -> Iterator[Part]:
    """Where every rank holds everything, each writes its share of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for part in parts:
        first, end = (part.length * each // ranks for each in (rank, rank + 1))
        if first < end:
            yield Part(part.name, part.start + first, end - first, part.offset + first)


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
    if fault := find_fault(checkpoint):
        raise DamageError(fault)
    record = read_record(checkpoint)
    shape = Shape(**record["shape"])
    vocabulary = checkpoint.parent.parent / TOKENIZER
    return shape, read_weights(checkpoint, shape), {**record, "vocabulary": str(vocabulary)}


def read_weights(checkpoint: Path, shape: Shape) -> dict[str, Tensor]:
    """The fp32 weights in full."""
    with torch.device("meta"):
        wanted = {name: parameter.shape for name, parameter in Bert(shape).named_parameters()}
    stored = Stored(checkpoint, WEIGHT)
    weights = {}
    for name, size in wanted.items():
        weights[name] = torch.empty(size)
        stored.read(name, weights[name].view(-1))
    return weights
