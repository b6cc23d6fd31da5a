"""Writes checkpoints while training continues: a thread of each rank writes a copy of the state.

A checkpoint is written to a temporary folder. Every rank syncs its files to the disk, reads them back and notes their
checksums in a small file; when the notes of all ranks are there, rank 0 writes the record, renames the folder, and
removes old checkpoints. If the run is killed meanwhile, the earlier checkpoints are intact.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_prep.common.errors import DamageError, UnreachedError, UserError
from data_prep.common.files import FileRecord, read_json, wait_for_storage, writable, write_json
from pretraining.checkpoint import record as records
from pretraining.checkpoint.reading import REPLACED, UNFINISHED
from pretraining.config.settings import Checkpoints
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype
from pretraining.huggingface.weights import save_tensors
from pretraining.mesh.mesh import Mesh, Shares
from pretraining.model import cpu_kernels
from pretraining.optimizers.steps.flat import FlatTensor, Slice
from pretraining.processes.group import gather, wait_for_all
from pretraining.reporting.hardware import synchronize
from pretraining.reporting.meter import MeterState

EVERYTHING = "*"
POLL_SECONDS = 0.02
"""Interval at which rank 0 looks for the notes of other ranks."""
COMPLETE_SECONDS = 60.0
"""How long an error waits until the checkpoint that is being written is complete."""


@dataclass(frozen=True)
class Save:
    """A checkpoint that this rank is writing."""

    folder: Path
    """its final folder"""
    unfinished: Path
    """its temporary folder"""
    tensors: dict[str, dict[str, Tensor]]
    """copies of this rank's tensors, by kind"""
    record: records.CheckpointRecord
    rank_state: MeterState
    begin: float

    def note(self, rank: int) -> Path:
        """The file in which a rank notes the files it has written."""
        return self.unfinished / f"rank-{rank:05}.json"


