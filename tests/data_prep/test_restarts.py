"""shard.py writes the same bytes however it is run, and loses nothing whatever happens to it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import write_wiki
from support.commands import has_ended, wait_for
from support.shards import MPIRUN, begin, command, run, tree

from data_prep.common import ranks
from data_prep.readers import sources
from data_prep.shards import KEPT
from data_prep.work import WorkFolder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes text enough for several tasks in every step."""
    return write_wiki(tmp_path_factory.mktemp("corpus") / "wiki", documents=3600, files=6)


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Finds out what an undisturbed run with one worker writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    run(corpus, out)
    found = tree(out)
    assert sum(name.startswith(f"{KEPT}/") for name in found) > 1
    assert sum(name.startswith("length-32/duplicate-0/") for name in found) > 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 2])
def test_mpi_ranks_write_the_same_bytes(number: int, corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    words = [*MPIRUN, "-n", str(number), *command(corpus, tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is ready, in" in done.stdout
    assert "\x1b" not in done.stdout  # though mpirun gives its ranks a pseudo-terminal
    assert tree(tmp_path / "out") == expected


def test_whatever_ends_a_run_the_same_command_goes_on(corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """A kill that leaves no process behind, the kill of a worker, and Ctrl-C; each stops in the midst of a step."""
    out = tmp_path / "out"
    watching, main, workers = begin(corpus, out)
    assert f"another run is at work here (process {main.pid} on" in run(corpus, out, code=2)
    family = [main, *main.children(recursive=True)]
    assert len(family) >= 3
    watching.kill()
    watching.communicate()
    wait_for(lambda: all(has_ended(member.pid) for member in family))

    watching, main, workers = begin(corpus, out)
    workers[0].kill()
    main.resume()
    _, errors = watching.communicate(timeout=60)
    assert (watching.returncode, "Traceback" in errors) == (2, False)
    assert "a worker process was killed from outside" in errors
    assert "run the same command again to continue" in errors

    watching, main, _ = begin(corpus, out)
    watching.send_signal(signal.SIGINT)
    main.resume()
    _, errors = watching.communicate(timeout=60)
    assert (watching.returncode, "Traceback" in errors) == (130, False)
    assert "the same command continues where it stopped" in errors
    work = WorkFolder(out)
    half_written = out / work.read_records("documents")[0].path
    os.truncate(half_written, half_written.stat().st_size // 2)  # as after a power cut: its task is done again
    work.reopen("documents")
    assert "continuing in" in run(corpus, out, "--workers", "2")
    assert tree(out) == expected


MOMENTS = """documents/ words.jsonl vocab.txt tokens.jsonl parts.arrow examples-32.jsonl set-1/ length-32/duplicate-0/
    shards-32.jsonl examples-64/ documents.arrow manifest.json""".split()


def test_a_kill_in_the_midst_of_any_file_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk then, with half of the file that is being written, is taken up by another run."""
    wiki, out, frozen, usual = write_wiki(tmp_path / "wiki", documents=80), tmp_path / "out", set[str](), os.fsync

    def freeze(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(out) and "cloze-trial-" not in str(path):
            half = path.relative_to(out)
            for place in {*MOMENTS} - frozen:
                if place in str(half).replace(".tmp", ""):
                    copy = Path(shutil.copytree(out, tmp_path / place.replace("/", "")))
                    os.truncate(copy / half, path.stat().st_size // 2)
                    frozen.add(place)
        usual(descriptor)

    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 1 << 14)
    monkeypatch.setattr(sources, "LARGEST_BUNDLE", 1 << 14)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", freeze)
        run(wiki, out)
    assert frozen == {*MOMENTS}
    for place in MOMENTS:
        folder = tmp_path / place.replace("/", "")
        run(wiki, folder)
        assert tree(folder) == tree(out), place


@pytest.mark.slow
def test_a_full_disk_is_named_and_a_run_goes_on(corpus: Path, expected: dict[str, str], disk: Path) -> None:
    out = disk / "out"
    subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
    full = run(corpus, out, "--workers", "2", code=2)
    assert "cannot be written: No space left on device" in full
    assert "Traceback" not in full
    subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
    run(corpus, out, "--workers", "2")
    assert tree(out) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_meet_are_told_the_cure(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LATER", 0.0)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", str(rank))
    alone = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1)))
    for module, cure in ((None, "python -m pip install -e '.[mpi]'"), (alone, "srun --mpi=pmix")):
        monkeypatch.setitem(sys.modules, "mpi4py", module)
        said = run(tmp_path, tmp_path / "out", code=2)
        assert cure in said
        assert ("rank 1 on" in said) == (rank == 1)


def test_examples_of_a_set_go_when_its_shards_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the disk never has all shards of a length beside all the examples that they are made of."""
    out, gone, forget = tmp_path / "out", list[tuple[int, int]](), WorkFolder.forget

    def note(work: WorkFolder, *steps: str) -> None:
        if work.out == out and "/set-" in steps[0]:  # not of the rehearsal
            assert (work.path / steps[0]).is_dir()
            gone.append((int(steps[0][-1]), len(list(out.rglob("length-32/*/shard-*.arrow")))))
        forget(work, *steps)

    monkeypatch.setattr(WorkFolder, "forget", note)
    run(write_wiki(tmp_path / "wiki", documents=60), out, "--lengths", "32", "--duplicates", "3")
    assert [one for one, _ in gone] == [0, 1, 2, 3]
    assert all(shards > one for one, shards in gone)  # each set has one shard
