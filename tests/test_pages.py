"""README and docs/: whatever they tell a reader to type works, in the order of the pages, and so do their scripts."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT, write_wiki
from support.processes import be_program, run_program, start
from support.tasks import write_tasks

from pretraining.objectives.declaration import objectives

README = [ROOT / "README.md"]
PAGES = [*README, *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_MORE = (
    *("make ", "git ", ". .venv", "cd ", "fetch.py", "sbatch", "srun", "site.env", "submit.py"),
    *("offline.sh", "docker ", "apptainer "),
)
"""What commands hold that need a network or a cluster, or install something."""
NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there."""


def blocks(pages: Sequence[Path], kind: str) -> list[str]:
    """The blocks of pages in a language."""
    return [text for page in pages for text in re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)]


def commands(pages: Sequence[Path]) -> list[str]:
    """The lines of pages that a reader would type, each once."""
    lines = "\n".join(blocks(pages, "console")).replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines if line.startswith("$ ")]
    return list(dict.fromkeys(typed))


def runnable(pages: Sequence[Path]) -> list[str]:
    """The commands of pages that need neither a network nor a cluster, nor install anything."""
    return [command for command in commands(pages) if not any(start in command for start in NEEDS_MORE)]


def fill(folder: Path) -> Path:
    """Makes a folder with what the pages speak of."""
    write_wiki(folder / "wiki")
    write_wiki(folder / "sample", documents=20)
    write_wiki(folder / "books", seed=2)
    (folder / "questions.txt").write_text("where is the river?\nwho lives there?\n")
    (folder / "texts.txt").write_text("the river is wide\na house\n")
    pairs = [{"question": f"who is {number}?", "passage": f"{number} lives there"} for number in range(40)]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    (folder / "beir/scifact/qrels").mkdir(parents=True)
    (folder / "beir/scifact/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\tp\t1\n")
    for name, number in (("queries", "q"), ("corpus", "p")):
        (folder / "beir/scifact" / f"{name}.jsonl").write_text(json.dumps({"_id": number, "text": "a river"}))
    for text in blocks(PAGES, "toml"):
        if named := re.match(r"# (\w+\.toml)\n", text):
            (folder / named[1]).write_text(text)
    write_tasks(folder)
    for name in ("data_prep", "pretraining", "finetuning", "cluster"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")  # its commands write their results beside themselves
    return folder


@pytest.fixture(scope="module")
def folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody reads README and then docs/, which go on with what its commands have made."""
    return fill(tmp_path_factory.mktemp("pages"))


def type_in(folder: Path, command: str) -> None:
    """Types a command, which must end well."""
    words = shlex.split(command)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if words[0] == "mpirun":
        words[1:1] = ["--allow-run-as-root", "--oversubscribe"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def type_in_fork(folder: Path, command: str) -> None:
    """Types a command that loads PyTorch in a process that has loaded it."""
    python, *words = shlex.split(command)
    if python == "python" and not words[0].startswith("data_prep/"):
        done = run_program(words[0], words[1:], folder, seconds=300)
        assert done.code == 0, done.output + done.errors
    else:
        type_in(folder, command)


def test_readme_has_commands() -> None:
    assert {"make demo", "make test"} <= set(commands(README))
    assert "python data_prep/shard.py --docs wiki/" in commands(README)


@pytest.mark.slow
@pytest.mark.parametrize("command", runnable(PAGES))
def test_commands_of_all_pages_work_in_their_order(command: str, folder_of_all: Path) -> None:
    type_in_fork(folder_of_all, command)


DOWNLOADS = dict.fromkeys(part for command in commands(PAGES) for part in command.split(" && ") if "fetch.py" in part)


def test_downloads_are_understood(tmp_path: Path) -> None:
    """Without a network, a right command fails on the network and not on its words."""
    nowhere = {"http_proxy": NOWHERE, "https_proxy": NOWHERE}
    begun = {}
    for command in DOWNLOADS:
        entry, *words = shlex.split(command)[1:]
        if words[0] != "demo":
            own = [str(ROOT / entry), words, tmp_path]
            begun[command] = start(1, be_program, *own, environment=nowhere, launched=False)
    assert begun
    for command, run in begun.items():
        assert "cannot be reached" in run.wait()[0].errors, command


def test_all_figures_of_objectives_are_explained() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    figures = {figure.name for objective in objectives().values() for figure in objective.figures}
    assert {name for name in figures if f"`{name}`" not in page} == set()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in commands(PAGES) if line.startswith("make ")}
    assert named <= targets


# docs/examples/: each script as it stands, with few steps and little text, and no network

ACTIVATE = """
python() {
  case "$*" in
    *fetch.py*)
      [[ $(https_proxy=http://127.0.0.1:9 BIN/python "$@" 2>&1) == *"cannot be reached"* ]]
      return ;;
    *--check*) ;;
    *train.py*) set -- "$@" SMALL ;;
    *run_glue.py*) set -- "$@" --epochs 1 --learning_rate 1e-3 --length 32 ;;
  esac
  BIN/python "$@"
}
torchrun() { BIN/torchrun "${@/#8/2}" SMALL; }
"""
"""Takes the place of .venv/bin/activate. Downloads must reach the network; runs are small, and 8 ranks are 2."""
SMALL = "--model.size tiny --evaluation.every 0"
PHASE = " --phases.{0}.steps 1 --phases.{0}.batch 8 --phases.{0}.micro_batch 4"


def make_folder(folder: Path, phases: int) -> Path:
    """Cloze's folder after its installation and the downloads; runs have this number of phases."""
    for name in ("data_prep", "pretraining", "finetuning", "cluster", "docs"):
        (folder / name).symlink_to(ROOT / name)
    write_wiki(folder / "wiki")
    write_wiki(folder / "data" / "raw" / "simple")
    write_tasks(folder)
    small = SMALL + "".join(PHASE.format(number) for number in range(phases))
    (folder / ".venv" / "bin").mkdir(parents=True)
    activate = ACTIVATE.replace("BIN", str(Path(sys.executable).parent)).replace("SMALL", small)
    (folder / ".venv" / "bin" / "activate").write_text(activate)
    return folder


