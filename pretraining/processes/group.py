"""How the processes of a run, which are called ranks, meet and agree.

    connect(world, choose_device("auto", world))
    with shared_errors():        # start-up: an error on one rank is raised on every rank
        recipe = load(...)
        agree(recipe, "recipe")
    with Watch(world):           # the work, of watchdog.py: an error on one rank ends all of them
        train(...)
    disconnect()

launchers.py says which of the ranks this process is, and ending.py how it ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.common.capacity import list_cores, num_cores
from data_prep.common.errors import LostError, SharedError, UnreachedError, UserError, name_ranks
from data_prep.common.launchers import World
from pretraining.devices import explain_absence, explain_unused, find_kind, require_code
from pretraining.processes.ahead import await_call
from pretraining.processes.meeting import CHOICE, ask_rank_0, find_interface, meet
from pretraining.processes.signing import SignedStore, restart

LAZY = "TORCH_GLOO_LAZY_INIT"
"""The variable by which PyTorch lets gloo connect two ranks when they first speak; otherwise every rank is connected to
every other before the first step."""
NCCL_ENDS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
"""Variables by which torch ends a rank whose NCCL operation fails or takes too long, or whose NCCL watchdog is silent.
That would be before `Watch` names the rank to blame, and with an exit code that says nothing."""
NCCL_CHOICE = "NCCL_SOCKET_IFNAME"
"""The variable that names the network interface by which NCCL's ranks find one another."""
TAG = 0x766F7465  # of the messages of `find_greatest`, among others of the same group
TIMEOUT = 7200.0
"""Seconds that a collective operation may take; `Watch` finds ranks that hang much earlier."""
LEAVE_SECONDS = 10.0  # for NCCL, which may wait for ever: all is done, and `exit_now` leaves it to the system


def choose_device(wanted: Literal["auto", "cpu", "cuda"], world: World) -> torch.device:
    """Where this rank computes: on a GPU of its own where there are any."""
    if wanted == "cpu":
        return torch.device("cpu")
    if find_kind() == "cpu" and wanted == "auto":
        if (unused := explain_unused()) and world.local_rank == 0:
            warnings.warn(unused, stacklevel=2)
        return torch.device("cpu")
    if find_kind() == "cpu":
        why, cure = explain_absence()
        raise UserError(f"a GPU was asked for, but {why}\n{cure}, or take the device `auto` or `cpu`")
    count = torch.cuda.device_count()
    if count >= world.local_size:
        return require_code(torch.device("cuda", world.local_rank))
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:  # srun --gpus-per-task=1
        return require_code(torch.device("cuda", 0))  # its own, which it alone sees: `connect` checks that
    raise UserError(
        f"{world.local_size} ranks on {socket.gethostname()}, but {count} GPUs: each rank needs one of its own\n"
        f"start {count} ranks on each machine (torchrun --nproc-per-node {count}), or take the device `cpu`"
    )


