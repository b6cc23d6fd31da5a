"""submit.py: the chain that it makes, and what it refuses before anything is in the queue."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest
from conftest import ROOT, write_wiki
from support import processes
from support.commands import run_main, write_program
from support.job_scripts import link_scripts
from support.training import RECIPE

from cluster.submit import FOR_PLANS, main, run_program
from data_prep.common.errors import UserError
from finetuning.files.splits import FOLDERS as GLUE
from pretraining.flags import OF_PLAN, Train

SBATCH = """\
echo "$SBATCH_ACCOUNT|$*" >> "$0.calls"
count=$(wc -l < "$0.calls")
[ "$count" -ne "${SILENT_AT:-0}" ] || { echo "Welcome"; exit 0; }
[ "$count" -ne "${SLOW_AT:-0}" ] || { kill -INT "$PPID"; exec sleep 9; }
[ "$count" -ne "${FAIL_AT:-0}" ] || { echo "sbatch: error: Invalid account" >&2; exit 1; }
echo "$((100 + count));mini"
[ -z "${TAIL:-}" ] || echo "$TAIL"
"""
SCANCEL = """\
echo "$@" >> "$0.calls"
case " $* " in *" ${KEPT:-0} "*) echo "scancel: error: Socket timed out" >&2; exit 1;; esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Cloze's folder with a text, and programs that take note of what they are told."""
    for name, does in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        write_program(tmp_path / "bin" / name, does)
    link_scripts(tmp_path)
    for name in ("data_prep", "pretraining", "finetuning"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_wiki(tmp_path / "wiki", documents=2)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "runs" / "recipe").mkdir(parents=True)
    for name in GLUE.values():
        (tmp_path / "data" / "glue" / name).mkdir(parents=True)
    return tmp_path


Submit = Callable[..., str]
"""Runs submit.py as a user types it in Cloze's folder, in this process; returns what is said."""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Jobs run in an image unless the test says otherwise: then no Python looks at the recipe, which takes long."""
    usual = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CLOZE_IMAGE": "a.sif", "CLOZE_DATA": str(folder)}
    return {**os.environ, **usual, **more}


def shell(folder: Path, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of bash in Cloze's folder."""
    given = environment(folder, **more)
    return subprocess.run(["bash", "-c", script], cwd=folder, env=given, capture_output=True, text=True, check=False)


@pytest.fixture
def submit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    def run(*words: str, chain: str = "pipeline", code: int = 0, **variables: str) -> str:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name, value in environment(folder, **variables).items():
                patch.setenv(name, value)
            return run_main(main, chain, *words, code=code)

    return run


def calls(folder: Path, program: str = "sbatch") -> list[str]:
    """What a program was told, call by call."""
    path = folder / "bin" / f"{program}.calls"
    return path.read_text().splitlines() if path.exists() else []


def test_every_step_waits_for_the_one_before(folder: Path, submit: Submit) -> None:
    words = ("--recipe", "recipe.toml", "--tasks", "rte", "cola", "--seeds", "3", "--phases.0.steps", "9")
    said = submit(*words, TAIL="You have used 3 of 10 GPU hours")
    prepare, pretrain, finetune, gather = calls(folder)  # what a site says after the id is none
    assert prepare.endswith("--parsable --export=ALL cluster/prepare.slurm --docs wiki --out data/wiki")
    assert "--dependency=afterok:101 --kill-on-invalid-dep=yes" in pretrain
    trained = "--recipe recipe.toml --data data/wiki --out runs/recipe --phases.0.steps 9"
    assert pretrain.endswith(f"cluster/pretrain_large.slurm {trained}")
    assert finetune.endswith("cluster/finetune.slurm --model runs/recipe --task rte cola --seeds 3")
    assert "--dependency=afterok:102" in finetune
    assert "--array=0-5" in finetune
    assert "--dependency=afterok:102,afterany:103" in gather
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["101", "102", "103", "104"]


