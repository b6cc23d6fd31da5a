"""Under MPI every rank works, and what goes wrong on one is told with its name, and ends them all."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, write_wiki
from support.commands import has_ended, start, wait_for
from support.shards import MPIRUN, command

from data_prep.work import WorkFolder

pytestmark = pytest.mark.slow
RANK = "OMPI_COMM_WORLD_RANK"
PATIENT = """
import os, subprocess, sys, time
from pathlib import Path
folder, ranks = Path(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
process = subprocess.Popen(sys.argv[2:])
(folder / f"pid-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(str(process.pid))
code = process.wait()
(folder / f"code-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(str(code))
while len(list(folder.glob("code-*"))) < ranks:
    time.sleep(0.05)
"""
"""Stands for a launcher that lets other ranks go on where one has ended, as srun does."""
BROKEN = """
import importlib.machinery, importlib.util, os, sys
folders = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
spec = importlib.machinery.PathFinder.find_spec("sentencex", folders)
module = importlib.util.module_from_spec(spec)
sys.modules["sentencex"] = module
spec.loader.exec_module(module)
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    def segment(*_):
        raise RuntimeError("a fault of this host")
    WHAT
"""
"""A library that does not work on one host."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes text that keeps ranks busy for a while."""
    return write_wiki(tmp_path_factory.mktemp("corpus") / "wiki", documents=1500, files=12)


class Ranks:
    """Ranks whose launcher ends none of them."""

    def __init__(self, number: int, corpus: Path, folder: Path) -> None:
        """Starts them, and waits until they are at work on examples."""
        self.folder, self.out = folder, folder / "out"
        wrapped = [sys.executable, "-c", PATIENT, str(folder), *command(corpus, self.out, "--duplicates", "60")]
        self.process = start([*MPIRUN, "-n", str(number), *wrapped])
        wait_for(lambda: list(self.out.glob(".cloze-work/examples-*.jsonl")))
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def watching(self, rank: int) -> psutil.Process:
        """The process of a rank that the launcher started."""
        return psutil.Process(int((self.folder / f"pid-{rank}").read_text()))

    def working(self, rank: int) -> psutil.Process:
        """The process of a rank that does its work."""
        child: psutil.Process = self.watching(rank).children()[0]
        return child

    def end(self, seconds: float = 60) -> tuple[list[int], str]:
        """Waits for the end of all; returns their exit codes and what they said."""
        before = time.monotonic()
        output, errors = self.process.communicate(timeout=seconds + 20)
        assert time.monotonic() - before < seconds
        codes = [int(file.read_text()) for file in sorted(self.folder.glob("code-*"))]
        wait_for(lambda: all(has_ended(member.pid) for member in self.family))
        return codes, output + errors


@pytest.fixture
def begin(corpus: Path, tmp_path: Path) -> Iterator[Callable[[str], Ranks]]:
    """Starts three ranks in a folder."""
    begun: list[Ranks] = []

    def start_ranks(name: str) -> Ranks:
        (tmp_path / name).mkdir()
        begun.append(Ranks(3, corpus, tmp_path / name))
        return begun[-1]

    yield start_ranks
    for found in begun:
        found.process.kill()
        found.process.communicate()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_process_is_killed_ends_all_with_its_name(rank: int, begin: Callable[[str], Ranks]) -> None:
    ranks = begin("ranks")
    ranks.working(rank).kill()
    codes, said = ranks.end(20)
    assert codes == [2, 2, 2]
    name = r"rank 2 on \S+: " if rank else ""
    assert re.search(rf"error: {name}the main process was killed from outside with SIGKILL", said)
    assert "the same command" in said
    assert "Traceback" not in said


def test_a_run_that_is_left_without_text_ends_on_all_ranks(corpus: Path, tmp_path: Path) -> None:
    """Rank 0 removes the folder in which they hear of one another; the launcher waits for each rank."""
    asked = command(corpus, tmp_path / "out", "--min-words", "100000")
    started = start([*MPIRUN, "-n", "2", sys.executable, "-c", PATIENT, str(tmp_path), *asked])
    _, errors = started.communicate(timeout=120)
    assert "the filters leave no document" in errors
    assert [(tmp_path / f"code-{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_a_rank_that_vanishes_without_a_word_ends_all_within_a_minute(begin: Callable[[str], Ranks]) -> None:
    """The first and the last, side by side, since it takes long."""
    begun: dict[int, Ranks] = {}
    for gone in (0, 2):
        begun[gone] = begin(str(gone))
        begun[gone].watching(gone).kill()
    for gone, ranks in begun.items():
        codes, said = ranks.end(60)
        assert [code for rank, code in enumerate(codes) if rank != gone] == [76, 76]
        assert re.search(rf"error: rank {gone} on \S+ is gone \(nothing was heard of it for 40 s\)", said)


def test_a_rank_that_is_busy_for_longer_than_silence_may_last_is_not_gone(begin: Callable[[str], Ranks]) -> None:
    ranks = begin("ranks")
    worker = ranks.working(1)
    worker.suspend()
    time.sleep(50)
    worker.resume()
    codes, said = ranks.end(300)
    assert codes == [0, 0, 0], said
    assert "is ready, in" in said


def launch(ranks: int, corpus: Path, out: str, environment: dict[str, str], *wrapper: str) -> tuple[int, str]:
    """Runs shard.py in ranks; returns the exit code and what was said."""
    done = subprocess.run(
        [*MPIRUN, "-n", str(ranks), *wrapper, *command(corpus, Path(out))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise ImportError('not on this host')", "ImportError: not on this host"),
        ("module.segment = segment", "RuntimeError: a fault of this host"),
    ],
)
def test_a_fault_of_one_rank_is_told_with_its_traceback(what: str, said: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sentencex.py").write_text(BROKEN.replace("WHAT", what))
    path = f"{tmp_path}/broken:{ROOT}"
    code, errors = launch(2, corpus, str(tmp_path / "out"), {"PYTHONPATH": path})
    assert code == 1
    assert re.search(r"rank 1 on \S+: *\n?(error: )?Traceback", errors), errors
    assert said in errors
    assert "interrupted" not in errors


@pytest.mark.parametrize(("corpus", "message"), [("nowhere", "no such file or folder"), ("empty", "error: --docs")])
def test_a_mistake_of_the_user_is_told_once(corpus: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, said = launch(3, tmp_path / corpus, str(tmp_path / "out"), {})
    assert code == 2
    assert said.count(message) == 1
    assert "Traceback" not in said


def test_an_output_folder_that_a_host_does_not_see_is_found_before_any_work(corpus: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r} + '/' + os.environ[{RANK!r}]); os.execv(sys.argv[1], sys.argv[1:])"
    )
    status, said = launch(2, corpus, "out", {}, sys.executable, "-c", code)
    assert status == 2
    assert re.search(r"error: out: not seen by rank 1 on \S+\n", said)
    assert "give --out a folder that all hosts share" in said
    assert not WorkFolder(folders[0] / "out").read_records("documents")
    assert not list(folders[1].iterdir())
