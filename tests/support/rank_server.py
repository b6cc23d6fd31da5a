"""Ranks as forks of one process that has loaded all modules: loading them takes longer than most runs of a test.

A rank is as good as a fresh process. Its session, environment and streams are its own, signals are at their defaults
whatever the tests' parent ignores, no thread is at work before the fork, and what programs do at their ends is done.
"""

import atexit
import fcntl
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MODULES = """
pretraining.train pretraining.model.bert pretraining.model.masks pretraining.model.piece_head
pretraining.optimizers.steps.adamw pretraining.optimizers.steps.lamb data_prep.vocabulary.encoders.wordpiece
support.faults support.training rich._emoji_codes finetuning.run_task finetuning.run_ner
deepspeed.module_inject.auto_ep_layer deepspeed.runtime.superoffload.superoffload_stage3
deepspeed.runtime.zero.muon.muon_optimizer hypothesis pyarrow.compute pytest torch._dynamo
torch._subclasses.schema_check_mode torch.profiler._cupti_monitor torch.utils.tensorboard
transformers.models.bert.modeling_bert typeguard tyro._backends._tyro_backend
"""
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


def ask_server(question: Order | list[int]) -> Any:
    """Starts a rank, and returns its process id; or returns the exit codes of those of these ranks that have ended, of
    each once."""
    server = reach_server()
    server.send(question)
    return server.recv()


@functools.cache
def reach_server() -> Connection:
    """Reaches the server, which all processes of a test run share; starts it where there is none."""
    address = f"{tempfile.gettempdir()}/cloze-ranks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    with open(f"{tempfile.gettempdir()}/cloze-ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            server = Client(address)
        except OSError:  # none, or one that all have left
            start_server(address)
            server = Client(address)
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing does not, where a process that was forked meanwhile goes on
    atexit.register(server.close)
    return server


def start_server(address: str) -> None:
    """Starts the server; returns when it can be reached."""
    reading, writing = os.pipe()
    subprocess.Popen(
        [sys.executable, "-c", f"from support.rank_server import serve; serve({address!r}, {writing})"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests: the server ends when they have left
        pass_fds=[writing],
    ).returncode = 0  # nobody waits for it
    os.close(writing)
    with os.fdopen(reading) as ready:
        assert ready.read() == "ready", "no server of ranks"


def serve(address: str, ready: int) -> None:
    """What the server does until the last process leaves: it starts ranks, and tells which have ended."""
    os.dup2(2, 1)  # what modules print while they are loaded is no answer
    prepare()
    Path(address).unlink(missing_ok=True)
    listener = Listener(address, backlog=16)
    os.write(ready, b"ready")
    os.close(ready)
    door = listener._listener._socket  # type: ignore[attr-defined]
    ranks = {listener.accept(): set[int]()}
    while ranks:
        for asking in wait([door, *ranks]):
            if asking is door:
                ranks[listener.accept()] = set()
                continue
            assert isinstance(asking, Connection)
            try:
                question = asking.recv()
            except (EOFError, OSError):  # it has left
                for pid in ranks.pop(asking):
                    os.kill(pid, signal.SIGKILL)
                continue
            if isinstance(question, Order):
                answer: Any = os.fork()
                if not answer:
                    for mine in (door, *ranks):
                        mine.close()
                    be_rank(question)
                    return
                ranks[asking].add(answer)
            else:
                answer = {pid: code for pid in question if (code := exit_code(pid)) is not None}
                ranks[asking] -= answer.keys()
            with suppress(OSError):
                asking.send(answer)
    listener.close()


def prepare() -> None:
    """Makes this process one that ranks can be forked from."""
    for number in DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # while modules load, each collection goes through all that there are
    for name in MODULES.split():
        with suppress(ModuleNotFoundError):  # not every torch and DeepSpeed has each of them
            importlib.import_module(name)
    loaded = [name for name in sys.modules if name.startswith("benchmarks")]
    assert not loaded, f"copies of the project would write their results here, by {loaded}"
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")  # it is kept
    for context in ("target_context", "typing_context"):  # of numba, which loads sixty modules for its first function
        getattr(importlib.import_module("numba.core.registry").cpu_target, context).refresh()
    gc.enable()
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
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # it takes a third of a second to take an interpreter of so many modules apart