def test_several_sources_and_globs_are_prepared_as_shard_py_takes_them(folder: Path, submit: Submit) -> None:
    for words in (["wiki", "books"], ["books/*.txt"], ["novels=books"]):
        assert "name the folder of the shards" in submit("--to", "prepare", "--text", *words, code=2)
    chosen = ("--to", "prepare", "--shards", "data/both", "--text", "wiki", "novels=books/*.txt")
    assert "--text novels=books/*.txt: no such file" in submit(*chosen, code=2)
    (folder / "books").mkdir()
    (folder / "books" / "a.txt").write_text("Text.")
    shell(folder, f"set -e\n{submit(*chosen, '--dry-run')}")
    submit(*chosen)
    typed, submitted = calls(folder)
    assert typed == submitted
    assert submitted.endswith("cluster/prepare.slurm --docs wiki novels=books/*.txt --out data/both")
    (folder / "lang=en").mkdir()
    (folder / "lang=en" / "a.txt").write_text("Text.")
    for source in ("en=lang=en/*.txt", "lang=en/*.txt", "lang=en", "demo", "own=demo"):
        assert "prepare.slurm" in submit("--to", "prepare", "--shards", "data/x", "--text", source, "--dry-run")
    assert "no such file" in submit("--to", "prepare", "--shards", "data/x", "--text", "a b=books", code=2)


def test_a_table_is_an_array_of_shares_and_a_job_that_concludes(folder: Path, submit: Submit) -> None:
    words = ("table5", "--scale", "base")
    submit("--shares", "3", *words, chain="tables", CLOZE_TABLES_OPTIONS="--partition=gpu")
    tables, conclude = calls(folder)
    assert tables.endswith("--partition=gpu --array=1-3 cluster/reproduce.slurm table5 --scale base")
    assert "--dependency=afterany:101 --kill-on-invalid-dep=yes cluster/reproduce.slurm table5" in conclude
    submit("--shares", "no", *words, chain="tables", code=2)
    for unknown in (["table99"], ["figure6"], [], ["table5", "figure5"]):
        assert "give table1 to table8, or figure5" in submit(*unknown, chain="tables", code=2)
    assert len(calls(folder)) == 2


def test_a_dry_run_prints_what_a_shell_can_run(folder: Path, submit: Submit) -> None:
    shown = submit("--recipe", "recipe.toml", "--dry-run", "--tasks", "rte", "cola")
    assert not calls(folder)
    script = shell(folder, f"set -e\n{shown}")
    assert script.returncode == 0, script.stderr
    typed = calls(folder)
    (folder / "bin" / "sbatch.calls").unlink()
    submit("--recipe", "recipe.toml", "--tasks", "rte", "cola")
    assert [line.replace(";mini", "") for line in typed] == calls(folder)


def test_a_dry_run_shows_every_job_and_all_that_is_missing(folder: Path, submit: Submit) -> None:
    """Nodes and time limits are those of sbatch: options before the environment before the script."""
    shutil.rmtree(folder / "data" / "glue")
    site = 'CLOZE_PRETRAIN_OPTIONS="--nodes=4-8 -t 9:00:00"\nCLOZE_GATHER_OPTIONS="-N 1 --time 1:00:00"\n'
    (folder / "cluster" / "site.env").write_text(f"{site}SBATCH_TIMELIMIT=8:00:00\n")
    words = ["pipeline", "--text", "a", "b", "--shards", "data/ab", "--tasks", "rte", "squad", "--dry-run"]
    command = [sys.executable, "cluster/submit.py", *words]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    limits = re.findall(r"^# (\w+): .*; nodes: (\S+), time limit: (\S+)$", done.stdout, re.MULTILINE)
    wanted = [("prepare", "1", "8:00:00"), ("pretrain", "4-8", "9:00:00"), ("finetune", "1", "8:00:00")]
    assert limits == [*wanted, ("gather", "1", "1:00:00")]
    missing = re.findall(r"^# to mend: (--text \w|\S+):", done.stdout, re.MULTILINE)
    assert missing == ["--text a", "--text b", "data/glue", "data/squad"]
    assert all(each in done.stderr for each in missing)
    assert shell(folder, f"set -e\n{done.stdout}").returncode == 0, "what is printed is a script all the same"
    (folder / "bin" / "sbatch.calls").unlink()
    said = submit(*words[1:-1], code=2)  # without --dry-run nothing is submitted
    assert all(each in said for each in missing)
    assert not calls(folder)