def default_threads(world: World, environment: Mapping[str, str] = os.environ) -> int:
    """How many threads this rank's arithmetic takes, so that the ranks of a machine share its cores.

    A launcher may have bound ranks to cores, alone or together with others. Once connected, ranks therefore tell one
    another their cores, so all of them must call this, and a core counts by how many ranks may use it.
    """
    host, cores = socket.gethostname(), list_cores()
    told = gather((host, cores))  # also where others may have no variable that decides
    chosen = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if chosen.isdigit() and int(chosen) > 0 and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return int(chosen)  # torchrun sets 1 wherever the variable is not set: nobody chose that
    if len(told) == 1:
        return max(1, num_cores() // world.local_size)
    users = Counter(core for name, bound in told if name == host for core in bound)
    share = sum(1 / users[core] for core in cores) + 1e-6
    if num_cores() < len(cores):  # a container's quota, which all ranks share
        share = min(share, num_cores() / world.local_size)
    return max(1, int(share))


_connection: tuple[SignedStore, SignedStore, dict[str, str | None]] | None = None
"""State that `disconnect` undoes: two connections to the store, and the environment variables from before."""


_host_group: Any = None
"""The gloo group beside that of NCCL."""


def connect(
    world: World, device: torch.device, timeout: float = TIMEOUT, patience: float = 300.0, folder: Path | None = None
) -> None:
    """Joins the process group: gloo between CPUs, NCCL between GPUs, whose hosts have a group of gloo besides.

    NCCL connects its ranks when they first join a tensor of a GPU, which is within `Watch`: at the start they meet over
    gloo, where a rank that is gone or cannot be reached is told. (Given its device, torch would connect NCCL at once.)
    `timeout` is how long a collective operation may take, `patience` how long ranks wait at the start for one
    another, both in seconds. `Watch` finds ranks that hang much earlier, and can name them. In the folder, which all
    ranks share, by default the current one, their secret lies while they meet.
    """
    global _connection
    before = _set_environment(world, device)
    try:
        store = meet(world, patience, folder or Path())
        interface = None if world.one_machine else find_interface(store, world, patience)
        if interface is not None:
            before[CHOICE] = None
            os.environ[CHOICE] = interface
            if device.type == "cuda" and NCCL_CHOICE not in os.environ:
                before[NCCL_CHOICE] = None
                os.environ[NCCL_CHOICE] = f"={interface}"  # exactly this name, not one that begins so
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if world.size > 1:
                _check_own_gpus(store, world, device, patience)
        watch_store = _join_group(store, world, device, timeout)
    except BaseException as error:
        _restore(before)
        if isinstance(error, dist.DistError):  # the store has ended with rank 0
            raise LostError(error) from error
        raise
    _connection = store, watch_store, before


def disconnect() -> None:
    """Leaves the process group after work that went well, if that comes to an end; after errors use `exit_now`."""
    global _connection, _host_group
    if dist.is_initialized():
        with suppress(Exception):
            await_call(LEAVE_SECONDS, _leave_group)
    _host_group = None
    if _connection is not None:
        _restore(_connection[2])
        _connection = None


def _leave_group() -> None:
    """Ends torch's process group, by way of DeepSpeed where it has worked in it: it would otherwise keep groups of that
    one for the next. What goes wrong is a warning, since all work is done."""
    comm = sys.modules.get("deepspeed.comm.comm")
    try:
        (comm if comm is not None and comm.cdb is not None else dist).destroy_process_group()
    except Exception as error:
        warnings.warn(f"the process group did not end well: {str(error).partition(chr(10))[0]}", stacklevel=1)


def find_device(group: Any = None) -> torch.device:
    """Returns the device of tensors that a group joins, by default all ranks: NCCL takes none of the host's."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def host_group() -> Any:
    """The gloo group over which ranks speak on their hosts, whatever their GPUs do."""
    return dist.group.WORLD if _host_group is None else _host_group


def wait_for_all() -> None:
    """Waits until all ranks have come here on their hosts, whatever their GPUs still do."""
    dist.barrier(host_group())


def open_stores() -> tuple[SignedStore, SignedStore]:
    """Two connections to the store of this run, for the main thread and the thread of `Watch`: a connection serves
    one thread at a time."""
    assert _connection is not None, "connect first"
    return _connection[:2]


def _set_environment(world: World, device: torch.device) -> dict[str, str | None]:
    """Sets the variables that DeepSpeed and gloo read, whatever the launcher; returns what they were before."""
    numbers = {"RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_PORT": world.port, "LOCAL_RANK": world.local_rank}
    numbers |= {"LOCAL_WORLD_SIZE": world.local_size, "LOCAL_SIZE": world.local_size}
    new = {name: str(number) for name, number in numbers.items()}
    new |= {"DS_ACCELERATOR": device.type, "MASTER_ADDR": world.address}
    if world.one_machine and CHOICE not in os.environ and Path("/sys/class/net/lo").exists():
        new[CHOICE] = "lo"  # the machine's own name may lead nowhere
    new[LAZY] = os.environ.get(LAZY, "1")
    if device.type == "cuda":
        new |= {name: os.environ.get(name, "0") for name in NCCL_ENDS}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    return before


def _restore(before: Mapping[str, str | None]) -> None:
    """Gives environment variables the values from before `connect`."""
    for name in before:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in before.items() if value is not None})


def _join_group(store: SignedStore, world: World, device: torch.device, timeout: float) -> SignedStore:
    """Makes torch's process group; returns a second connection to the store."""
    global _host_group
    try:
        watch_store = store.clone()
        store.raw.set_timeout(timedelta(seconds=timeout))  # of ranks for one another, as torch uses the group
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"group/{restart()}", store.raw),  # type: ignore[attr-defined]
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout),
        )
        if device.type == "cuda":
            _host_group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
        find_greatest(torch.zeros(1), host_group())  # connects the ranks: one that dies from here on is noticed
    except RuntimeError as error:
        raise LostError(error) from error
    return watch_store


def _check_own_gpus(store: SignedStore, world: World, device: torch.device, patience: float) -> None:
    """Refuses two ranks on one GPU, which would hang NCCL or share its memory; all ranks raise the same error."""
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    ask_rank_0(store, world, "gpu", own, _refuse_shared_gpu, patience)


def _refuse_shared_gpu(gpus: Sequence[str]) -> str:
    gpu, count = Counter(gpus).most_common(1)[0]
    if count > 1:
        sharers = [rank for rank, other in enumerate(gpus) if other == gpu]
        raise UserError(
            f"{name_ranks(sharers)} have the same GPU ({gpu}): each rank needs one of its own\n"
            "start as many ranks on each machine as it has GPUs, and check CUDA_VISIBLE_DEVICES"
        )
    return ""


