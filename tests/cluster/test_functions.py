"""What job scripts do about odd ends of steps, and about storage; programs stand in for Slurm's and for Python."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.commands import write_program
from support.job_scripts import link_scripts

from data_prep.common.files import write_json

SLURM = {
    "scontrol": 'if [[ $2 == job ]]; then echo " JobState=RUNNING Restarts=$SLURM_RESTART_COUNT "; else echo "$@"; fi',
    "squeue": "true",
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"; code=$?; eval "${SRUN:-}"; exit $code',
    "train": 'echo "trained with $*"; eval "${TRAIN:-}"',
}
"""Programs of Slurm, and one for Python, as far as a job calls them; `SRUN` and `TRAIN` say what goes wrong."""


class Job:
    """A job of pretrain_base.slurm on one node that is the machine itself."""

    def __init__(self, folder: Path, **constants: float) -> None:
        self.folder = folder
        link_scripts(folder, **constants)
        (folder / "pretraining").symlink_to(ROOT / "pretraining")
        self.make_shards("first")
        for name, does in SLURM.items():
            self.put(name, does)
        self.words = ["--out", "runs/any"]
        self.variables = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CLOZE_PYTHON": "train",
            "CLOZE_PREFLIGHT": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_CPUS_PER_NODE": "2",
        }

    def put(self, name: str, does: str) -> None:
        """Lets a program stand in for another."""
        write_program(self.folder / "bin" / name, does)

    def make_shards(self, name: str) -> None:
        write_json(self.folder / "data" / name / "manifest.json", {})

    def begin(
        self, restart: int = 0, script: str = "pretrain_base", words: Sequence[str] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """Begins the job, the first time or again."""
        command = ["bash", f"cluster/{script}.slurm", *self.words, *words]
        own = {**self.variables, "SLURM_RESTART_COUNT": str(restart), **variables}
        out = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=own, stdout=out, stderr=subprocess.STDOUT, text=True)

    def start(self, restart: int = 0, **more: Any) -> tuple[int, str]:
        """Begins the job; returns its code and its log once it has ended."""
        process = self.begin(restart, **more)
        log, _ = process.communicate(timeout=60)
        return process.returncode, log

    def end(self, code: int, restart: int = 0, **more: Any) -> str:
        """The same of a job that ends with this code; returns its log."""
        found, log = self.start(restart, **more)
        assert found == code, log
        return log


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_ranks_of_each_start_have_a_secret_of_their_own(job: Job) -> None:
    logs = [job.start(restart, TRAIN='echo "secret $CLOZE_SECRET"')[1] for restart in (0, 1)]
    found = [re.findall(r"^secret ([0-9a-f]{64})$", log, re.MULTILINE) for log in logs]
    assert [len(secrets) for secrets in found] == [1, 1], logs
    assert found[0] != found[1]


LISTED, HANGS = "echo 7.batch; echo 7.0", "exec sleep 50 >&- 2>&-"
UNKNOWN = "[[ $* != *-s* ]] || { echo >> asked; [[ $(wc -l < asked) -gt 3 ]] || exit 1; }"
ASKED = "echo >> asked; [[ $* != *%e ]] || { echo 4000000000; exit; }\n" + LISTED
FAILS = f"echo 'srun: error: {{}}' >&2; {HANGS}"
ENDS = """mkdir -p runs/any; echo '{"code": %d, "start": "7.%d"}' > runs/any/ended.json; """
"""Records the end of the run in the shell: its exit code, and the number of the job's start."""
AFTER_ITS_END = "trap 'exit {}' TERM; sleep 50 >&- 2>&- & wait"
UNTIL_ASKED = "until [[ $(wc -l < asked) -gt 9 ]]; do sleep 0.1; done; "
GONE, OVER = "no ranks any more", "the run is over, and srun"
FAILED = "a rank or a node has failed, and srun does not end"
STEPS = {
    "gone": (UNKNOWN, HANGS, 76, GONE),
    "lost a rank": (LISTED, FAILS.format("node1: task 0: Exited with exit code 76"), 76, FAILED),
    "crashed": (LISTED, FAILS.format("node1: tasks 0-1: Segmentation fault (core dumped)"), 76, FAILED),
    "lost a node": (LISTED, FAILS.format("Node failure on node2"), 76, FAILED),
    "failed": (LISTED, FAILS.format("node1: task 0: Exited with exit code 1"), 1, FAILED),
    "done": (LISTED, ENDS % (0, 1) + AFTER_ITS_END.format(143), 0, OVER),
    "saved": (LISTED, ENDS % (75, 1) + AFTER_ITS_END.format(0), 75, OVER),
    "an earlier start has ended": (ASKED, ENDS % (2, 0) + UNTIL_ASKED + "exit 143", 76, ""),
    "at work": (ASKED, UNTIL_ASKED + "echo it ends at $SLURM_JOB_END_TIME", 0, "it ends at 4000000000"),
}
"""What squeue and srun do while a step is watched, the job's code, and what its log says."""


