"""The job scripts on a real Slurm of two nodes: what interrupts a run costs time, and nothing else."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, write_wiki
from support.commands import wait_for, write_program
from support.job_scripts import link_scripts, write_functions
from support.mini_slurm import MiniSlurm, mini_slurm
from support.shards import make_shards
from support.tasks import write_tasks
from support.training import RECIPE, assert_same, records

from pretraining.checkpoint.record import list_finished

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = ["--phases.0.steps", "150", "--phases.1.steps", "40", "--checkpoints.every", "10", "--checkpoints.keep", "3"]
SOME = range(1, 20)
"""Slurm lets a job wait for two minutes before it starts it again, and here for seconds. So a node that has come back
may still end what it has of the last start, and with it the next one."""


PRETENDED = """\
case "$*" in
  *preflight.py*)
    mkdir -p runs/$RUN/preflight
    rm -f runs/$RUN/preflight/exclude
    [ "$SLURMD_NODENAME" != node1 ] || [ -z "$BAD" ] || { echo node1 > runs/$RUN/preflight/exclude; exit 76; } ;;
  *train.py*)
    echo "$@"
    [ "$SLURMD_NODENAME" != "$SOUND" ] || sleep 60
    exit ${CODE:-0} ;;
esac
"""
"""Stands in for Python, where a job's way is tried and not what it computes."""


