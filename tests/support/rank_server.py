"""Ranks as forks of one process that has loaded all modules: loading them takes longer than most runs of a test.

A rank is as good as a fresh process. Its session, environment and streams are its own, signals are at their defaults
whatever the tests' parent ignores, no thread is at work before the fork, and it ends as a program does.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining.processes import core_watch

ROOT = Path(__file__).parent.parent.parent
MODULES = [
    "pretraining.train",
    "finetuning.run_task",
    "finetuning.run_ner",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "hypothesis",
    "pyarrow.compute",
    "pytest",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
    "typeguard",
    "tyro._backends._tyro_backend",
]
"""what runs and tests load sooner or later, where it is there"""
ARROW = "jemalloc_bg_thd"
"""the thread of Arrow's memory, which starts it anew after a fork"""
DEFAULT = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Order:
    """Everything that a rank is started with."""

    call: bytes
    """a pickled function and its arguments: the rank alone loads the module that they come from"""
    environment: dict[str, str]
    paths: list[str]
    """folders of modules"""
    folder: Path
    """where its files `output`, `errors` and `result` go"""


class RankServer:
    """Starts the server, and speaks with it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support.rank_server import serve; serve()"],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests: they end the server
        )
        atexit.register(self._close)

    def start(self, order: Order) -> int:
        """Starts a rank; its process id."""
        return int(self._ask(order))

    def codes(self, pids: Sequence[int]) -> dict[int, int]:
        """The exit codes of those that have ended; tells of each once."""
        found: dict[int, int] = self._ask(list(pids))
        return found

    def _ask(self, question: Order | list[int]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@functools.cache
def rank_server() -> RankServer:
    """The server of these tests, started when it is first needed."""
    return RankServer()


def serve() -> None:
    """What the server does until its tests end: it starts ranks, and tells which have ended."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what modules print while they are loaded is no answer
    prepare()
    going: set[int] = set()
    with suppress(EOFError):
        while True:
            question = pickle.load(questions)
            if isinstance(question, Order):
                answer: Any = os.fork()
                if not answer:
                    questions.close()
                    answers.close()
                    be_rank(question)
                    return
                going.add(answer)
            else:
                answer = {pid: code for pid in question if (code := exit_code(pid)) is not None}
                going -= answer.keys()
            pickle.dump(answer, answers)
            answers.flush()
    for pid in going:
        os.kill(pid, signal.SIGKILL)


def prepare() -> None:
    """Makes this process one that ranks can be forked from."""
    for number in DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in MODULES:
        with suppress(ModuleNotFoundError):  # not every torch and DeepSpeed has each of them
            importlib.import_module(name)
    core_watch.STRETCH = math.inf  # tests take one another's cores, and long runs of theirs would say so
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")  # it is kept
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage for each engine, and would go through all modules each time
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert threads in (["python"], ["python", ARROW]), f"ranks would miss threads: {threads}"


def exit_code(pid: int) -> int | None:
    """The code of a rank that has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def be_rank(order: Order) -> None:
    """Turns a fork of the server into a rank, and calls its function."""
    os.setsid()
    for number, path in enumerate([Path(os.devnull), order.folder / "output", order.folder / "errors"]):
        with path.open("ab" if number else "rb") as stream:
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.path[:] = order.paths
    from support.faults import start_as_a_process

    start_as_a_process()
    function, arguments = pickle.loads(order.call)
    value = function(*arguments)
    (order.folder / "result").write_bytes(pickle.dumps(value))
