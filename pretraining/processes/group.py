"""How the processes of a run meet, agree and part; `launchers.py` says which of them this is.

    ranks = find_world(os.environ)
    connect(ranks, choose_device("auto", ranks))
    with shared_errors():                 # start-up: an error on one rank is raised on every rank
        recipe = load(...)
    agree(recipe, "recipe")
    with Watch(ranks):               # the work, of watch.py: an error on one rank ends all of them
        train(...)
    disconnect()

An entry catches `UserError`, prints it where `speaks(ranks, error)`, and calls `exit_now(2)`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from data_prep.common.errors import UserError
from data_prep.common.workers import num_cores
from pretraining.processes.launchers import World

ANSWER_SECONDS = 15.0  # a store answers at once; what does not is another program
INTERRUPTED = "interrupted; the same command continues from the last checkpoint"


class UnreachedError(UserError):
    """Rank 0 is not there to print anything."""


class SharedError(UserError):
    """Raised on every rank at once: nobody needs to be told."""


def choose_device(wanted: Literal["auto", "cpu", "cuda"], ranks: World) -> torch.device:
    """Where this rank computes: a GPU of its own where there are any."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no working GPU"
        raise UserError(
            f"a GPU was asked for, but {reason}\n"
            "take the device `auto` or `cpu`, or install a torch with CUDA and check nvidia-smi"
        )
    count = torch.cuda.device_count()
    if count >= ranks.local_size:
        return torch.device("cuda", ranks.local_rank)
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:  # srun --gpus-per-task=1
        return torch.device("cuda", 0)  # each rank sees its own alone: `connect` checks that it does
    raise UserError(
        f"{ranks.local_size} ranks on {socket.gethostname()}, but {count} GPUs: each rank needs one of its own\n"
        f"start {count} ranks on each machine (torchrun --nproc-per-node {count}), or take the device `cpu`"
    )