class Saver:
    """Saves this rank's part of checkpoints; all ranks call `save` and `finish` together.

    A UserError within `with saver:` is held back until the checkpoint that is being written is complete.
    """

    def __init__(self, run: Path, settings: Checkpoints, say: Callable[[str], None]):
        """`say` is called with a line on every complete checkpoint."""
        self._run, self._settings, self._say = run, settings, say
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: list[Path] = []
        self._unfinished: Path | None = None  # the folder of the last save, unless it failed
        self._closed = threading.Event()
        self._snapshots = Snapshots()
        self.longest = 0.0
        """seconds that the slowest checkpoint took"""

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """After a UserError, waits until all ranks have written the checkpoint: its state is good."""
        if not isinstance(error, UserError) or isinstance(error, UnreachedError):  # other ranks may be gone
            return
        deadline = time.monotonic() + COMPLETE_SECONDS
        if self._thread is not None:
            self._thread.join(COMPLETE_SECONDS)
        while self._unfinished is not None and self._unfinished.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        with suppress(UserError):  # the first error says why the run ends
            self.report()

    def save(self, engine: Engine, step: int, caller: dict[str, Any], rank_state: MeterState) -> None:
        """Copies the state of the engine, and starts writing the copy.

        `caller`: the section of the record on the progress of the training.
        """
        begin = time.monotonic()
        self.finish_thread()
        folder = self._run / records.FOLDER / f"step-{step:08}"
        # a unique name: ranks of a run that was killed may still be writing
        unfinished = folder.with_name(f"{folder.name}-{gather(secrets.token_hex(4))[0]}{UNFINISHED}")
        with clear_error(unfinished):
            wait_for_storage(partial(self._make_room, unfinished), self._run)
        wait_for_all()
        tensors = self._snapshots.take(engine)
        scaler, made_by = engine.loss_scaler, describe_making(engine, self._ranks)
        shape, moved = engine.model.shape, engine.optimizer_steps
        shared = engine.mesh.tensor_ranks, dict(engine.shares.divisions)
        of_engine = (), (), engine.late_weights, *shared
        record = records.CheckpointRecord(shape, step, moved, scaler, made_by, caller, *of_engine)
        save = Save(folder, unfinished, tensors, record, rank_state, begin)
        self._unfinished = unfinished
        self._thread = threading.Thread(target=self._work, args=(save,), daemon=True, name="saver")
        self._thread.start()

    def report(self) -> None:
        """Reports what was saved since the last call, and raises errors of writing, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish_thread()

    def finish(self) -> None:
        """Waits until all ranks have finished writing."""
        self.finish_thread()
        wait_for_all()

    def close(self) -> None:
        """Abandons what is not written yet."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def finish_thread(self) -> None:
        """Waits for this rank's thread, reports what was saved, and raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        while self._saved:
            self._say(f"saved {self._saved.pop(0)}")

    def _make_room(self, unfinished: Path) -> None:
        """Removes unfinished checkpoints of killed runs, and makes the new folder."""
        if self._rank == 0:
            unfinished.parent.mkdir(exist_ok=True)  # not its parents: if the run's folder is gone, so is its storage
            for left in unfinished.parent.glob("step-*"):
                if left.suffix in (UNFINISHED, REPLACED):
                    shutil.rmtree(left)
            unfinished.mkdir()

    def _work(self, save: Save) -> None:
        """The thread: writes this rank's files, and on rank 0 completes the checkpoint."""
        try:
            with clear_error(save.unfinished, EVERYTHING if self._ranks == 1 else self._own("*")):
                self._write(save)
            if self._rank == 0 and self._others_have_written(save):
                with clear_error(save.unfinished):
                    self._complete(save)
                self._saved.append(save.folder)
                self.longest = max(self.longest, time.monotonic() - save.begin)
        except BaseException as error:
            self._error, self._unfinished = error, None

    def _write(self, save: Save) -> None:
        files = []
        for kind in list(save.tensors):
            tensors = save.tensors.pop(kind)  # on a CPU, frees its memory when written
            record = wait_for_storage(partial(_write_file, save.unfinished, self._own(kind), tensors), save.unfinished)
            files.append(record.as_json())
        note = {"files": files, "state": save.rank_state}
        wait_for_storage(partial(write_json, save.note(self._rank), note), save.unfinished)

    def _own(self, kind: str) -> str:
        """Names the file of this rank's tensors of a kind."""
        return f"{kind}-{self._rank:05}-of-{self._ranks:05}.safetensors"

    def _others_have_written(self, save: Save) -> bool:
        """Waits for the notes of all ranks; False if the run ends before."""
        for rank in range(self._ranks):  # in turn: each look is a file system call
            while not wait_for_storage(save.note(rank).exists, save.unfinished):
                if self._closed.wait(POLL_SECONDS):
                    return False
        return True

    def _complete(self, save: Save) -> None:
        """Writes the record, renames the folder to its final name, and removes old checkpoints."""
        paths = [save.note(rank) for rank in range(self._ranks)]
        notes = [read_json(path) for path in paths]
        for path in paths:
            path.unlink()
        files = tuple(FileRecord(**file) for note in notes for file in note["files"])
        states = tuple(note["state"] for note in notes)
        records.write_record(save.unfinished, replace(save.record, files=files, rank_states=states))
        _sync(save.unfinished)
        folder = save.folder
        replaced = folder.with_name(folder.name + REPLACED)
        if folder.exists():
            folder.rename(replaced if records.is_finished(folder) else find_free_name(folder))
        save.unfinished.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        remove_old(self._run, self._settings)


def describe_making(engine: Engine, ranks: int) -> records.MadeBy:
    """Describes how the work is divided among ranks now, and how a CPU computes."""
    on_cpu = engine.device.type == "cpu"
    threads, way = (torch.get_num_threads(), cpu_kernels.describe_arithmetic()) if on_cpu else (0, "")
    return records.MadeBy(ranks, engine.zero, name_dtype(engine.dtype), threads, way)