def place() -> tuple[int, int]:
    """Returns this rank and the number of ranks: 0 and 1 where no ranks are connected."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: Any, error: str | None = None) -> list[Any]:
    """Collects a value from every rank, in the order of ranks, so that all of them know all values.

    A rank that has no value because something failed brings the message of its error instead, and that is raised on
    every rank. All ranks must call this together. Values are of JSON, which carries no code; tuples become lists.
    """
    brought: list[Any] = [(value, error)]
    if place()[1] > 1:
        brought = [json.loads(message) for message in exchange(json.dumps([value, error]).encode())]
    errors = {rank: message for rank, (_, message) in enumerate(brought) if message is not None}
    if errors:
        raise SharedError(_join_messages(errors, len(brought)))
    return [own for own, _ in brought]


def exchange(message: bytes) -> list[bytes]:
    """Returns the messages of all ranks, in the order of ranks; all ranks call it together."""
    own, group = torch.frombuffer(bytearray(message), dtype=torch.uint8), host_group()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(place()[1])]
    try:
        dist.all_gather(sizes, torch.tensor([len(own)]), group)
        padded = torch.nn.functional.pad(own, (0, max(map(int, sizes)) - len(own)))
        told = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(told, padded, group)
    except RuntimeError as lost:
        raise LostError(lost) from lost
    return [each[: int(size)].numpy().tobytes() for each, size in zip(told, sizes, strict=True)]


def gather_rows(own: Tensor) -> tuple[list[int], Tensor]:
    """Joins the rows of all ranks, in the order of ranks; returns also their numbers, of which rank 0 has at least one.
    All ranks call it together, with tensors where their group joins them."""
    if place()[1] == 1:
        return [len(own)], own
    counts, shapes = zip(*gather([len(own), [*own.shape[1:]]]), strict=True)
    padded = own.new_zeros(max(counts), *shapes[0])
    if len(own):
        padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in counts]
    try:
        dist.all_gather(found, padded)
    except RuntimeError as lost:
        raise LostError(lost) from lost
    return [*counts], torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])


def _join_messages(messages: Mapping[int, str], ranks: int) -> str:
    """One text for the messages of several ranks: equal ones are told once, and without numbers if all ranks agree."""
    speakers: dict[str, list[int]] = {}
    for rank, message in messages.items():
        speakers.setdefault(message, []).append(rank)
    if len(messages) == ranks and len(speakers) == 1:
        return next(iter(speakers))
    return "\n".join(f"{name_ranks(which)}: {message}" for message, which in speakers.items())


@contextmanager
def shared_errors() -> Iterator[None]:
    """Makes an error of one rank an error of all: ranks wait for one another at the end of the block, and if any has
    failed, every rank raises its message.

    `gather` and `agree` may be used inside: a rank that failed before them is heard there.
    """
    if place()[1] == 1:
        yield
        return
    try:
        yield
    except (SharedError, UnreachedError):
        raise  # the other ranks know it, or cannot be told
    except UserError as error:
        gather(None, str(error))  # raises it, here as on the others
    except Exception:
        with suppress(SharedError):
            gather(None, traceback.format_exc())
        raise  # a mistake of the program keeps its traceback on this rank
    else:
        gather(None)


def agree(value: Any, what: str) -> None:
    """Checks that all ranks have the same value (of dicts, lists, texts, numbers); otherwise every rank raises an
    error that says of `what` the ranks have different ones."""
    content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    digests = gather(hashlib.sha256(content).hexdigest())
    if len(set(digests)) > 1:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise SharedError(
            f"{what}: {name_ranks(others)} differ{'s' * (len(others) == 1)} from rank 0\n"
            "all ranks need the same command, files and version of the code: check what the machines see"
        )


def find_greatest(own: Tensor, group: Any = None) -> Tensor:
    """Returns the element-wise maximum over the ranks of a gloo group; all of them call it together.

    gloo's own all-reduce hands numbers from rank to rank around all of them, twice: among 1,024 ranks, 2,046 messages
    one after another in every step. Here it is 10, and each rank needs connections to few others: in each turn it tells
    what it knows to the one so many places after it, and hears the one as many before it: 1, 2, 4 … places. After the
    last, everyone has heard of everyone; of some twice, which changes no maximum.
    """
    group = dist.group.WORLD if group is None else group
    rank, ranks, distance = group.rank(), group.size(), 1
    while distance < ranks:
        heard = torch.empty_like(own)
        telling = group.send([own], (rank + distance) % ranks, TAG)
        group.recv([heard], (rank - distance) % ranks, TAG).wait()
        telling.wait()
        own = torch.maximum(own, heard)
        distance *= 2
    return own
