"""The checks of a rank: code, data and disk as its node sees them, its GPU, and its network."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import writable
from pretraining.config.overrides import find_mixture_faults, load_recipe
from pretraining.data.corpora import Corpora
from pretraining.mesh.cuts import find_crossing
from pretraining.objectives.declaration import num_parameters
from pretraining.processes.ahead import await_call
from pretraining.reporting.hardware import synchronize

Result = TypeVar("Result")
ROOT = Path(__file__).parent.parent
FOLDERS, SOURCES = ("data_prep", "pretraining", "finetuning", "cluster"), {".py", ".toml", ".cpp", ".h"}
CPU, LINK, INSIDE = "CPU", "link", "links within the node"
BLOCK = 8 << 20  # bytes that are written to try a disk
CHECKPOINTS, BYTES = 2, 12  # number of checkpoints that need room, and their bytes a parameter
TAKEN, CONTEXT = 0.1, 2 << 30  # share of a GPU's memory, and bytes, that may be in use before: CUDA itself needs some
ROUNDS, REPEATS = 3, 5


@dataclass
class Health:
    """The report of a rank. The first rank of a node also reports on the node."""

    node: str
    same: dict[str, str] = field(default_factory=dict)  # what must be equal on all nodes: code, data, versions, GPUs
    faults: dict[str, str] = field(default_factory=dict)  # messages of failed checks, by check
    gone: bool = False  # whether the data is missing altogether
    rate: float = 0.0  # FLOP/s of matrix products
    free: float | None = None  # free bytes, if this rank can write into the folder of the run
    links: list[float | None] = field(default_factory=list)  # bytes a second to a neighbour, by round; 0 for nothing
    inside: list[float | None] = field(default_factory=list)  # the same to ranks of its node
    all_reduce: float = 0.0  # bytes a second on the bus

    def run_check(self, deadline: float, part: str, work: Callable[[], Result]) -> Result | None:
        """Runs a check in a thread, since a broken GPU, network or disk may never answer. A failure becomes a fault."""
        start = time.monotonic()
        if start > deadline:
            return None  # an earlier check did not end
        try:
            return await_call(deadline - start, work)
        except LateError:
            self.faults[part] = f"no answer in {deadline - start:.0f} s"
        except (UserError, OSError, RuntimeError) as error:
            self.faults[part] = str(error) if isinstance(error, UserError) else str(error).partition("\n")[0]
        return None


def describe_code() -> dict[str, str]:
    """Returns a digest of the code and recipes as this node sees them, and the versions of the libraries."""
    digest, driver = hashlib.sha256(), Path("/sys/module/nvidia/version")
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
    return {
        "code": digest.hexdigest()[:12],
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "numpy")},
        "CUDA": str(torch.version.cuda),
        "driver": driver.read_text().strip() if driver.exists() else "none",
        "NCCL": ".".join(map(str, nccl)) or "none",
    }


def check_data(words: Sequence[str]) -> Corpora:
    """Reads the manifests of the shards, and checks that all files exist with their sizes. Contents are not read."""
    corpora = Corpora.read(words, waits=False)
    for path, size in (
        (part.folder / file.path, file.size) for part in corpora.parts for file in part.manifest.files()
    ):
        there = path.stat().st_size if path.is_file() else -1
        if there != size:
            found = "missing" if there < 0 else f"{there:,} bytes, its record says {size:,}"
            raise DamageError(f"{path}: {found}\nmount its file system, or make the data again")
    return corpora


def try_disk(folder: Path) -> float:
    """Writes some bytes into a folder, and returns the free bytes of its file system.

    The file has no name, so that nothing of it remains however this process ends.
    """
    with writable(folder, "\nmake room, or name another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(os.urandom(BLOCK))
            os.fsync(file.fileno())
    return free


def check_recipe(
    free: float, recipe: Path, overrides: Sequence[str], corpora: Corpora, ranks: int, per_node: int, done: int = 0
) -> None:
    """Raises UserError if the disk has no room for checkpoints, if ranks of several nodes would share a model unasked,
    or if phases after those `done` cannot be mixed. Does not look up the sizes of a base model."""
    settings = load_recipe(recipe, overrides, ranks=ranks, lengths=corpora.lengths())
    faults = [find_crossing(settings.parallel.tensor, per_node, settings.parallel.across_nodes)]
    faults += find_mixture_faults(settings, corpora, done)
    if found := [*filter(None, faults)]:
        raise UserError("\n".join(found))
    needed = CHECKPOINTS * BYTES * num_parameters(settings.shape(corpora.common))
    if settings.base_model is None and free < needed:
        told = f"{free / 1e9:,.2f} GB are free, and {CHECKPOINTS} checkpoints take {needed / 1e9:,.2f} GB"
        raise UserError(f"{told}\nmake room, or name another --out")


def describe_gpu(report: Health, device: torch.device) -> str:
    """Describes the GPUs that this rank sees. Faults of its own GPU go into the report."""
    if device.type == "cpu":
        return CPU
    free, total = torch.cuda.mem_get_info(device)
    found, taken = torch.cuda.get_device_properties(device), total - free - torch.cuda.memory_reserved(device)
    if taken > max(TAKEN * total, CONTEXT):
        report.faults["GPU"] = f"{taken / 2**30:.1f} GiB are taken by other programs"
    return f"{torch.cuda.device_count()} x {found.name}, {total / 2**30:.0f} GiB, {found.major}.{found.minor}"


def find_partners(names: Sequence[str], rank: int) -> list[int | None]:
    """Returns the rank on another node with which a rank exchanges data, for each round; None if it pauses.

    Nodes form a ring, so that each has two links. Two rounds test all links, but for one of a ring of odd length.
    """
    ranks: dict[str, list[int]] = {}
    for other, name in enumerate(names):
        ranks.setdefault(name, []).append(other)
    ring, node = list(ranks.values()), list(ranks).index(names[rank])
    found: list[int | None] = [None] * ROUNDS
    for link in range(len(ring) if len(ring) > 2 else len(ring) - 1):
        ends, last = (link, (link + 1) % len(ring)), len(ring) % 2 and link == len(ring) - 1
        if node in ends:
            others, place = ring[sum(ends) - node], ring[node].index(rank)
            found[2 if last else link % 2] = others[place] if place < len(others) else None
    return found


def find_neighbours(names: Sequence[str], rank: int) -> list[int | None]:
    """Returns the rank of its node with which a rank exchanges data, for each round; they form a ring, as nodes do."""
    own = [other for other, name in enumerate(names) if name == names[rank]]
    places = find_partners([str(other) for other in own], own.index(rank))
    return [None if place is None else own[place] for place in places]


def exchange(other: int, device: torch.device, group: Any) -> float:
    """Measures bytes a second to a rank and back, the best of several: the first also opens the connection."""
    payload = torch.zeros((64 if device.type == "cuda" else 4) << 20, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for send in (True, False) if dist.get_rank() < other else (False, True):
            dist.send(payload, other, group) if send else dist.recv(payload, other, group)

    return 2 * payload.nbytes / min(time_repeats(there_and_back, device))


def reduce_all(device: torch.device, group: Any) -> float:
    """Measures the bus bandwidth of an all-reduce in bytes a second."""
    payload = torch.zeros((16 if device.type == "cuda" else 1) << 20, device=device)
    seconds = min(time_repeats(lambda: dist.all_reduce(payload, group=group), device))
    return 2 * (1 - 1 / dist.get_world_size()) * payload.nbytes / seconds


def time_repeats(work: Callable[[], object], device: torch.device) -> list[float]:
    """Measures the seconds of each of REPEATS calls."""

    def work_and_wait() -> None:
        work()
        synchronize(device)

    return timeit.repeat(work_and_wait, number=1, repeat=REPEATS)