class Snapshots:
    """Copies this rank's state into the host's memory. From a GPU each flat tensor is copied whole, into pinned memory
    that is reused: thousands of small copies into new memory would delay training for longer."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        """pinned memory of the last copies, by kind"""

    def take(self, engine: Engine) -> dict[str, dict[str, Tensor]]:
        """Copies the state of an engine, by kind. From a GPU, copies overwrite the last ones."""
        found = {kind: self._copy(engine, kind) for kind in (records.WEIGHT, *engine.optimizer.kind.state)}
        synchronize(engine.device)
        return found

    def _copy(self, engine: Engine, kind: str) -> dict[str, Tensor]:
        pieces: list[tuple[Tensor, int, dict[str, Slice]]] = []
        for flat in engine.flat_tensors:
            if parts := _find_own_parts(flat, engine.shares):
                source = flat.tensor if kind == records.WEIGHT else engine.optimizer.get_state(flat.tensor)[kind]
                first = next(iter(parts.values())).offset
                end = max(part.offset + part.length for part in parts.values())
                pieces.append((source.detach().view(-1)[first:end], first, parts))
        if not pieces:
            return {}
        sizes = [len(values) for values, *_ in pieces]
        memory = self._memory(kind, pieces[0][0], sum(sizes))
        copies: dict[str, Tensor] = {}
        for (values, first, parts), copied in zip(pieces, memory.split_with_sizes(sizes), strict=True):
            copied.copy_(values, non_blocking=True)
            copies |= {key: copied.narrow(0, part.offset - first, part.length) for key, part in parts.items()}
        return copies

    def _memory(self, kind: str, like: Tensor, size: int) -> Tensor:
        if not like.is_cuda:
            return torch.empty(size, dtype=like.dtype)
        if kind not in self._pinned:
            try:
                self._pinned[kind] = torch.empty(size, dtype=like.dtype, pin_memory=True)
            except RuntimeError:  # the limit of pinned memory is reached
                self._pinned[kind] = torch.empty(size, dtype=like.dtype)
        return self._pinned[kind]


def _find_own_parts(flat: FlatTensor, shares: Shares) -> dict[str, Slice]:
    """Finds the parts of a flat tensor that this rank writes, by their keys in its file. What the ranks of a tensor
    group have alike, the first of them writes."""
    mesh = shares.mesh
    return {
        f"{part.name}:{part.start + shares.find_start(part.name, flat.sizes[part.name])}": part
        for part in (flat.parts if flat.group is not None else _cut_own_share(flat.parts, mesh))
        if mesh.counts or part.name in shares
    }


def _cut_own_share(parts: tuple[Slice, ...], mesh: Mesh) -> Iterator[Slice]:
    """Selects this rank's share of parts that every data rank holds whole."""
    rank, ranks = mesh.data_rank, mesh.data_ranks
    for part in parts:
        first, end = part.length * rank // ranks, part.length * (rank + 1) // ranks
        if first < end:
            yield Slice(part.name, part.start + first, end - first, part.offset + first)


@contextmanager
def clear_error(unfinished: Path, written: str = EVERYTHING) -> Iterator[None]:
    """Explains errors of writing, such as a full disk, and removes the unfinished files of these names. While others
    may be writing, their files and the folder stay, or they would report them as missing."""
    try:
        yield
    except (OSError, SafetensorError, UserError) as error:
        explained = _explain_failure(unfinished, error.__cause__ or error)
        with suppress(OSError):
            for path in unfinished.glob(written):
                path.unlink()
            if written == EVERYTHING:
                unfinished.rmdir()
        raise explained from error


def _explain_failure(unfinished: Path, error: BaseException) -> UserError:
    """Makes the UserError for an error of writing."""
    within = re.search(r"os error (\d+)", str(error))  # the wording of safetensors
    number = error.errno if isinstance(error, OSError) else int(within[1]) if within else None
    reason = os.strerror(number) if number else str(error)
    cure = "make room, or keep fewer checkpoints (--checkpoints.keep)" if number == errno.ENOSPC else "find out why"
    return UserError(f"{unfinished}: cannot be written: {reason}\n{cure}; the same command goes on from the last one")


def find_free_name(folder: Path) -> Path:
    """Finds a free name to move a checkpoint to that no run must continue from."""
    names = (folder.with_name(f"{folder.name}.damaged{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _write_file(folder: Path, name: str, tensors: dict[str, Tensor]) -> FileRecord:
    """Writes a file, syncs it to the disk, reads it back and compares."""
    save_tensors(tensors, folder / name)
    _sync(folder / name)
    _compare(folder / name, tensors)
    return FileRecord.from_file(folder, name)


def _sync(path: Path) -> None:
    """Syncs a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compare(path: Path, tensors: dict[str, Tensor]) -> None:
    """Compares a file with the tensors that were written, bit for bit."""
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name).view(torch.int32), tensor.view(torch.int32)):
                raise DamageError(f"{path}: reads otherwise than it was written")


def remove_old(run: Path, settings: Checkpoints) -> None:
    """Removes checkpoints beyond the number to keep, except damaged ones and the newest before the loss leapt."""
    there = records.list_finished(run)
    sound = next(filter(_is_sound, reversed(there)), None)
    for old in there[: -settings.keep]:
        if old != sound and not settings.keeps(records.parse_step(old)):
            gone = old.with_name(old.name + UNFINISHED)  # a kill meanwhile must not leave half a checkpoint
            with suppress(OSError):  # the next save removes the rest
                old.rename(gone)
                shutil.rmtree(gone)


def _is_sound(checkpoint: Path) -> bool:
    """Whether a run may go back to a checkpoint: the loss had not leapt."""
    with suppress(DamageError):
        return records.read_record(checkpoint).caller.get("leapt") is None
    return False


def require_room(run: Path) -> None:
    """Raises UserError if the folder of checkpoints exists but cannot be written to."""
    if (folder := run / records.FOLDER).exists():
        with writable(folder, "; nothing could be saved there"), tempfile.TemporaryFile(dir=folder):
            pass
