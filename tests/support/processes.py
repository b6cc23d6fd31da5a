"""Several processes on this machine, for tests of ranks: `spawn(2, function)`."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_")

CALL = """
import importlib.util, pickle, sys
path, name, result = sys.argv[1:]
spec = importlib.util.spec_from_file_location("spawned", path)
module = importlib.util.module_from_spec(spec)
sys.modules["spawned"] = module
spec.loader.exec_module(module)
value = getattr(module, name)()
with open(result, "wb") as file:
    pickle.dump(value, file)
"""


@dataclass(frozen=True)
class Done:
    """What became of one rank."""

    code: int
    output: str
    errors: str
    result: Any = None
    """what the function returned"""


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def spawn(
    ranks: int,
    what: Callable[[], Any] | str | Sequence[str | Path],
    timeout: float = 90.0,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> list[Done]:
    """Starts `what` as ranks on loopback, as torchrun would but without its watching over them, and waits for all.

    `what` is a function of a test module (at its top, without arguments; what it returns is in `Done.result`), the
    text of a script, or the arguments of Python. No rank is ended when another fails: that is for what is tested.
    After `timeout` seconds all are killed and TimeoutError says what they had printed.
    """
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(rank, ranks, what, Path(folder), environment or {}, port) for rank in range(ranks)]
        late = _wait(started, time.monotonic() + timeout)
        done = [_done(process, rank, Path(folder)) for rank, process in enumerate(started)]
    if late:
        shown = "\n".join(f"rank {rank}: {each.output}{each.errors}" for rank, each in enumerate(done))
        raise TimeoutError(f"ranks {late} did not end within {timeout:.0f} s\n{shown}")
    return done


def _start(
    rank: int, ranks: int, what: Any, folder: Path, extra: Mapping[str, str], port: int
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment = {
        **inherited,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
        **extra,
    }
    if callable(what):
        result = str(folder / f"result{rank}")
        arguments = ["-c", CALL, str(inspect.getsourcefile(inspect.unwrap(what))), what.__name__, result]
    else:
        arguments = ["-c", what] if isinstance(what, str) else [str(each) for each in what]
    with (folder / f"output{rank}").open("wb") as output, (folder / f"errors{rank}").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def _wait(started: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Waits for all; kills those that are late, with all that they started, and says which."""
    late = []
    for rank, process in enumerate(started):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        os.killpg(started[rank].pid, signal.SIGKILL)
        started[rank].wait()
    return late


def _done(process: subprocess.Popen[bytes], rank: int, folder: Path) -> Done:
    result = folder / f"result{rank}"
    return Done(
        process.returncode,
        (folder / f"output{rank}").read_text(errors="replace"),
        (folder / f"errors{rank}").read_text(errors="replace"),
        pickle.loads(result.read_bytes()) if result.exists() else None,
    )
