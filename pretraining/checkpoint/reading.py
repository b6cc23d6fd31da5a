"""Reads checkpoints on any number of ranks and under any ZeRO stage. `record.py` describes their format."""

from __future__ import annotations

import shutil
import traceback
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.common.errors import DamageError, SharedError, UserError
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
from pretraining.mesh.cuts import find_share_size, join_shares
from pretraining.mesh.mesh import Shares
from pretraining.model.encoder import Trainable
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.optimizers.steps.flat import FlatTensor, Slice
from pretraining.processes.group import find_greatest, gather, host_group, place

Sizes = Mapping[str, torch.Size]
"""The sizes of whole parameters, by their names."""
UNFINISHED, REPLACED = ".tmp", ".old"
"""Suffixes of an unfinished checkpoint, and of a checkpoint's name while another takes its place."""


def find_newest_whole(run: Path, warn: Callable[[str], None]) -> Path | None:
    """Finds the newest checkpoint whose files have their recorded checksums. All ranks call it together.

    Damaged checkpoints are named, marked and left in place. Returns None if there is no checkpoint; raises SharedError
    if all are damaged, since the user does not expect the run to begin anew.
    """
    rank, ranks = place()
    if rank == 0:
        clean_checkpoints(run)
    seen = [(str(path), (path / DAMAGED).exists()) for path in list_checkpoints(run)] if rank == 0 else []
    there: list[tuple[Path, bool]] = [(Path(path), damaged) for path, damaged in gather(seen)[0]]
    for checkpoint in (path for path, damaged in reversed(there) if not damaged):
        faults = {fault for fault in gather(find_fault(checkpoint, rank, ranks)) if fault}
        if not faults:
            return checkpoint
        if rank == 0:
            reason = "\n".join(sorted(faults))
            warn(f"{reason}\n{checkpoint} is left as it is, and the checkpoint before it is taken")
            with suppress(OSError):  # the next start will find it damaged again
                (checkpoint / DAMAGED).write_text(f"{reason}\nRemove this file if the checkpoint was repaired.\n")
    if there:
        raise SharedError(
            f"{run / FOLDER}: every checkpoint is damaged: {', '.join(path.name for path, _ in there)}\n"
            f"repair one and remove the file {DAMAGED} from it, or begin anew in another --out folder"
        )
    return None


def clean_checkpoints(run: Path) -> None:
    """Removes unfinished checkpoints, which may fill the disk, and restores the name of a checkpoint if the run was
    killed while replacing it."""
    for unfinished in (run / FOLDER).glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for old in (run / FOLDER).glob(f"step-*{REPLACED}"):
        if not old.with_suffix("").exists():
            with suppress(OSError):
                old.rename(old.with_suffix(""))


def find_fault(checkpoint: Path, rank: int = 0, ranks: int = 1, beginning: str = "") -> str | None:
    """Describes a fault in a checkpoint, or in its files whose names begin so; each rank checks its part."""
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
    """The tensors of one kind in a checkpoint, such as the weights, written in slices by any number of ranks.

    Of a parameter that tensor ranks divided, `read` knows their shares end to end; `read_whole` joins them.

    Files are opened on demand, first those whose place among the files is nearest to this rank's place among the ranks:
    with as many ranks as wrote them, a rank opens its own file only.
    """

    def __init__(self, checkpoint: Path, record: CheckpointRecord, kind: str):
        self._checkpoint, self._record = checkpoint, record
        self._slices: dict[str, list[StoredSlice]] = defaultdict(list)
        self._closed = _sort_by_distance(
            [checkpoint / file.path for file in record.files if file.path.startswith(kind + "-")]
        )

    def read_whole(self, name: str, size: torch.Size) -> Tensor:
        """Reads a whole parameter of this size, in fp32."""
        division, ranks = self._record.divisions.get(name), self._record.tensor_ranks
        if division is None:
            whole = torch.empty(size)
            self.read(name, whole.view(-1))
            return whole
        shares = torch.empty(ranks, *find_share_size(size, division, ranks))
        for number, share in enumerate(shares):
            self.read(name, share.view(-1), number * share.numel())
        return join_shares(shares.unbind(), division._replace(rows=size[0]))

    def read_part(self, part: Slice, flat: FlatTensor, into: Tensor, shares: Shares, sizes: Sizes) -> None:
        """Copies a part of a parameter, or of this rank's share of it, into a flat tensor.

        A share is read as it is stored if as many ranks divide the parameter now; otherwise the whole, whose size is in
        `sizes`, is joined and cut anew.
        """
        name = part.name
        stored, now = (self._record.divisions.get(name), self._record.tensor_ranks), shares.divisions.get(name)
        if stored == (now, shares.mesh.tensor_ranks) or stored[0] is now is None:
            self.read(name, into, part.start + shares.find_start(name, flat.sizes[name]))
        else:
            own = shares.take(name, self.read_whole(name, sizes[name])).view(-1)
            into.copy_(own[part.start : part.start + part.length])

    def read(self, name: str, into: Tensor, start: int = 0) -> None:
        """Copies elements of a parameter, from `start` on, into a flat tensor."""
        missing = into.numel() - _copy(self._slices[name], into, start)
        while missing and self._closed:
            missing -= _copy(self._open(self._closed.pop())[name], into, start)
        if missing:
            raise DamageError(f"{self._checkpoint}: {missing:,} elements of {name} are not in it")

    def _open(self, path: Path) -> dict[str, list[StoredSlice]]:
        """Opens a file; returns its slices by parameter."""
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
    """Consecutive elements of a parameter in one file."""

    start: int
    length: int
    file: Any
    key: str


