"""What the tests share: small corpora, the real command line, and the real data where it is."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from support.marks import has_compiler, has_gpu
from support.processes import end_runs, made_once

from pretraining.processes.environment import SPINS_AMONG_OTHERS, prepare_process

if TYPE_CHECKING:
    from support.finetuning import Toy, Tune
    from support.training import Place

gc.disable()  # until all tests are collected: while modules load, each collection goes through all that there are
os.environ.setdefault("GOMP_SPINCOUNT", SPINS_AMONG_OTHERS)  # other tests run beside, whatever it looks like now
prepare_process()  # before any test loads torch, as the entries do
if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it once, and torch.compile's parts load Triton
# Containers often forbid it, and then every process compiles all modules anew, and tests their assertions.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Where memory is plentiful, tests write there: a disk takes long to keep what is deleted a moment later.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 8e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# How long it takes to draw an example says more of a busy machine than of the test.
settings.register_profile("house", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("house")

ROOT = Path(__file__).parent.parent
HANDLERS = {
    number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
}
"""Of the signals that commands take for themselves and leave to the end of their process."""
REAL_DATA = Path(os.environ.get("CLOZE_DATA", ROOT / "none")).resolve()

WORDS = (
    "the of and to in a is that it was for on are with as be at this have from or had by not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over "
    "down only way find use may water long little very after words called just where most know river mountain empire"
).split()


KINDS = ("slow", "timed", "slurm")
"""Marks of tests that are not run by default."""
LONGEST = (ROOT / "tests" / "end_to_end", ROOT / "tests")
"""Folders of files that take long: they begin first, since one that begins last keeps all others waiting."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without the kind of tests that is asked for, such as `slow`: each worker would load them all."""
    kind = config.option.markexpr.partition(" ")[0]
    has_none = collection_path.match("test_*.py") and kind in KINDS and kind not in collection_path.read_text()
    return True if has_none else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need real data, a GPU or a C++ compiler if there is none, and says why."""
    items.sort(key=lambda item: item.path.parent not in LONGEST)
    missing = {}
    if not REAL_DATA.is_dir():
        missing["realdata"] = f"no real data: CLOZE_DATA names no folder ({REAL_DATA})"
    if not has_gpu():
        missing["gpu"] = "no GPU"
    if not has_compiler():
        missing["kernels"] = "no C++ compiler"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leaves modules and tests out of garbage collections: DeepSpeed asks for one with each engine."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # after each loop, a collection would go through all modules
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # as many tests as there are cores run side by side


@pytest.fixture(scope="module", autouse=True)
def _freeze_garbage() -> None:
    """Leaves what earlier files have made out of garbage collections too: in the end each takes seconds."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """What a test has started ends with it, and so does what it made of signals: children would inherit it."""
    end_runs()
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data (only for tests marked realdata)."""
    return REAL_DATA


def sentence(draw: random.Random) -> str:
    """Some words with a capital and a full stop."""
    words = [draw.choice(WORDS) for _ in range(draw.randint(3, 25))]
    return " ".join(words).capitalize() + "."


def write_wiki(folder: Path, documents: int = 200, files: int = 4, seed: int = 1) -> Path:
    """A folder of documents as WikiExtractor writes them."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        text = ""
        for index in range(number, documents, files):
            sizes = [draw.randint(1, 6) for _ in range(draw.randint(1, 5))]
            paragraphs = [" ".join(sentence(draw) for _ in range(size)) for size in sizes]
            title = f"Article {index}"
            body = "\n".join([title, "", *paragraphs, ""])
            text += f'<doc id="{index}" url="https://example.org/{index}" title="{title}">\n{body}\n</doc>\n'
        (folder / f"wiki_{number:02}").write_text(text)
    return folder


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    """A small folder in WikiExtractor's format."""
    return write_wiki(tmp_path / "wiki")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Shards and a recipe for runs of seconds, with a folder that all tests of this process see."""
    from support.shards import make_shards
    from support.training import RECIPE, Place

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE)
        make_shards(folder / "data")

    made = made_once(tmp_path_factory.getbasetemp(), "train", make)
    return Place(made / "data", made / "recipe.toml", tmp_path_factory.mktemp("train"))


@pytest.fixture
def place(shared: Place, tmp_path: Path) -> Place:
    """The same with folders of the test's own for runs."""
    return dataclasses.replace(shared, folder=tmp_path)


@pytest.fixture(scope="session")
def straight(shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to: five steps of the first phase, three of the second, with all their checkpoints."""
    from support.training import SAVES, train_straight

    own = tmp_path_factory.getbasetemp()
    return made_once(own, "straight with checkpoints", lambda run: train_straight(shared, run, *SAVES))


@pytest.fixture(scope="session")
def shared_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A small model and a small task to fine-tune it for, in folders that all tests see."""
    from support.finetuning import write_toy

    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(shared_toy: Toy, tmp_path: Path) -> Toy:
    """The same with a folder of the test's own for results."""
    return dataclasses.replace(shared_toy, folder=tmp_path)


@pytest.fixture(scope="session")
def straight_toy(shared_toy: Toy) -> dict[str, Any]:
    """What fine-tuning for the small task leaves, where nothing happens to it."""
    from support.finetuning import fine_tune, outcome
    from support.training import assert_well

    assert_well(fine_tune(shared_toy.command("straight")))
    return outcome(shared_toy.folder / "straight")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of the test's own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield folder
    for mounted in (folder / "run" / "checkpoints", folder):  # which one test mounts
        subprocess.run(["umount", "-l", mounted], capture_output=True)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def unpaired_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards without pairs, which every architecture reads."""
    from support.shards import make_shards

    return made_once(tmp_path_factory.getbasetemp(), "unpaired", lambda folder: make_shards(folder, pairs="none"))


@pytest.fixture(scope="session")
def other_data(shared: Place) -> Path:
    """Other shards with the same vocabulary, nothing of them held out."""
    from support.shards import make_shards

    folder = make_shards(shared.folder / "other", validation=0)
    shutil.copy(shared.data / "vocab.txt", folder / "vocab.txt")
    return folder


@pytest.fixture
def leaves_group() -> Iterator[None]:
    """Leaves the process group of a command that is called in this process."""
    yield
    from pretraining.processes.group import disconnect

    disconnect()


@pytest.fixture
def tune(leaves_group: None) -> Tune:
    """`run_main` of an entry of finetuning/, run_task.py or another, which leaves the process group."""
    from support.commands import run_main
    from support.finetuning import call

    from pretraining.processes.group import disconnect

    def run(words: Sequence[object], entry: str = "run_task", code: int = 0) -> str:
        disconnect()
        return run_main(partial(call, entry), *words, code=code)

    return run
