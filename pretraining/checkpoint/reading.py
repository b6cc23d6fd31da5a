"""Reads checkpoints on any number of ranks and under any ZeRO stage. `record.py` says what they consist of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data_prep.common.errors import DamageError
from pretraining.checkpoint.record import (
    DAMAGED,
    FOLDER,
    WEIGHT,
    CheckpointRecord,
    find_checkpoint,
    list_checkpoints,
    read_record,
)
from pretraining.checkpoint.state import Saved
from pretraining.engine.engine import Engine
from pretraining.huggingface.weights import check_finite
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.processes.errors import SharedError
from pretraining.processes.group import gather, host_group, place

REPLACED = ".old"
"""The end of a checkpoint's name while another takes its place."""


def find_newest_whole(run: Path, warn: Callable[[str], None]) -> Path | None:
    """Finds the newest checkpoint whose files are what they were when they were written. All ranks call it together.

    Damaged checkpoints are named, marked and left where they are. None where there is no checkpoint; where all are
    damaged, an error: a run that begins anew is not what the user expects.
    """
    rank, ranks = place()
    if rank == 0:
        restore_replaced(run)
    seen = [(str(path), (path / DAMAGED).exists()) for path in list_checkpoints(run)] if rank == 0 else []
    there: list[tuple[Path, bool]] = [(Path(path), damaged) for path, damaged in gather(seen)[0]]
    for checkpoint in (path for path, damaged in reversed(there) if not damaged):
        faults = {fault for fault in gather(find_fault(checkpoint, rank, ranks)) if fault}
        if not faults:
            return checkpoint
        if rank == 0:
            reason = "\n".join(sorted(faults))
            warn(f"{reason}\n{checkpoint} is left as it is, and the checkpoint before it is taken")
            with suppress(OSError):  # then it is found damaged again next time
                (checkpoint / DAMAGED).write_text(f"{reason}\nRemove this file if the checkpoint was repaired.\n")
    if there:
        raise SharedError(
            f"{run / FOLDER}: every checkpoint is damaged: {', '.join(path.name for path, _ in there)}\n"
            f"repair one and remove the file {DAMAGED} from it, or begin anew in another --out folder"
        )
    return None


def restore_replaced(run: Path) -> None:
    """Gives its name again to a checkpoint that was about to be replaced when the run was killed."""
    for old in (run / FOLDER).glob(f"step-*{REPLACED}"):
        if not old.with_suffix("").exists():
            with suppress(OSError):
                old.rename(old.with_suffix(""))


def require_whole_weights(checkpoint: Path) -> None:
    """Raises an error unless the weights are what they were when they were written, whatever became of the rest.

    Where ranks are connected, all of them call it together, and each checks its part.
    """
    gather(None, find_fault(checkpoint, *place(), f"{WEIGHT}-"))


def find_fault(checkpoint: Path, rank: int = 0, ranks: int = 1, beginning: str = "") -> str | None:
    """Says what is wrong with a checkpoint, or its files of this beginning; every rank checks its part of them."""
    try:
        files = [file for file in read_record(checkpoint).files if file.path.startswith(beginning)]
        for file in files[rank::ranks]:
            file.check(checkpoint)
    except DamageError as error:
        return str(error)
    except OSError as error:
        return f"{checkpoint}: cannot be read: {error.strerror}"
    return None


class StoredTensors:
    """The tensors of one kind in a checkpoint, such as the weights, whichever ranks wrote their slices.

    A file is opened when something is read that no open one has, those first whose place among all files is this rank's
    among all ranks: with as many ranks as wrote them, a rank opens no file but its own.
    """

    def __init__(self, checkpoint: Path, record: CheckpointRecord, kind: str):
        self._checkpoint = checkpoint
        self._slices: dict[str, list[StoredSlice]] = defaultdict(list)
        self._closed = _sort_by_distance(
            [checkpoint / file.path for file in record.files if file.path.startswith(kind + "-")]
        )

    def read(self, name: str, into: Tensor, start: int = 0) -> None:
        """Copies elements of a parameter, from `start` on, into a flat tensor."""
        missing = into.numel() - _copy(self._slices[name], into, start)
        while missing and self._closed:
            missing -= _copy(self._open(self._closed.pop())[name], into, start)
        if missing:
            raise DamageError(f"{self._checkpoint}: {missing:,} elements of {name} are not in it")

    def _open(self, path: Path) -> dict[str, list[StoredSlice]]:
        """Opens a file; what it has of each parameter."""
        found: dict[str, list[StoredSlice]] = defaultdict(list)
        try:
            file: Any = safe_open(path, "pt")
            for key in file.keys():  # noqa: SIM118
                name, _, start = key.rpartition(":")
                found[name].append(StoredSlice(int(start), file.get_slice(key).get_shape()[0], file, key))
        except (OSError, SafetensorError, ValueError) as error:
            raise DamageError(f"{path}: cannot be read: {error}") from error
        for name, slices in found.items():
            self._slices[name].extend(slices)
        return found


