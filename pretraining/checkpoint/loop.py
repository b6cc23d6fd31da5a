"""Base of the training loops of pre-training and fine-tuning: logging, checkpoints, and stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from pretraining.checkpoint.writing import Saver
from pretraining.config.settings import Checkpoints, Logging
from pretraining.engine.engine import Engine
from pretraining.engine.step import GivenUpError
from pretraining.processes.context import Context
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
        self.heap = HeapLimit()

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


def give_up_if_asked(context: Context) -> None:
    """Raises GivenUpError if a signal asks to stop, after a mark that this rank makes progress. All ranks call it
    together."""
    context.watch.mark()
    if context.control.stop_requested_anywhere():
        raise GivenUpError


def is_due(step: int, every: int) -> bool:
    """Whether an action with a period of `every` steps is due after this step; 0 is never."""
    return bool(every) and step % every == 0
