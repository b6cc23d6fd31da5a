"""shard.py writes the same bytes however it is run, and loses nothing whatever happens to it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import write_wiki
from support.commands import has_ended, kill_group, run_main, wait_for
from support.marks import slow
from support.sharding import begin, command, tree

from data_prep import shard
from data_prep.shards import MANIFEST
from data_prep.work import WorkFolder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes text enough for several tasks in every step."""
    return write_wiki(tmp_path_factory.mktemp("corpus") / "wiki", documents=6000, files=12)


LONG = ("--duplicates", "60")
"""A run that goes on for longer than a test takes, however busy the machine is."""


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Finds out what an undisturbed run with one worker writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    subprocess.run(command(corpus, out, "--workers", "1"), check=True, capture_output=True)
    found = tree(out)
    assert sum(path.stat().st_size for path in corpus.iterdir()) > 4 << 20
    assert sum(name.startswith("length-32/duplicate-0/") for name in found) > 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 2])
def test_mpi_ranks_write_the_same_bytes(ranks: int, corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    launch = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    done = subprocess.run([*launch, *command(corpus, tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is ready, in" in done.stdout
    assert "\x1b" not in done.stdout  # though mpirun gives its ranks a pseudo-terminal
    assert tree(tmp_path / "out") == expected


def test_kills_change_no_byte(corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    draw = random.Random(7)
    kills, out = 0, tmp_path / "out"
    while kills < 3:
        process = subprocess.Popen(
            command(corpus, out, "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=draw.uniform(0.8, 3.5))
        except subprocess.TimeoutExpired:
            kill_group(process)
            kills += 1
        if (out / MANIFEST).exists():  # too fast for us: begin anew
            shutil.rmtree(out)
    subprocess.run(command(corpus, out, "--workers", "2"), check=True, capture_output=True)
    assert tree(out) == expected


def test_a_worker_killed_from_outside_is_named(corpus: Path, tmp_path: Path) -> None:
    process = begin(corpus, tmp_path / "out", *LONG)
    [main] = psutil.Process(process.pid).children()
    workers = [worker for server in main.children() for worker in server.children()]
    assert workers
    os.kill(workers[0].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a worker process was killed from outside" in errors
    assert "run the same command again to continue" in errors


def test_ctrl_c_leaves_what_is_done_and_tells_a_way_on(corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    process = begin(corpus, tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues where it stopped" in errors
    assert "Traceback" not in errors
    work = WorkFolder(tmp_path / "out")
    half_written = tmp_path / "out" / work.read_records("documents")[0].path
    os.truncate(half_written, half_written.stat().st_size // 2)  # as after a power cut: its task is done again
    work.reopen("documents")
    done = subprocess.run(command(corpus, tmp_path / "out"), check=True, capture_output=True, text=True)
    assert "continuing in" in done.stdout
    assert tree(tmp_path / "out") == expected


def test_a_second_run_into_a_folder_is_refused_and_no_worker_outlives_the_first(corpus: Path, tmp_path: Path) -> None:
    first = begin(corpus, tmp_path / "out", *LONG)
    second = subprocess.run(command(corpus, tmp_path / "out", *LONG), capture_output=True, text=True, check=False)
    assert second.returncode == 2
    [main] = psutil.Process(first.pid).children()
    assert f"another run is at work here (process {main.pid} on" in second.stderr
    family = psutil.Process(first.pid).children(recursive=True)
    assert len(family) >= 3
    first.kill()
    first.communicate()
    wait_for(lambda: all(has_ended(member.pid) for member in family))


@pytest.mark.slow
def test_a_full_disk_is_named_and_a_run_goes_on(corpus: Path, expected: dict[str, str], disk: Path) -> None:
    out = disk / "out"
    subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
    full = subprocess.run(command(corpus, out, "--workers", "2"), capture_output=True, text=True, check=False)
    assert full.returncode == 2
    assert "cannot be written: No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
    subprocess.run(command(corpus, out, "--workers", "2"), check=True, capture_output=True)
    assert tree(out) == expected


def test_a_launcher_without_mpi_is_refused(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    done = subprocess.run(command(wiki, tmp_path / "out"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "srun --mpi=pmix" in done.stderr


@pytest.mark.parametrize("rank", ["0", slow("1")])
def test_ranks_need_mpi4py(rank: str, wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')\n")
    ranks = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank, "PYTHONPATH": str(tmp_path)}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(command(wiki, tmp_path / "out"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "python -m pip install -e '.[mpi]'" in done.stderr
    assert ("rank 1 on" in done.stderr) == (rank == "1")
    assert "Traceback" not in done.stderr


def test_examples_of_a_set_go_when_its_shards_come(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the disk never has all shards of a length beside all the examples that they are made of."""
    gone, forget = list[tuple[int, int]](), WorkFolder.forget

    def note(work: WorkFolder, *steps: str) -> None:
        if work.out == tmp_path / "out" and "/set-" in steps[0]:  # not of the rehearsal
            assert (work.path / steps[0]).is_dir()
            gone.append((int(steps[0][-1]), len(list(work.out.rglob("length-32/*/shard-*.arrow")))))
        forget(work, *steps)

    monkeypatch.setattr(WorkFolder, "forget", note)
    words = "--lengths 32 --duplicates 3 --vocab-size 300 --shard-size 64KB --workers 1".split()
    run_main(shard.main, "--docs", wiki, "--out", tmp_path / "out", *words)
    assert [one for one, _ in gone] == [0, 1, 2, 3]
    assert all(shards > one for one, shards in gone)  # each set has one shard