class StoredSlice(NamedTuple):
    """Elements of a parameter that lie in one file."""

    start: int
    length: int
    file: Any
    key: str


def _copy(slices: Iterable[StoredSlice], into: Tensor, start: int) -> int:
    """Copies what slices have of a parameter's elements from `start` on; returns how many that were."""
    copied, end = 0, start + into.numel()
    for first, length, file, key in slices:
        begin, stop = max(start, first), min(end, first + length)
        if begin < stop:
            into[begin - start : stop - start].copy_(file.get_slice(key)[begin - first : stop - first])
            copied += stop - begin
    return copied


def _sort_by_distance(paths: list[Path]) -> list[Path]:
    """Orders the files of all ranks of a checkpoint so that the one comes last that is most likely this rank's."""
    rank, ranks = place()
    own = (rank + 0.5) / ranks
    distance = {path: abs((number + 0.5) / len(paths) - own) for number, path in enumerate(paths)}
    return sorted(paths, key=distance.__getitem__, reverse=True)


def restore_model(checkpoint: Path, model: nn.Module) -> None:
    """Gives a model the weights of a checkpoint; what is no weight stays as it is. All ranks call it together."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict({**model.state_dict(), **read_weights_together(checkpoint, sizes)})


@torch.no_grad()
def restore_engine(checkpoint: Path, engine: Engine) -> CheckpointRecord:
    """Gives an engine the optimizer's state of a checkpoint; the model has had its weights since before the engine."""
    record = read_record(checkpoint)
    for kind in engine.optimizer.kind.state:
        stored = StoredTensors(checkpoint, record, kind)
        for flat in engine.flat_tensors:
            state = engine.optimizer.get_state(flat.tensor)
            state["step"].fill_(record.optimizer_steps)
            for part in flat.parts:
                stored.read(part.name, flat.view_part(part, state[kind]), part.start)
    engine.loss_scaler = record.loss_scaler
    return record


def load_checkpoint(run: Path, name: str | None = None) -> tuple[Saved, dict[str, Tensor]]:
    """Reads a checkpoint, that of a run which is called so, or its newest: what it says and the fp32 weights, checked
    before."""
    checkpoint = find_checkpoint(run, name)
    if fault := find_fault(checkpoint):
        raise DamageError(fault)
    saved = Saved.read(checkpoint)
    weights = read_weights(checkpoint, list_parameter_sizes(saved.record.shape))
    check_finite(str(checkpoint), weights)
    return saved, weights


def read_weights(checkpoint: Path, sizes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Reads fp32 weights of these names and sizes in full."""
    stored = StoredTensors(checkpoint, read_record(checkpoint), WEIGHT)
    weights = {}
    for name, size in sizes.items():
        weights[name] = torch.empty(size)
        stored.read(name, weights[name].view(-1))
    return weights


def read_weights_together(checkpoint: Path, sizes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Reads fp32 weights of these names and sizes on rank 0, which hands them to the others: read by each, they would
    come from the disk as often as there are ranks. Where ranks are connected, all of them call it together."""
    rank, ranks = place()
    if ranks == 1:
        return read_weights(checkpoint, sizes)
    weights, fault = {name: torch.empty(size) for name, size in sizes.items()}, None
    if rank == 0:
        try:
            weights = read_weights(checkpoint, sizes)
        except DamageError as error:
            fault = str(error)
    gather(None, fault)
    for weight in weights.values():
        dist.broadcast(weight, src=0, group=host_group())
    return weights


def list_parameter_sizes(shape: Shape) -> dict[str, torch.Size]:
    """The parameters of a pre-trained model with its heads."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_model(shape).named_parameters()}