def test_a_task_of_glue_that_is_missing_is_told_by_its_name(folder: Path, submit: Submit) -> None:
    (folder / "data" / "glue" / "MNLI").rmdir()
    (folder / "data" / "glue" / "RTE").rename(folder / "data" / "glue" / "rte")
    said = submit("--tasks", "mnli", "rte", "qqp", "--dry-run", code=2)
    assert re.findall(r"(\S+): not there; .* glue --task (\w+)", said) == [("data/glue/MNLI", "mnli")]


def test_a_recipe_that_is_not_checked_is_told_so(folder: Path, submit: Submit) -> None:
    for variables in ({}, {"CLOZE_IMAGE": "", "CLOZE_PYTHON": "/nope"}):
        assert "by recipe.toml, not checked here" in submit("--recipe", "recipe.toml", "--dry-run", **variables)


def test_a_comment_of_a_dry_run_runs_nothing(folder: Path, submit: Submit) -> None:
    text = folder / "a\ntouch pwned\n"
    text.mkdir()
    shown = submit("--to", "prepare", "--text", text, "--shards", "data/a", "--dry-run")
    assert shell(folder, f"set -e\n{shown}").returncode == 0
    assert not (folder / "pwned").exists()


def test_the_sites_options_go_to_their_steps_and_the_shell_has_the_last_word(folder: Path, submit: Submit) -> None:
    site = 'SBATCH_ACCOUNT=theirs\nCLOZE_PREPARE_OPTIONS="--partition=cpu --nodes=4"\n'
    (folder / "cluster" / "site.env").write_text(site)
    submit("--to", "pretrain", "--recipe", "recipe.toml", "--seed", "7")  # the recipe's, although there is --seeds
    submit("--to", "prepare", SBATCH_ACCOUNT="mine")
    typed = submit("--to", "prepare", "--dry-run")
    assert "SBATCH_ACCOUNT=theirs " in typed
    prepare, pretrain, again = calls(folder)
    assert prepare.startswith("theirs|")
    assert "--partition=cpu --nodes=4 cluster/prepare.slurm" in prepare
    assert pretrain.startswith("theirs|")
    assert "--partition" not in pretrain
    assert pretrain.endswith(" --seed 7")
    assert again.startswith("mine|")


@pytest.mark.parametrize(
    ("variables", "told", "cancelled"),
    [
        ({"FAIL_AT": "3"}, "error: finetune: sbatch: error: Invalid account\nnothing is left in the queue", "102 101"),
        ({"FAIL_AT": "3", "KEPT": "101"}, "Socket timed out): scancel 102 101\n", "102 101"),
        ({"SILENT_AT": "2"}, "error: pretrain: sbatch printed no id: Welcome", "101"),
    ],
)
def test_a_chain_that_slurm_refuses_is_taken_back(
    folder: Path, submit: Submit, variables: dict[str, str], told: str, cancelled: str
) -> None:
    said = submit("--recipe", "recipe.toml", code=2, **variables)
    assert told in said
    assert ("nothing is left" in said) == ("KEPT" not in variables)
    assert calls(folder, "scancel") == [cancelled]