def test_a_step_that_does_not_end_by_itself_is_ended_and_no_other(tmp_path: Path) -> None:
    """srun waits for ever for a node that has told slurmctld alone, or whose slurmd died and came back, and for ranks
    whose slurmstepd was killed. A queue that does not answer says nothing of ranks, the late end of an earlier start
    nothing of this one, and the end of a job in which this one was submitted nothing of its own."""
    begun = []
    for name, (squeue, srun, *_) in STEPS.items():
        job = Job(tmp_path / name, WATCH_SECONDS=0.2, END_SECONDS=1)
        job.put("squeue", squeue)
        job.put("srun", srun)
        begun.append(job.begin(1, SLURM_JOB_END_TIME="5"))
    for process, (name, (_, _, code, told)) in zip(begun, STEPS.items(), strict=True):
        log, _ = process.communicate(timeout=100)
        assert (process.returncode, "requeue 7" in log) == (code, code in (75, 76)), f"{name}: {log}"
        assert told in log
        assert ("it is ended" in log) == (told in (GONE, FAILED, OVER)), f"{name}: {log}"
    assert len((tmp_path / "gone" / "asked").read_text()) == 6


EXITED, THEN = "Exited with exit code ", "' >&2; echo 'srun: error: node1: task 0: "
FIRST = [(EXITED + "1", 143, 1), (EXITED + "2", 75, 2), (EXITED + "127", 143, 127), (EXITED + "76", 143, 76)]
FIRST += [("Killed", 137, 76), (f"Killed{THEN}{EXITED}2", 137, 76)]


@pytest.mark.parametrize(("told", "srun", "own"), FIRST)
def test_the_rank_that_failed_first_decides(job: Job, told: str, srun: int, own: int) -> None:
    """Such as one that cannot import a module: srun ends the others, and tells of theirs as the worst of all codes. One
    that was lost goes back into the queue."""
    ended = "echo 'srun: error: node1: task 0: Terminated' >&2"
    log = job.end(own, SRUN=f"echo 'srun: error: node2: task 1: {told}' >&2; {ended}; code={srun}")
    assert ("requeue 7" in log) == (own == 76)
    assert own == 76 or f"a rank has failed with {own}" in log


def test_a_temporary_folder_that_is_not_here_loses_no_word(job: Job) -> None:
    assert "a fault" in job.end(1, TRAIN="echo a fault >&2; exit 1", TMPDIR="/nowhere")


def test_progress_counts_where_the_run_is_a_link(tmp_path: Path) -> None:
    job = Job(tmp_path / "home", TRIES=1)
    (job.folder / "runs").mkdir()
    (job.folder / "scratch").mkdir()
    (job.folder / "runs" / "any").symlink_to(job.folder / "scratch")
    for restart in range(2):
        job.end(75, restart, TRAIN=f"mkdir -p runs/any/checkpoints/step-{restart}; exit 75")
    job.end(75, 2, TRAIN="exit 75")
    log = job.end(2, 3, TRAIN="exit 75")
    assert re.search(r"error: begun \d times in runs/any, and no further than before", log)