def default_threads(ranks: World, environment: Mapping[str, str] = os.environ) -> int:
    """How many threads this rank's arithmetic takes, so that the ranks of a machine share its cores.

    A launcher may have bound each rank to cores of its own, or to the same as its neighbours: once connected, the
    ranks tell one another (all of them must call this), and a core counts by how many ranks may use it.
    """
    chosen = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if chosen.isdigit() and int(chosen) > 0 and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return int(chosen)  # torchrun sets 1 by itself wherever it is not set: that is nobody's choice
    cores = _affinity()
    if ranks.size == 1 or not dist.is_initialized():
        return max(1, num_cores() // ranks.local_size)
    host = socket.gethostname()
    users = Counter(core for name, theirs in gather((host, cores)) if name == host for core in theirs)
    share = sum(1 / users[core] for core in cores) + 1e-6
    if num_cores() < len(cores):  # a container's quota, which all ranks share
        share = min(share, num_cores() / ranks.local_size)
    return max(1, int(share))


def _affinity() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@dataclass
class _Connection:
    """What `connect` opened, for `disconnect` to close."""

    store: Any
    watched: Any
    """the same store for `Watch`: one connection serves one thread at a time"""
    environment: dict[str, str | None]
    """variables as they were before"""


_connection: _Connection | None = None  # as torch.distributed itself: a process belongs to one run


def connect(ranks: World, device: torch.device, timeout: float = 7200.0, patience: float = 300.0) -> None:
    """Joins the process group: gloo between CPUs, NCCL between GPUs.

    `timeout` is how long a collective operation may take, `patience` how long ranks wait at the start for one
    another, both in seconds. `Watch` finds ranks that hang much earlier, and can name them.
    """
    global _connection
    before = _set_environment(ranks, device)
    try:
        store = _meet(ranks, patience)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if ranks.size > 1:
                _check_own_gpus(store, ranks, device, patience)
        watched = _join_group(store, ranks, device, timeout)
    except BaseException:
        _restore(before)
        raise
    _connection = _Connection(store, watched, before)
    if device.type == "cpu":
        atexit.register(disconnect)  # gloo's threads would turn an exit code of 1 into an abort


def disconnect() -> None:
    """Leaves the process group: DeepSpeed's ZeRO-3 may abort at exit where it is still open."""
    global _connection
    atexit.unregister(disconnect)
    if dist.is_initialized():
        dist.destroy_process_group()
    if _connection is not None:
        _restore(_connection.environment)
        _connection = None


def open_stores() -> tuple[Any, Any]:
    """The store of this run, twice: for the main thread and for `Watch`'s."""
    assert _connection is not None, "connect first"
    return _connection.store, _connection.watched


def exit_now(code: int) -> None:
    """Ends the process with this code whatever threads, sockets and destructors would still like to do."""
    _flush()
    os._exit(code)


def speaks(ranks: World, error: Exception) -> bool:
    """Whether this rank prints the error: rank 0, and where nobody reached rank 0 the next one."""
    return ranks.rank == 0 or (isinstance(error, UnreachedError) and ranks.rank == 1)


def _set_environment(ranks: World, device: torch.device) -> dict[str, str | None]:
    """Sets what DeepSpeed and gloo read there, whatever the launcher; returns what was there before."""
    new = {
        "DS_ACCELERATOR": device.type,
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_size),
        "LOCAL_SIZE": str(ranks.local_size),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port),
    }
    if ranks.one_machine and "GLOO_SOCKET_IFNAME" not in os.environ and Path("/sys/class/net/lo").exists():
        new["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name may lead nowhere
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    return before


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _meet(ranks: World, patience: float) -> Any:
    """The store of this run, once every rank has come to it."""
    if ranks.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # no network
    agent = uses_agent_store()
    hosts = ranks.rank == 0 and not agent
    if not hosts:
        _wait_for_listener(ranks, patience)
    try:
        store = _open_store(ranks, hosts)
        if ranks.rank == 0:
            store.set("cloze/ranks", str(ranks.size))
        elif not _has(store, "cloze/ranks", patience if agent else ANSWER_SECONDS):
            raise _port_in_use(ranks)
        others = int(store.get("cloze/ranks"))
        if others != ranks.size or store.add(f"cloze/joined/{ranks.rank}", 1) > 1:
            raise _port_in_use(ranks)
    except (dist.DistError, OSError, LateError) as error:  # LateError: in Python 3.10 no OSError
        if hosts and "in use" not in str(error).lower():
            raise UserError(
                f"rank 0 cannot listen at {ranks.address}:{ranks.port}: {error}\nis MASTER_ADDR the host of rank 0?"
            ) from error
        raise _port_in_use(ranks) from error
    _wait_for_all(store, ranks, patience)
    return store


def uses_agent_store() -> bool:
    """Whether torchrun listens, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(ranks: World, hosts: bool) -> Any:
    """The TCPStore at rank 0's address. Another program there may keep silent: torch would wait for it for ever."""
    opened: Future[Any] = Future()

    def open_it() -> None:
        try:
            opened.set_result(
                dist.TCPStore(  # type: ignore[attr-defined]
                    ranks.address,
                    ranks.port,
                    is_master=hosts,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=ANSWER_SECONDS),
                )
            )
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=open_it, daemon=True).start()
    return opened.result(ANSWER_SECONDS)


def _wait_for_listener(ranks: World, patience: float) -> None:
    """Until something listens where rank 0 should: it may start later than we."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((ranks.address, ranks.port), timeout=ANSWER_SECONDS):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnreachedError(
                    f"rank {ranks.rank} did not reach rank 0 at {ranks.address}:{ranks.port} in {patience:.0f} s: "
                    f"{error}\nwas rank 0 started, is MASTER_ADDR its host, and does no firewall close the port?"
                ) from error
        time.sleep(0.1)


def _wait_for_all(store: Any, ranks: World, patience: float) -> None:
    """Until every rank has joined; rank 0 names those that have not."""
    joined = [f"cloze/joined/{rank}" for rank in range(ranks.size)]
    if ranks.rank > 0:
        if not _has(store, "cloze/complete", patience + ANSWER_SECONDS) or store.get("cloze/complete") != b"yes":
            raise UserError(f"rank 0 at {ranks.address}:{ranks.port} gave up waiting for all ranks")
        return
    deadline = time.monotonic() + patience
    missing = [rank for rank, key in enumerate(joined) if not _has(store, key, deadline - time.monotonic())]
    store.set("cloze/complete", "no" if missing else "yes")
    if missing:
        time.sleep(1)  # the store ends with us: time to read it
        raise UserError(
            f"{name_ranks(missing)} of {ranks.size} did not come in {patience:.0f} s\n"
            f"were all started ({ranks.launcher}), and can their hosts reach {ranks.address}:{ranks.port}?"
        )


def _has(store: Any, key: str, seconds: float) -> bool:
    """Whether the key is there, or comes within so many seconds. (`store.wait` would print a warning of its own.)"""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _port_in_use(ranks: World) -> UserError:
    return UserError(
        f"port {ranks.port} of {ranks.address} is in use by another program or run\n"
        "choose a free one: MASTER_PORT=<port> before the command (torchrun and deepspeed: --master-port <port>)"
    )


def _join_group(store: Any, ranks: World, device: torch.device, timeout: float) -> Any:
    """Makes torch's process group; returns a second connection to the store."""
    try:
        watched = store.clone()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise as_lost(error) from error
    return watched


