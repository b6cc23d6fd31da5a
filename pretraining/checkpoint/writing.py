"""Writes checkpoints while training goes on: the state is copied, and a thread of each rank writes its copy.

A checkpoint is made beside its place. Every rank puts its files on the disk, reads them back and tells their checksums
in a small file; when the files of all ranks are there, rank 0 writes the record, gives the checkpoint its name, and
removes those that are no longer to be kept. A run that is killed in the middle of this has lost nothing that was there
before.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, read_json, write_json
from pretraining.checkpoint.reading import (
    FOLDER,
    KINDS,
    RECORD,
    REPLACED,
    SEAL,
    Progress,
    finished,
    is_finished,
    seal,
    snapshot,
    step_of,
)
from pretraining.config import settings as recipe
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype
from pretraining.processes.group import gather

UNFINISHED, ASIDE = ".tmp", ".damaged"
FULL = 1 << 16
"""bytes left where a disk counts as full"""
LOOK = 0.02
"""seconds between two looks for the files of other ranks"""


class Saver:
    """This rank's part of saving; all ranks call `save` and `finish` together."""

    def __init__(self, run: Path, settings: recipe.Checkpoints, said: Callable[[str], None]):
        self._run, self._settings, self._say = run, settings, said
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: list[Path] = []
        self._closed = threading.Event()
        self.stalled = 0.0
        """seconds for which training has waited for `save` in all"""
        self.longest = 0.0
        """seconds that the slowest checkpoint took from its beginning to its name"""

    def save(self, engine: Engine, progress: Progress, record: dict[str, Any], meter: dict[str, Any]) -> None:
        """Copies the state, and writes it from then on."""
        begin = time.monotonic()
        self._join()
        folder = self._run / FOLDER / f"step-{progress.step:08}"
        # a name that no other run knows: ranks of one that was killed may still be writing
        unfinished = folder.with_name(f"{folder.name}-{gather(secrets.token_hex(4))[0]}{UNFINISHED}")
        self._guarded(unfinished, lambda: self._begin(unfinished))
        dist.barrier()
        copies = {kind: snapshot(engine, kind) for kind in KINDS}
        content = {**record, "progress": asdict(progress), **_describe(engine)}
        self._thread = threading.Thread(
            target=self._work, args=(folder, unfinished, copies, content, meter, begin), daemon=True, name="saver"
        )
        self._thread.start()
        self.stalled += time.monotonic() - begin

    def look(self) -> None:
        """Tells what was saved since the last look, and raises what went wrong."""
        if self._thread is not None and not self._thread.is_alive():
            self._join()

    def finish(self) -> None:
        """Waits until all is written."""
        begin = time.monotonic()
        self._join()
        dist.barrier()
        self.stalled += time.monotonic() - begin

    def close(self) -> None:
        """Gives up what is not written."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        while self._saved:
            self._say(f"saved {self._saved.pop(0)}")

    def _begin(self, unfinished: Path) -> None:
        if self._rank == 0:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            for left in unfinished.parent.glob("step-*"):
                if left.suffix in (UNFINISHED, REPLACED):
                    shutil.rmtree(left)
            unfinished.mkdir()

    def _work(
        self,
        folder: Path,
        unfinished: Path,
        copies: dict[str, dict[str, Tensor]],
        content: dict[str, Any],
        meter: dict[str, Any],
        begin: float,
    ) -> None:
        try:
            self._guarded(unfinished, lambda: self._write(unfinished, copies, meter))
            if self._rank == 0 and self._others_have_written(unfinished):
                self._guarded(unfinished, lambda: self._complete(folder, unfinished, content))
                self._saved.append(folder)
                self.longest = max(self.longest, time.monotonic() - begin)
        except BaseException as error:
            self._error = error

    def _write(self, unfinished: Path, copies: dict[str, dict[str, Tensor]], meter: dict[str, Any]) -> None:
        files = []
        for kind in KINDS:
            tensors = copies.pop(kind)
            path = unfinished / f"{kind}-{self._rank:05}-of-{self._ranks:05}.safetensors"
            save_file(tensors, path)
            _sync(path)
            _compare(path, tensors)
            files.append(FileRecord.of(unfinished, path.name).as_json())
        write_json(self._note(unfinished, self._rank), {"files": files, "meter": meter})

    def _note(self, unfinished: Path, rank: int) -> Path:
        return unfinished / f"rank-{rank:05}.json"

    def _others_have_written(self, unfinished: Path) -> bool:
        """Waits for it. False if the run ends before."""
        missing = {self._note(unfinished, rank) for rank in range(self._ranks)}
        while missing := {path for path in missing if not path.exists()}:
            if self._closed.wait(LOOK):
                return False
        return True

    def _complete(self, folder: Path, unfinished: Path, content: dict[str, Any]) -> None:
        notes = [self._note(unfinished, rank) for rank in range(self._ranks)]
        told = [read_json(note) for note in notes]
        for note in notes:
            note.unlink()
        files = [file for each in told for file in each["files"]]
        record = {**content, "files": files, "meters": [each["meter"] for each in told]}
        write_json(unfinished / RECORD, {**record, SEAL: seal(record)})
        _sync(unfinished)
        replaced = folder.with_name(folder.name + REPLACED)
        if folder.exists():
            folder.rename(replaced if is_finished(folder) else _free_name(folder))
        unfinished.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        retire(self._run, self._settings)

    def _guarded(self, unfinished: Path, work: Callable[[], None]) -> None:
        """A full disk is told as what it is, and gets back what was written in vain."""
        try:
            work()
        except (OSError, SafetensorError, UserError) as error:
            raise _cannot_be_written(unfinished, error.__cause__ or error) from error


def _cannot_be_written(unfinished: Path, error: BaseException) -> UserError:
    within = re.search(r"os error (\d+)", str(error))  # as safetensors says it
    number = error.errno if isinstance(error, OSError) else int(within[1]) if within else None
    reason, cure = os.strerror(number) if number else str(error), "find out why"
    if number == errno.ENOSPC or _free(unfinished.parent) < FULL:
        reason, cure = os.strerror(errno.ENOSPC), "make room, or keep fewer checkpoints (--checkpoints.keep)"
    shutil.rmtree(unfinished, ignore_errors=True)
    return UserError(f"{unfinished}: cannot be written: {reason}\n{cure}; the same command goes on from the last one")


def _free_name(folder: Path) -> Path:
    """Where a damaged checkpoint goes whose place is needed."""
    names = (folder.with_name(f"{folder.name}{ASIDE}{number or ''}") for number in itertools.count())
    return next(each for each in names if not each.exists())


def _free(folder: Path) -> int:
    """Bytes that can still be written there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return FULL


def _describe(engine: Engine) -> dict[str, Any]:
    return {
        "optimizer_steps": engine.optimizer_steps,
        "loss_scaler": engine.loss_scaler,
        "made_by": {
            "ranks": dist.get_world_size(),
            "parallel.zero": engine.zero,
            "precision.dtype": name_dtype(engine.dtype),
        },
    }


def _sync(path: Path) -> None:
    """What was written is on the disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compare(path: Path, tensors: dict[str, Tensor]) -> None:
    """Reads back what was written."""
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name).view(torch.int32), tensor.view(torch.int32)):
                raise DamageError(f"{path}: reads otherwise than it was written")


def retire(run: Path, settings: recipe.Checkpoints) -> None:
    """Removes what is no longer to be kept; never a checkpoint that was found damaged."""
    for old in finished(run)[: -settings.keep]:
        if not settings.keep_every or step_of(old) % settings.keep_every:
            gone = old.with_name(old.name + UNFINISHED)  # a kill while it is removed must not leave half a checkpoint
            with suppress(OSError):  # what is left of it, the next save removes
                old.rename(gone)
                shutil.rmtree(gone)