def test_the_shards_that_were_taken_first_stay(job: Job) -> None:
    job.make_shards('second "best"')
    os.utime(job.folder / "data" / "first" / "manifest.json", (0, 0))
    assert '--data data/second "best" ' in job.start(TRAIN="exit 75")[1]
    job.make_shards("third")
    os.utime(job.folder / "data" / 'second "best"' / "manifest.json", (1, 1))
    log = job.start(1)[1]
    assert '--data data/second "best" ' in log
    assert "as at an earlier start" in log
    assert "--data data/third " in job.start(SLURM_JOB_ID="8")[1], "nothing has been trained"
    assert "--data data/first " in job.start(1, words=("--data", "data/first"))[1]
    (job.folder / "runs" / "any" / "checkpoints" / "step-00000010").mkdir(parents=True)
    job.make_shards("fourth")
    assert "--data data/first " in job.start(SLURM_JOB_ID="9")[1], "the run goes on with what it has begun with"
    job.end(2, SLURM_JOB_ID="10", words=("--data", "data/third"), TRAIN="exit 2")
    for number in ("9", "11"):
        assert "--data data/first " in job.start(1, SLURM_JOB_ID=number)[1], "another job's mistake changes nothing"
    assert "--data data/fourth " in job.start(SLURM_JOB_ID="12", words=("--out", "runs/a[1]"), TRAIN="exit 75")[1]
    job.make_shards("fifth")
    (job.folder / "runs" / "a[1]" / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert "--data data/fourth " in job.start(SLURM_JOB_ID="13", words=("--out", "runs/a[1]"))[1]
    noted = [json.loads(line) for line in (job.folder / "runs" / "any" / "jobs.jsonl").read_text().splitlines()]
    found = {line["shards"] for line in noted if line["event"] == "start"}
    assert found == {'data/second "best"', "data/third", "data/first"}


def test_several_corpora_are_passed_on_and_taken_again(job: Job) -> None:
    job.make_shards("second")
    job.make_shards("the first")
    named = ("--data", "wiki=data/the first", "books=data/second")
    assert " ".join([*named, ""]) in job.start(words=named, TRAIN="exit 75")[1]
    (job.folder / "runs" / "any" / "checkpoints" / "step-00000010").mkdir(parents=True)
    job.make_shards("third")
    again = job.start(SLURM_JOB_ID="8", TRAIN='printf "<%s>" "$@"')[1]
    assert "<--data><wiki=data/the first><books=data/second>" in again
    missing = ("--data", "wiki=data/first", "books=data/none")
    assert "error: --data data/none: no finished shards" in job.end(2, SLURM_JOB_ID="9", words=missing)


def test_paths_with_blanks_stay_whole_and_none_is_refused(job: Job) -> None:
    assert "error: --data: give a value" in job.end(2, words=("--data", "--recipe=demo"))
    job.make_shards("two words")
    log = job.end(0, words=("--data", "data/two words", "--out", "runs/two words"), TRAIN='printf "<%s>" "$@"')
    assert "<--data><data/two words><--recipe><bert_base_lamb><--out><runs/two words>" in log


def test_a_second_job_notes_nothing_while_the_first_one_runs(job: Job) -> None:
    notes = job.folder / "runs" / "any" / "jobs.jsonl"
    notes.parent.mkdir(parents=True)
    first = '{"event": "start", "time": 1, "job": "5", "restart": 0, "nodes": "node2", "from": "0 "}\n'
    notes.write_text(first)
    job.put("squeue", "[[ $* != *RUNNING* || $* != *5* ]] || echo 5")
    assert "error: job 5 is at work in runs/any; wait for its end" in job.end(2)
    assert notes.read_text() == first
    assert "trained with" in job.end(0, SLURM_JOB_ID="5"), "the same job may start again"
    assert "trained with" in job.end(0), "the first job has ended"


@pytest.mark.slow
def test_storage_that_is_gone_for_a_while_ends_no_job(job: Job) -> None:
    """Neither while the ranks work nor where another start begins."""
    goes = "mv data away; (sleep 5; mv away data) > /dev/null 2>&1 & sleep 0.1; exit 2"
    log = job.end(76, TRAIN=goes, CLOZE_STORAGE_SECONDS="60")
    assert "data/first/manifest.json: gone" in log
    assert "it is back" in log
    (job.folder / "runs").rename(job.folder / "away")
    with subprocess.Popen(["sh", "-c", "sleep 5; mv away runs"], cwd=job.folder):
        assert "it is back" in job.end(0, 1, CLOZE_STORAGE_SECONDS="60")
    (job.folder / "runs").rename(job.folder / "away")
    code, log = job.start(1, CLOZE_STORAGE_SECONDS="1")
    assert (code, (job.folder / "runs").exists()) == (2, False), "a run that is gone is not begun anew"
    assert "runs/any/jobs.jsonl: gone; nothing is begun anew" in log
    (job.folder / "away").rename(job.folder / "runs")
    assert "gone" not in job.start(1, SLURM_JOB_ID="70", words=("--out", "runs/new"))[1], "what never was"
    job.end(2, 1, TRAIN="mv data away; exit 2", CLOZE_STORAGE_SECONDS="1")
    code, log = job.start(0, words=("--data", "data/mistyped"))
    assert code == 2
    assert "gone" not in log


def test_an_end_that_cannot_be_noted_is_logged(job: Job) -> None:
    """Such as in a folder that became read-only."""
    assert "runs/any: cannot be written, so jobs.jsonl there lacks this end: 2" in job.end(
        2, TRAIN="rm runs/any/jobs.jsonl; mkdir runs/any/jobs.jsonl; exit 2"
    )


def test_a_variable_that_was_there_once_is_told_and_taken_where_it_is_always_so(job: Job) -> None:
    assert "error: CLOZE_TASKS=rte: is no longer a variable; in its place: " in job.end(2, CLOZE_TASKS="rte")
    assert "CLOZE_TRIES=8: is no longer a variable: this value always applies" in job.end(0, CLOZE_TRIES="8")


def test_an_element_of_a_table_runs_its_share_and_goes_back_where_it_was_stopped(job: Job) -> None:
    job.words = ["table5", "--scale", "base"]
    job.variables |= {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "3"}
    log = job.end(75, script="reproduce", TRAIN="exit 75")
    assert "requeue" in log
    assert "benchmarks/reproduce.py --out runs/tables --share 2/3 table5 --scale base" in log
    del job.variables["SLURM_ARRAY_TASK_ID"]
    log = job.end(0, script="reproduce")
    assert "benchmarks/reproduce.py --out runs/tables table5 --scale base" in log


@pytest.fixture
def disk(job: Job, tmp_path: Path) -> Path:
    """A node's own disk, to which the shards of a job are copied; they stay where a rank was lost."""
    write_json(job.folder / "data" / "first" / "manifest.json", {"fingerprint": "ours"})
    job.variables |= {"CLOZE_STAGE": str(tmp_path / "disk"), "TRAIN": 'cat "$3/manifest.json"; exit 76'}
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_shards_are_copied_for_this_user_alone_and_taken_again_at_the_next_start(job: Job, disk: Path) -> None:
    shards, copy = job.folder / "data" / "first", disk / "cloze-7"
    (shards / "documents").mkdir()
    shards.chmod(0o777)
    job.end(76)
    assert [path.name for path in disk.iterdir()] == ["cloze-7"]
    assert copy.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in copy.iterdir()] == ["manifest.json"]
    (copy / "mark").touch()
    assert f"--data {copy} " in job.end(76, 1)
    assert (copy / "mark").exists()


