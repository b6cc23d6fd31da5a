"""Runs the commands of a table one after another, and records their outcomes. A failure does not stop the others."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.measure import DATA, ROOT
from benchmarks.processes import follow
from benchmarks.reproduction.commands import Command
from benchmarks.reproduction.declaration import Declared
from benchmarks.reproduction.ledger import Ledger
from benchmarks.reproduction.outcomes import CommandOutcome, describe_outcome, read_ending, read_outcome
from data_prep.common.capacity import num_cores
from data_prep.common.codes import Code
from data_prep.common.locks import locked
from data_prep.common.progress import duration

LOGS, LOCKS = "logs", "locks"
LAST_LINES = 3
"""The number of last lines that are shown of a command that failed without an error message."""
FOR_EVER = 10.0**9
"""Seconds to wait for a command that another process runs."""


class CommandRunner:
    """Runs commands in the folder of a scale."""

    def __init__(self, declared: Declared, root: Path, ledger: Ledger, ranks: int | None, console: Console) -> None:
        self._root, self._ledger, self._console = root, ledger, console
        self._ranks = ranks or count_ranks(declared.scale.ranks)

    def run(self, commands: Sequence[Command]) -> bool:
        """Runs commands. Returns True if one was stopped early, as by a time limit, which stops all."""
        for number, command in enumerate(commands, 1):
            self._console.print(f"{number}/{len(commands)}  {command.kind}  {command.label}", markup=False)
            if lacking := self._lacking(command):
                self._console.print(f"    not run: {lacking}", markup=False)
                continue
            with locked(self._root / LOCKS / command.name, command.name, "{owner} is at it", patience=FOR_EVER):
                if self._ledger.find(command)[0] == "done" and command.is_made(self._root):
                    continue  # by another process in the meantime
                outcome = self._run(command)
            self._console.print(f"    {outcome.said or 'done'}, {duration(outcome.seconds)}", markup=False)
            if outcome.is_stopped:
                return True
        return False

    def _lacking(self, command: Command) -> str:
        """Describes which needed command has no result; empty if none."""
        for need in command.needs:
            outcome = self._ledger.find(need)[1]
            if outcome is None or not outcome.is_well:
                return f"{need.label}: {outcome.said if outcome else 'not made'}"
        return ""

    def _run(self, command: Command) -> CommandOutcome:
        """Runs a command, and records its outcome."""
        last: deque[str] = deque(maxlen=50)
        log = self._root / LOGS / f"{command.name}.log"
        before, start, begun = self._before(command), time.monotonic(), time.time()

        def note(code: int, said: str) -> CommandOutcome:
            outcome = describe_outcome(command, self._root, code, said, before + time.monotonic() - start)
            outcome.write(self._ledger.note_path(command))
            return outcome

        with self._console.status(command.label) as status:

            def say(line: str) -> None:
                last.append(line)
                status.update(f"{command.label}  {line[:100]}")

            try:
                code = follow(self._command(command), log, say, {**os.environ, "PYTHONUNBUFFERED": "1"})
            except KeyboardInterrupt:
                note(Code.STOPPED, "stopped")
                raise
        return note(*read_ending(self._root / command.name, code, select_last_words(last), begun))

    def _before(self, command: Command) -> float:
        """Returns the seconds of earlier starts of a command that was stopped."""
        earlier = read_outcome(self._ledger.note_path(command))
        return earlier.seconds if earlier is not None and earlier.is_stopped else 0.0

    def _command(self, command: Command) -> list[str]:
        """Builds the command line, with a launcher for several ranks."""
        python = [sys.executable]
        if command.kind == "train" and self._ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)]
        script, *words = command.build_words(self._root, DATA)
        return [*python, str(ROOT / script), *words]


def count_ranks(wanted: int) -> int:
    """Returns the processes of a pre-training: the number of GPUs, or that of the scale, at most the cores."""
    import torch

    return torch.cuda.device_count() or min(wanted, num_cores())


def select_last_words(lines: Sequence[str]) -> str:
    """Returns the last error of a command, or its last lines."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else "\n".join(list(lines)[-LAST_LINES:])