LOOK_WHY = "its own output or its machine's log says why"


def as_lost(error: object) -> UnreachedError:
    """Where an operation of all ranks fails, one of them has ended, or is cut off."""
    reason = str(error).splitlines()[0]
    return UnreachedError(f"another rank has ended, or cannot be reached any more: {reason}\n{LOOK_WHY}")


def is_lost(error: RuntimeError) -> bool:
    """Whether it is of an operation of all ranks; gloo's have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _check_own_gpus(store: Any, ranks: World, device: torch.device, patience: float) -> None:
    """Two ranks on one GPU would hang NCCL or share its memory: each rank finds them, and raises the same."""
    mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"cloze/gpu/{ranks.rank}", mine)
    keys = [f"cloze/gpu/{rank}" for rank in range(ranks.size)]
    store.wait(keys, timedelta(seconds=patience))
    gpus = [value.decode() for value in store.multi_get(keys)]
    gpu, count = Counter(gpus).most_common(1)[0]
    if count > 1:
        shared = [rank for rank, each in enumerate(gpus) if each == gpu]
        raise SharedError(
            f"{name_ranks(shared)} have the same GPU ({gpu}): each rank needs one of its own\n"
            "start as many ranks on each machine as it has GPUs, and check CUDA_VISIBLE_DEVICES"
        )


def gather(value: Any, error: str | None = None) -> list[Any]:
    """Every rank's value, in the order of ranks. An error that any rank brings instead is raised on all."""
    found: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(found, (value, error))
    except RuntimeError as lost:
        raise as_lost(lost) from lost
    errors = {rank: theirs for rank, (_, theirs) in enumerate(found) if theirs is not None}
    if errors:
        raise SharedError(_joined(errors, len(found)))
    return [each for each, _ in found]


def _joined(errors: Mapping[int, str], ranks: int) -> str:
    """One message of several ranks' messages."""
    by_message: dict[str, list[int]] = {}
    for rank, message in errors.items():
        by_message.setdefault(message, []).append(rank)
    if len(errors) == ranks and len(by_message) == 1:
        return next(iter(by_message))
    return "\n".join(f"{name_ranks(which)}: {message}" for message, which in by_message.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3, … (12 of them)`."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f", … ({len(ranks)} of them)" if len(ranks) > 8 else "")


@contextmanager
def shared_errors() -> Iterator[None]:
    """An error that any rank meets inside is raised on every rank when all have come to the end.

    `agree` may be used inside: ranks that fail before it are heard there.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    try:
        yield
    except (SharedError, UnreachedError):
        raise
    except Exception as error:
        mistake = not isinstance(error, UserError)  # of ours: this rank keeps its traceback
        try:
            gather(None, traceback.format_exc() if mistake else str(error))
        except SharedError as shared:
            if not mistake:
                raise shared from error
        raise
    else:
        gather(None)


def agree(value: Any, what: str) -> None:
    """Raises on every rank unless `value` (of dicts, lists, texts, numbers) is the same on all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    digests = gather(hashlib.sha256(content).hexdigest())
    if len(set(digests)) > 1:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise SharedError(
            f"{what}: {name_ranks(others)} differ{'s' * (len(others) == 1)} from rank 0\n"
            "all ranks need the same command, files and version of the code: check what the machines see"
        )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe, a closed file
            if stream.isatty():
                stream.write("\x1b[?25h")  # a live display hides the cursor
            stream.flush()