def test_ctrl_c_takes_the_chain_back(folder: Path) -> None:
    command, slow = [sys.executable, "cluster/submit.py", "pipeline", "--recipe", "recipe.toml"], {"SLOW_AT": "2"}
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which what runs in the background ignores
    run = partial(subprocess.run, capture_output=True, text=True, check=False, preexec_fn=hears)
    done = run(command, cwd=folder, env=environment(folder, **slow))
    assert (done.returncode, calls(folder, "scancel")) == (2, ["101"])
    assert "error: pretrain: interrupted; squeue --me shows whether Slurm took it" in done.stderr


ENDS = ("exit 0", "exec true", "trap 'echo bye' EXIT; exit 0", "set -e; false", "set -o errexit; false")


@pytest.mark.parametrize("line", [*ENDS, ": ${NEEDED:?is not set}"])
def test_a_site_that_ends_the_shell_is_told_with_the_line(folder: Path, submit: Submit, line: str) -> None:
    """By submit.py, and by the jobs, which would have ended without a word."""
    (folder / "cluster" / "site.env").write_text(f"SBATCH_ACCOUNT=theirs\n{line}\n")
    job = ". cluster/functions.sh; prepare_job; echo went on"
    done = shell(folder, job, SLURM_JOB_ID="1", SLURM_SUBMIT_DIR=str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    for said in (submit("--dry-run", code=2), done.stderr):
        assert "error: cluster/site.env: ends the shell" in said
        assert f"2:{line}" in said


def test_options_for_plans_alone_are_those_of_train() -> None:
    hints = get_type_hints(Train, include_extras=True)
    assert tuple(name for name, hint in hints.items() if OF_PLAN in getattr(hint, "__metadata__", ())) == FOR_PLANS


def test_options_of_the_shell_that_a_site_sets_stay_there(folder: Path, submit: Submit) -> None:
    (folder / "cluster" / "site.env").write_text("set -e\ncd /\nSBATCH_ACCOUNT=theirs\n")
    assert "SBATCH_ACCOUNT=theirs " in submit("--to", "prepare", "--dry-run")
    assert shell(folder, ". cluster/functions.sh; read_site; false; pwd").stdout == f"{folder}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nowhere"], "--text nowhere: no such file or folder"),
        (["--from", "finetune", "--run", "runs/none"], "--run runs/none: no such folder"),
        (["--recipe", "demo", "--gpu=h100-80"], "--gpu=h100-80: only for train.py --check"),
        (["--tasks", "squd"], "--tasks squd: there is cola"),
        (["--tasks", "swag"], "data/swag: not there; python finetuning/fetch.py swag"),
        (["--from", "pretrain", "--shards", "data/none", "--dry-run"], "error: --shards data/none: not there"),
        (["--shards", "wiki=data/wiki"], "--shards wiki=data/wiki: a text makes one folder, without a name"),
        (["--from", "pretrain", "--shards", "wiki=data/none", "--dry-run"], "--shards wiki=data/none: "),
        (["--script", "pretrain_huge"], "there is no cluster/pretrain_huge.slurm"),
        (["--from", "gather", "--to", "prepare"], "the first comes after the last"),
        (["--from", "finetune", "--phases.0.steps", "3"], "--phases.0.steps 3: not understood"),
        (["--seeds", "0"], "--seeds 0: give a whole number"),
        (["--seeds", "five"], "--seeds five: give a whole number"),
        (["CLOZE_SHARDS=/scratch/shards"], "error: CLOZE_SHARDS=/scratch/shards: is no longer a variable"),
        (["--for-prepare", "--vocab 'a"], "--for-prepare: --vocab 'a: No closing quotation"),
        (["--dry-run", "CLOZE_FINETUNE_OPTIONS=--comment='a"], "error: CLOZE_FINETUNE_OPTIONS: --comment='a: "),
    ],
)
def test_what_would_fail_later_is_refused_now(folder: Path, submit: Submit, words: list[str], message: str) -> None:
    variables = dict(word.split("=", 1) for word in words if word.startswith("CLOZE_"))
    assert message in submit(*(word for word in words if not word.startswith("CLOZE_")), code=2, **variables)
    assert not calls(folder)


