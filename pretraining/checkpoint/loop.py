"""Base of the training loops of pre-training and fine-tuning: logging, checkpoints, and stopping."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NoReturn

from pretraining.checkpoint.writing import Saver
from pretraining.config.settings import Checkpoints, Logging
from pretraining.engine.engine import Engine
from pretraining.processes.context import Context
from pretraining.processes.cores import CoreWatch
from pretraining.processes.environment import HeapLimit
from pretraining.processes.stopping import Decision, StoppedError
from pretraining.reporting.meter import Meter
from pretraining.reporting.run_log import RunLog


class Loop:
    """One rank's part of a training with a folder of its own: logs, saves and stops."""

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
        """`step` is the last step done: log entries of later steps are removed, and written again."""
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

    def warn_of_busy_cores(self) -> None:
        """Warns once if other programs slow this rank down. It hardly matters on a GPU."""
        if self.context.world.rank == 0 and self.engine.device.type == "cpu" and (word := self._cores.word()):
            self.context.warn(word)

    def write_checkpoint(self, step: int, progress: dict[str, Any]) -> None:
        """Copies the state, and writes the copy while training continues; `progress`: that of the training, as JSON."""
        with self.meter.watch.pause():
            self.log.sync()
            self.saver.save(self.engine, step, progress, self.meter.state())

    def end(self, decision: Decision, step: int, name: str = "") -> NoReturn:
        """Stops a run early, after its checkpoint is written."""
        self.saver.finish()
        stopped = f"{name}stopped by {decision.cause} after step {step:,}, and saved"
        raise StoppedError(f"{stopped}; the same command continues from there", decision)


class GarbageCollection:
    """Within a loop, runs Python's garbage collector at the same steps on all ranks: otherwise each rank
    collects at steps of its own, for up to half a second, while the others wait. Limits the heap after each step, too.
    """

    EVERY = 1000
    """steps"""

    def __enter__(self) -> GarbageCollection:
        self._is_frozen, self._heap = False, HeapLimit()
        return self

    def after_step(self, step: int) -> None:
        """Collects garbage after the first step and after each 1,000th. Objects that are alive after the first step are
        frozen: later collections ignore them."""
        self._heap.after_step()
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
    """Whether an action with a period of `every` steps is due after this step; 0 is never."""
    return bool(every) and step % every == 0
