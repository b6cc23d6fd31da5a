"""docs/examples/: each script as it stands, with few steps and little text, and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, write_wiki
from support.tasks import write_tasks

ACTIVATE = """
python() {
  case "$*" in
    *fetch.py*)
      [[ $(https_proxy=http://127.0.0.1:9 BIN/python "$@" --retries 1 --wait 0 2>&1) == *"cannot be reached"* ]]
      return ;;
    *--check*) ;;
    *train.py*) set -- "$@" SMALL ;;
    *run_glue.py*) set -- "$@" --epochs 1 --learning-rates 1e-3 --length 32 ;;
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


def test_the_script_for_slurm_submits_four_jobs(tmp_path: Path) -> None:
    """In an image the jobs have a Python that submit.py cannot ask. tests/cluster/test_slurm.py runs the jobs."""
    folder = make_folder(tmp_path, 2)
    shown = run_example(folder, "slurm.sh", "--dry-run", CLOZE_IMAGE="a.sif")
    jobs = [line for line in shown.splitlines() if "sbatch" in line]
    assert [line.partition("=")[0] for line in jobs] == ["prepare", "pretrain", "finetune", "gather"]