@pytest.fixture
def arguments_checked(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Checks arguments in a process that has PyTorch loaded; the variables of a site with a Python and two ranks."""

    def run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
        if "pretraining/train.py" not in command:
            return run_program(command, variables)
        done = processes.run_program(command[1], command[2:], Path.cwd(), 90.0, **(variables or {}))
        if done.code:
            raise UserError(done.errors)
        return done.output

    monkeypatch.setattr("cluster.submit.run_program", run)
    two = "--nodes=2 --gpus-per-node=1"
    return {"CLOZE_IMAGE": "", "CLOZE_PYTHON": sys.executable, "CLOZE_PRETRAIN_OPTIONS": two}


def test_a_recipe_of_a_mesh_is_checked_for_the_ranks_of_the_job(
    folder: Path, submit: Submit, arguments_checked: dict[str, str]
) -> None:
    words = ["--to", "pretrain", "--script", "pretrain_gpt2_8b"]
    submit(*words, **{**arguments_checked, "CLOZE_PRETRAIN_OPTIONS": ""})
    two, three = "--nodes=2 --ntasks-per-node=2", "--nodes=3,8 --gpus-per-node=1"
    for own, ranks in (("-N 3-8 --gpus-per-node=a100:4", 12), (two, 4), (three, 3)):
        said = submit(*words, code=2, **{**arguments_checked, "CLOZE_PRETRAIN_OPTIONS": own})
        assert f"the job has {ranks} ranks: CLOZE_PRETRAIN_OPTIONS=" in said
    assert len(calls(folder)) == 2


UNKNOWN = {"--phases.0.stps 3": "did you mean phases.0.steps?", "--time-limit soon": "--time-limit soon: "}
UNKNOWN |= {"--from pretrain": "--shards data/wiki: no "}


@pytest.mark.parametrize("words", UNKNOWN)
def test_words_that_train_does_not_know_are_refused(
    folder: Path, submit: Submit, arguments_checked: dict[str, str], words: str
) -> None:
    assert UNKNOWN[words] in submit("--recipe", "recipe.toml", *words.split(), code=2, **arguments_checked)
    assert not calls(folder)


def test_it_is_at_home_in_clozes_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is not Cloze's folder" in run_main(main, "pipeline", code=2)


def test_a_job_says_what_it_does_not_use_and_what_it_could(folder: Path) -> None:
    """Tasks of a GPU, which srun would refuse, and GPUs that Slurm knows nothing of."""
    write_program(folder / "bin" / "nvidia-smi", "echo GPU 0; echo GPU 1")
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_GPU": "2", "SLURM_MEM_PER_CPU": "1", "SLURM_GPUS_PER_NODE": "0"}
    job = "scontrol() { :; }; prepare_job; ranks_per_node; env | grep -E '^SLURM_(NTASKS_PER|MEM_PER)'"
    done = shell(folder, f". cluster/functions.sh; {job}", **slurm, CLOZE_IMAGE="", CLOZE_PYTHON=sys.executable)
    used, ranks, memory = done.stdout.splitlines()
    assert "--ntasks-per-gpu=2 is not used" in used
    assert (ranks, memory) == ("1", "SLURM_MEM_PER_NODE=0")
    assert "--ntasks-per-node=2 takes them all" in done.stderr


def test_scripts_are_short_and_name_no_site() -> None:
    for path in [*ROOT.glob("cluster/*.slurm"), *ROOT.glob("cluster/*.sh"), *ROOT.glob("docs/examples/*.sh")]:
        lines = path.read_text().splitlines()
        given = {shlex.split(line)[1].partition("=")[0] for line in lines if line.startswith("#SBATCH")}
        assert not given & {"--partition", "--account", "--qos", "--constraint", "-p", "-A", "-q", "-C"}, path
        if path.suffix == ".slurm":
            assert len(lines) < 60
            assert {"--open-mode", "--requeue"} <= given