def _copy(slices: Iterable[StoredSlice], into: Tensor, start: int) -> int:
    """Copies a parameter's elements from `start` on out of slices; returns the number of elements found."""
    copied, end = 0, start + into.numel()
    for first, length, file, key in slices:
        begin, stop = max(start, first), min(end, first + length)
        if begin < stop:
            into[begin - start : stop - start].copy_(file.get_slice(key)[begin - first : stop - first])
            copied += stop - begin
    return copied


def _sort_by_distance(paths: list[Path]) -> list[Path]:
    """Sorts the files of a checkpoint so that the one most likely to hold this rank's slices is last."""
    rank, ranks = place()
    own = (rank + 0.5) / ranks
    distance = {path: abs((number + 0.5) / len(paths) - own) for number, path in enumerate(paths)}
    return sorted(paths, key=distance.__getitem__, reverse=True)


@torch.no_grad()
def restore_model(checkpoint: Path, model: Trainable, fresh: Container[str] = ()) -> None:
    """Loads the weights of a checkpoint into a model, or this rank's shares of them, one after another; buffers, and
    weights that are `fresh`, stay as they are. All ranks call it together."""
    there, shares = dict(model.named_parameters()), model.shares
    sizes = {name: shares.find_whole_size(name, own) for name, own in there.items() if name not in fresh}
    for name, whole in read_each_together(partial(_read_each, checkpoint, sizes), sizes):
        there[name].copy_(shares.take(name, whole))


@torch.no_grad()
def restore_engine(checkpoint: Path, engine: Engine, fresh: Container[str] = ()) -> CheckpointRecord:
    """Loads the optimizer's state of a checkpoint into an engine, whose model has its weights already; that of weights
    that are `fresh` begins at zero."""
    record, shares = read_record(checkpoint), engine.shares
    sizes = list_parameter_sizes(record.shape) if record.divisions or shares.divisions else {}
    engine.optimizer_steps = record.optimizer_steps
    for kind in engine.optimizer.kind.state:
        stored = StoredTensors(checkpoint, record, kind)
        for flat in engine.flat_tensors:
            state = engine.optimizer.get_state(flat.tensor)
            for part in flat.parts:
                if part.name not in fresh:
                    stored.read_part(part, flat, flat.view_part(part, state[kind]), shares, sizes)
    engine.loss_scaler = record.loss_scaler
    return record


def load_checkpoint(run: Path) -> tuple[Saved, dict[str, Tensor]]:
    """Reads a checkpoint, or the newest of a run: its record and fp32 weights, after checking all files."""
    checkpoint = find_checkpoint(run)
    if fault := find_fault(checkpoint):
        raise DamageError(fault)
    saved = Saved.read(checkpoint)
    weights = read_weights(checkpoint, list_parameter_sizes(saved.record.shape))
    check_finite(str(checkpoint), weights)
    return saved, weights


def read_weights(checkpoint: Path, sizes: Sizes) -> dict[str, Tensor]:
    """Reads whole fp32 weights of these names and sizes."""
    return dict(_read_each(checkpoint, sizes))


def _read_each(checkpoint: Path, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    stored = StoredTensors(checkpoint, read_record(checkpoint), WEIGHT)
    for name, size in sizes.items():
        yield name, stored.read_whole(name, size)


def read_weights_together(checkpoint: Path, sizes: Sizes) -> dict[str, Tensor]:
    """Reads whole fp32 weights of these names and sizes on rank 0 and broadcasts them, so that the disk is read once.
    If ranks are connected, all of them call it together."""
    return dict(read_each_together(partial(_read_each, checkpoint, sizes), sizes))


def read_each_together(read: Callable[[], Iterable[tuple[str, Tensor]]], sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that `read` yields on rank 0, in the order of `sizes`; an error of any rank is raised on all.
    If ranks are connected, all of them call it together."""
    rank, ranks = place()
    if ranks == 1:
        yield from read()
        return
    gather(None)  # hears a rank that has failed before
    found, whole = iter(read()) if rank == 0 else None, torch.empty(0)
    for name, size in sizes.items():
        fault = None
        try:
            whole = torch.empty(size) if found is None else next(found)[1]
        except Exception as error:
            fault = str(error) if isinstance(error, UserError) else traceback.format_exc()
        if find_greatest(torch.tensor([float(fault is not None)]), host_group()):
            gather(None, fault)
        dist.broadcast(whole, src=0, group=host_group())
        yield name, whole


def list_fresh(model: Trainable, shape: Shape) -> set[str]:
    """Lists the weights of a pre-trained model that a checkpoint of this shape lacks, since its objective differed."""
    if model.shape.learns == shape.learns:
        return set()
    return {name for name, _ in model.named_parameters()} - list_parameter_sizes(shape).keys()


def list_parameter_sizes(shape: Shape) -> dict[str, torch.Size]:
    """Lists the names and sizes of the parameters of a pre-trained model with its heads."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_model(shape).named_parameters()}
