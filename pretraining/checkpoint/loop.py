"""The part that the loops of pre-training and fine-tuning share: the log, checkpoints, and stopping in good order."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import NoReturn

import torch

from data_prep.common.capacity import num_cores
from pretraining.checkpoint.writing import Saver, Section
from pretraining.config.settings import Checkpoints, Logging
from pretraining.engine.engine import Engine
from pretraining.model import cpu_kernels
from pretraining.processes.context import Context
from pretraining.processes.core_watch import CoreWatch
from pretraining.processes.group import gather
from pretraining.processes.stopping import Decision, StoppedError
from pretraining.reporting.meter import Meter
from pretraining.reporting.run_log import RunLog


class Loop:
    """One rank's part of a training that logs, saves and stops in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        context: Context,
        engine: Engine,
        meter: Meter,
        step: int,
        logging: Logging,
        checkpoints: Checkpoints,
    ) -> None:
        """`step` is the last that is done: what the log says of later ones will be written again."""
        self.context, self.engine, self.meter = context, engine, meter
        self.log = RunLog(
            folder,
            context.console,
            tensorboard=logging.tensorboard,
            first_step=step + 1 if step else 0,
            active=context.world.rank == 0,
            name=context.run,
        )
        self.saver = Saver(folder, checkpoints, self.log.say)
        self.garbage = GarbageCollection()
        self._cores = CoreWatch()
        if engine.device.type == "cpu":
            warn_of_cpus(context)

    def look_at_cores(self) -> None:
        """Says once where other programs slow this rank down. A run on a GPU hardly minds them."""
        if self.context.world.rank == 0 and self.engine.device.type == "cpu" and (word := self._cores.word()):
            self.context.warn(word)

    def write_checkpoint(self, step: int, section: Section) -> None:
        """Copies the state, and writes it while training goes on."""
        with self.meter.watch.pause():
            self.log.sync()
            self.saver.save(self.engine, step, section, self.meter.state())

    def end(self, decision: Decision, step: int, name: str = "") -> NoReturn:
        """Ends a run before its end, once what it has saved is written."""
        self.saver.finish()
        stopped = f"{name}stopped by {decision.cause} after step {step:,}, and saved"
        raise StoppedError(f"{stopped}; the same command continues from there", decision)


class GarbageCollection:
    """Surrounds a loop in which Python's collector looks for garbage at the same steps on all ranks.

    It would otherwise look whenever it has counted enough, at another step on each rank, for up to half a second where
    many modules are loaded, while all others wait.
    """

    EVERY = 1000
    """steps"""

    def __enter__(self) -> GarbageCollection:
        self._is_frozen = False
        return self

    def after_step(self, step: int) -> None:
        """Collects garbage after the first step that is made and after each 1,000th. Objects that are alive after the
        first are frozen: later collections pass over them."""
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_frozen = True
        elif is_due(step, self.EVERY):
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._is_frozen:
            gc.enable()
            gc.unfreeze()


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens after this one; 0 is never."""
    return bool(every) and step % every == 0


def warn_of_cpus(context: Context) -> None:
    """Says once where ranks compute in different ways, or have more threads than cores. All ranks call it together."""
    ways, threads, cores = sorted({*gather(cpu_kernels.describe_arithmetic())}), torch.get_num_threads(), num_cores()
    if context.world.rank:
        return
    if len(ways) > 1:
        masks = ", and draw other masks of dropout" if "no kernels" in ways else ""
        warnings.warn(f"ranks compute in different ways ({', '.join(ways)}): they round otherwise{masks}", stacklevel=1)
    if threads > cores:
        warnings.warn(f"{threads} threads on {cores} cores: they wait for one another; fewer are faster", stacklevel=1)