@pytest.mark.parametrize("left", ["of other shards", "open to all", "a link"])
def test_a_copy_that_is_not_of_these_shards_is_made_again(job: Job, disk: Path, left: str) -> None:
    """Job numbers begin again some day, and others can compute the folder's name."""
    copy = disk / "cloze-7"
    write_json(disk / "elsewhere" / "manifest.json", {"fingerprint": "ours"})
    if left == "a link":
        copy.symlink_to(disk / "elsewhere")
    else:
        write_json(copy / "manifest.json", {"fingerprint": "ours" if left == "open to all" else "theirs"})
        (copy / "shard.arrow").touch()
        copy.chmod(0o777 if left == "open to all" else 0o700)
    assert "theirs" not in job.end(76)
    assert [path.name for path in copy.iterdir()] == ["manifest.json"]
    assert not copy.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_folder_is_left_alone_and_the_shards_are_read_where_they_lie(job: Job, disk: Path) -> None:
    copy = disk / "cloze-7"
    write_json(copy / "manifest.json", {"fingerprint": "theirs"})
    copy.chmod(0o700)
    os.chown(copy, 12345, -1)
    log = job.end(76)
    assert log.count(f"{copy}: of another user; the shards are read from data/first") == 1
    assert "--data data/first " in log
    assert "theirs" not in log
    assert [path.name for path in copy.iterdir()] == ["manifest.json"]


def test_a_folder_that_another_user_makes_during_the_copy_is_not_taken(job: Job, disk: Path) -> None:
    """The name of the copy that is under way says what the folder will be called."""
    copy, planted = disk / "cloze-7", '{"fingerprint": "theirs"}'
    job.put("tar", f"mkdir -m 777 {copy} 2>&- && echo '{planted}' >{copy}/manifest.json\nexec /bin/tar \"$@\"")
    log = job.end(76)
    assert "theirs" not in log
    assert "--data data/first " in log