def run_example(folder: Path, *words: str, **variables: str) -> str:
    """Runs a script of docs/examples/, which must end well; returns its output."""
    environment = {**os.environ, **variables}
    command = ["bash", f"docs/examples/{words[0]}", *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("script", "phases", "run"), [("laptop.sh", 3, "laptop"), ("node.sh", 2, "base")])
def test_a_script_goes_from_text_to_glue(script: str, phases: int, run: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, phases)
    run_example(folder, script)
    assert len(json.loads((folder / "runs" / run / "glue" / "results.json").read_text())["sst2"]["runs"]) == 1
    weights = (folder / "runs" / run / "export" / "model.safetensors").stat()
    if script == "node.sh":
        return
    run_example(folder, script)  # repeats nothing
    assert (folder / "runs" / run / "export" / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_script_goes_from_text_to_answers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, 3)
    asked = ("search.sh", "wiki")
    answer = json.loads(run_example(folder, *asked, "which river is long?").splitlines()[-1])
    texts = [
        json.loads(line)["text"] for line in (folder / "data" / "pairs" / "passages.jsonl").read_text().splitlines()
    ]
    assert answer["query"] == "which river is long?"
    assert [each["text"] for each in answer["nearest"]] == [texts[each["row"]] for each in answer["nearest"]]
    written = (folder / "runs" / "searching" / "passages.npy").stat().st_mtime_ns
    answer = json.loads(run_example(folder, *asked, texts[5]).splitlines()[-1])  # only the question is new
    assert answer["nearest"][0]["row"] == 5
    assert (folder / "runs" / "searching" / "passages.npy").stat().st_mtime_ns == written


def test_the_script_for_slurm_submits_four_jobs(tmp_path: Path) -> None:
    """In an image the jobs have a Python that submit.py cannot ask. tests/cluster/test_slurm.py runs the jobs."""
    folder = make_folder(tmp_path, 2)
    shown = run_example(folder, "slurm.sh", "--dry-run", CLOZE_IMAGE="a.sif")
    jobs = [line for line in shown.splitlines() if "sbatch" in line]
    assert [line.partition("=")[0] for line in jobs] == ["prepare", "pretrain", "finetune", "gather"]