class Site:
    """A user's folder on the cluster, and what is typed there."""

    def __init__(self, slurm: MiniSlurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CLOZE_PREFLIGHT": "0"}
        self.variables["CLOZE_PYTHON"] = sys.executable

    def pretrain(self, run: str, *options: str, **variables: str) -> str:
        """Submits pretrain_large.slurm as it is, with one rank a node; returns the job's id."""
        words = [*options, "--gpus-per-node=1", "cluster/pretrain_large.slurm", "--recipe", "recipe.toml", *STEPS]
        return self.slurm.submit([*words, "--out", f"runs/{run}"], self.folder, {**self.variables, **variables})

    def begin(self, run: str, step: int, *options: str, **variables: str) -> str:
        """Submits a run, and waits until it has saved a step; returns the job's id."""
        job = self.pretrain(run, *options, **variables)
        self.reach(job, run, step)
        return job

    def log(self, job: str) -> str:
        """What a job has written."""
        [path] = self.folder.glob(f"*-{job}.out")
        return path.read_text()

    def reach(self, job: str, run: str, step: int) -> None:
        """Waits until a run has saved a step."""

        def reached() -> bool:
            assert self.slurm.state(job) in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING"), self.log(job)
            folder = self.folder / "runs" / run
            saved = list_finished(folder) if folder.exists() else []
            return bool(saved) and int(saved[-1].name.removeprefix("step-")) >= step

        wait_for(reached, 120)

    def ends_well(self, job: str, run: str, straight: Path, restarts: Collection[int] = (1,)) -> None:
        """The job is done after so many restarts, and its run has the bits of one that nothing happened to."""
        self.slurm.wait(job, "COMPLETED", seconds=240)
        assert int(self.slurm.job(job)["Restarts"]) in restarts, self.log(job)
        assert_same(self.folder / "runs" / run, straight)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    with mini_slurm(tmp_path_factory.mktemp("cluster") / "slurm") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def home(slurm: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Cloze's folder, with shards of a small text, and a recipe of a small model."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("data_prep", "pretraining", "finetuning", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    link_scripts(folder)
    make_shards(folder / "data" / "wiki")
    (folder / "recipe.toml").write_text(RECIPE)
    write_tasks(folder)
    return Site(slurm, folder)


@pytest.fixture
def site(home: Site) -> Iterator[Site]:
    """The same, where every test begins with two idle nodes."""
    write_functions(home.folder, TRIES=20)
    yield home
    home.slurm.run("scancel", "-u", "root")
    for name in home.slurm.names:
        home.slurm.plug(name)
        if not home.slurm.is_on(name):
            home.slurm.switch_on(name)
        home.slurm.resume(name)
    wait_for(home.slurm.idle, 60)


@pytest.fixture(scope="module")
def straight(home: Site) -> Path:
    """A run through both phases on two nodes that nothing happens to."""
    job = home.pretrain("straight", CLOZE_PREFLIGHT="1")
    home.slurm.wait(job, "COMPLETED")
    return home.folder / "runs" / "straight"


def test_a_run_goes_through_both_phases_on_two_nodes(site: Site, straight: Path) -> None:
    assert [record["phase"] for record in records(straight)] == [1] * 150 + [2] * 40
    assert (straight / "export" / "model.safetensors").exists()
    [report] = (straight / "preflight").glob("*.json")
    assert "node2" in report.read_text()


@pytest.fixture
def pretended(site: Site) -> dict[str, str]:
    """Variables for a job in which nothing is computed."""
    write_program(site.folder / "pretended", PRETENDED)
    return {"CLOZE_PYTHON": "./pretended", "CLOZE_PREFLIGHT": "1"}


def test_a_node_that_the_preflight_names_is_left_out(site: Site, pretended: dict[str, str]) -> None:
    job = site.pretrain("picky", "--nodes=1", "--nodelist=node1", **pretended, RUN="picky", BAD="yes")
    site.slurm.wait(job, "PENDING", seconds=20)
    wait_for(lambda: site.slurm.job(job)["ExcNodeList"] == "node1")
    site.slurm.run("scontrol", "update", f"JobId={job}", "ReqNodeList=")
    site.slurm.wait(job, "COMPLETED")
    assert site.slurm.job(job)["BatchHost"] == "node2"
    assert "without node1" in site.log(job)


def test_a_rank_that_fails_at_once_ends_the_job_with_its_code(site: Site, pretended: dict[str, str]) -> None:
    """srun ends the other, and says 143 of both or 1, by which it hears of first."""
    job = site.pretrain("failing", **pretended, RUN="failing", CODE="1", SOUND="node1")
    site.slurm.wait(job, "FAILED", seconds=50)
    assert (site.slurm.job(job)["ExitCode"], site.slurm.job(job)["Restarts"]) == ("1:0", "0")


def test_a_preempted_run_goes_on(site: Site, straight: Path) -> None:
    job = site.begin("preempted", 20)
    stronger = site.slurm.submit(["-p", "urgent", "--exclusive", "--wrap", "true"], site.folder)
    site.slurm.wait(stronger, "COMPLETED")
    site.ends_well(job, "preempted", straight)


@pytest.mark.parametrize("node", ["node2", "node1"])
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(site: Site, straight: Path, node: str) -> None:
    """On that of rank 0 the script runs too: nobody is left to ask for another start, so Slurm does it."""
    job = site.begin(f"lost-{node}", 20)
    site.slurm.cut_power(node)
    site.slurm.wait(job, "PENDING")
    site.slurm.switch_on(node)
    site.ends_well(job, f"lost-{node}", straight, restarts=SOME)


def test_a_network_that_goes_silent_and_comes_back(site: Site, straight: Path) -> None:
    job = site.begin("silent", 20)
    site.slurm.drop("node1")
    site.slurm.wait(job, "PENDING")
    site.slurm.plug("node1")
    site.slurm.resume("node1")
    site.ends_well(job, "silent", straight, restarts=SOME)


def test_a_network_that_is_back_before_slurm_calls_the_node_lost(site: Site, straight: Path) -> None:
    """As it is by Slurm's own time-out: nobody but the job itself finds out that its ranks have ended."""
    write_functions(site.folder, TRIES=20, WATCH_SECONDS=5)
    with site.slurm.noticing_after(300):
        job = site.begin("out", 20)
        site.slurm.unplug("node2")
        time.sleep(90)
        assert site.slurm.state(job) == "RUNNING"
        site.slurm.plug("node2")
        site.slurm.wait(job, "PENDING", seconds=100)
    site.ends_well(job, "out", straight, restarts=SOME)
    assert "no ranks any more" in site.log(job)
    assert '"code": 76' in (site.folder / "runs" / "out" / "jobs.jsonl").read_text()


HALF_LOST = """\
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
[ "$SLURMD_NODENAME" = node1 ] || exec sleep 6061
until [ -e node2-is-gone ]; do sleep 0.2; done
exit 76
"""
"""Stands in for Python, where the rank of one node finds out that it has lost the other."""


def test_a_node_whose_daemons_died_and_came_back_keeps_no_job(site: Site) -> None:
    """Slurm lists the step on, and srun, unless it notices by itself, waits for the ranks of that node for ever."""
    gone = site.folder / "node2-is-gone"
    write_program(site.folder / "half-lost", HALF_LOST)
    write_functions(site.folder, WATCH_SECONDS=2, END_SECONDS=20)
    job = site.pretrain("back", CLOZE_PYTHON="./half-lost")
    wait_for(lambda: bool(site.slurm.processes("sleep 6061")), 60)
    site.slurm.restart("node2")
    wait_for(lambda: not site.slurm.run("sinfo", "-h", "-N", "-n", "node2", "-t", "down").stdout, 60)
    gone.touch()
    wait_for(lambda: site.slurm.job(job).get("Restarts") == "1", 90)
    site.slurm.wait(job, "COMPLETED", seconds=120)


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_run_that_is_over_ends_its_job_although_srun_waits(
    site: Site, straight: Path, nodes: int, tmp_path: Path
) -> None:
    """The rank of a node trains on without its slurmstepd, and srun does not hear of its end. Slurm lists the step, but
    the step that removes a copy of the shards runs all the same."""
    write_functions(site.folder, WATCH_SECONDS=2, END_SECONDS=10)
    stage, run = {"CLOZE_STAGE": str(tmp_path)} if nodes == 1 else {}, f"orphaned{nodes}"
    step = 1 if stage else 0
    job = site.begin(run, 20, f"--nodes={nodes}", **stage)
    os.kill(site.slurm.processes(f"slurmstepd: [{job}.{step}]")[0], signal.SIGKILL)
    site.slurm.wait(job, "COMPLETED", seconds=120)
    assert "the run is over, and srun does not end" in site.log(job)
    assert not [*tmp_path.iterdir()]
    if nodes == 2:
        assert_same(site.folder / "runs" / run, straight)


def test_the_time_limit_saves_and_goes_on(site: Site, straight: Path) -> None:
    """Slurm counts whole minutes, most of which the ranks spend standing still together. Its signal may come long
    before the end, and comes but once, however often a job is started: the run itself looks at the clock too."""
    job = site.begin("limited", 20, "--time=1", "--signal=USR1@15")
    ranks = site.slurm.processes("runs/limited")
    for number, seconds in ((signal.SIGSTOP, 40), (signal.SIGCONT, 0)):
        for rank in ranks:
            with suppress(ProcessLookupError):  # Slurm's own signal has woken it
                os.kill(rank, number)
        time.sleep(seconds)
    site.ends_well(job, "limited", straight, restarts=SOME)
    assert '"code": 75' in (site.folder / "runs" / "limited" / "jobs.jsonl").read_text()


def test_a_cancelled_job_leaves_no_process_and_does_not_come_back(site: Site, straight: Path) -> None:
    job = site.begin("cancelled", 10)
    site.slurm.run("scancel", job)
    site.slurm.wait(job, "CANCELLED")
    wait_for(site.slurm.idle, 60)
    assert not site.slurm.processes("runs/cancelled")
    assert site.slurm.job(job)["Restarts"] == "0"


def test_steps_are_measured_on_one_node_and_on_two(site: Site) -> None:
    words = ["--nodes=2", "--gpus-per-node=1", "cluster/benchmark_scaling.slurm"]
    words += ["--recipe", "recipe.toml", "--data", "data/wiki", "--rounds", "2", "--phases.1.length", "32"]
    job = site.slurm.submit(words, site.folder, site.variables)
    site.slurm.wait(job, "COMPLETED")
    points = json.loads((site.folder / "runs" / f"scaling-{job}" / "scaling.json").read_text())["points"]
    shapes = [tuple(point[name] for name in ("scaling", "nodes", "processes", "sequences")) for point in points]
    assert shapes == [("weak", 1, 1, 32), ("weak", 2, 2, 64), ("strong", 1, 1, 32), ("strong", 2, 2, 32)]


def test_the_commands_of_the_readme_are_taken(site: Site) -> None:
    """The chain for BERT-Large, and its one job; neither can be computed here."""
    page = (ROOT / "README.md").read_text()
    typed = re.findall(r"^\$ ((?:python cluster/submit\.py|sbatch) .*)$", page, re.MULTILINE)
    assert len(typed) == 2
    write_wiki(site.folder / "wiki", documents=4)
    activated = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CLOZE_PYTHON": sys.executable}
    for command in typed:
        done = site.slurm.run("bash", "-c", command, where=site.folder, **activated)
        assert done.returncode == 0, done.stderr
    queue = site.slurm.run("squeue", "-h", "-o", "%j").stdout.split()
    assert sorted(queue) == ["finetune", "gather", "prepare", "pretrain_large", "pretrain_large"]


def test_without_a_word_the_newest_shards_are_taken(site: Site, pretended: dict[str, str]) -> None:
    """`sbatch cluster/pretrain_large.slurm` and nothing else, but for what stands in for Python."""
    words, recipe = ["--nodes=2", "--gpus-per-node=8", "cluster/pretrain_large.slurm"], "bert_large_lamb"
    job = site.slurm.submit(words, site.folder, {**pretended, "RUN": recipe})
    site.slurm.wait(job, "COMPLETED", seconds=30)
    told = f"recipe {recipe}, shards data/wiki, the newest, run runs/{recipe}, 8 ranks on each"
    assert told in site.log(job)
    assert site.log(job).count(f"--data data/wiki --recipe {recipe} --out runs/{recipe}\n") == 16


def test_the_whole_way_from_text_to_a_table(site: Site) -> None:
    """docs/examples/slurm.sh: prepare, pretrain, finetune and gather, each of which waits for the one before."""
    write_wiki(site.folder / "wiki")
    (site.folder / "docs").symlink_to(ROOT / "docs")
    (site.folder / ".venv" / "bin").mkdir(parents=True)
    python = f'python() {{ [[ $* == *fetch.py* ]] || {sys.executable} "$@"; }}\n'
    (site.folder / ".venv" / "bin" / "activate").write_text(python)
    words = ["--shards", "data/chain", "--recipe", "recipe.toml", "--run", "runs/chain"]
    words += ["--tasks", "sst2", "swag", "--seeds", "2", "--for-finetune=--epochs 1 --learning_rate 1e-3 --length 64"]
    words += ["--for-prepare=--lengths 32 64 --duplicates 2 --vocab-size 300 --validation 0.05"]
    options = {"CLOZE_PREPARE_OPTIONS": "--nodes=2 --ntasks-per-node=2"}
    options["CLOZE_PRETRAIN_OPTIONS"] = "--nodes=2 --gpus-per-node=1"
    script = ["bash", "docs/examples/slurm.sh", *words]
    done = site.slurm.run(*script, where=site.folder, **site.variables, **options)
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[0] for line in done.stdout.splitlines()[:4]]
    for job in jobs[:2]:
        site.slurm.wait(job, "COMPLETED")
    site.slurm.wait(jobs[3], "COMPLETED")
    [table] = site.folder.glob(f"gather-{jobs[3]}.out")
    assert "sst2" in table.read_text()
    for suite, task in (("glue", "sst2"), ("swag", "swag")):
        results = json.loads((site.folder / "runs" / "chain" / suite / "results.json").read_text())
        assert sorted(results[task]["runs"]) == ["lr0.001-seed1", "lr0.001-seed2"]
        assert (site.folder / "runs" / "chain" / suite / task / "model").is_dir()
