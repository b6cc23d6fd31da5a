"""`make demo`, whole: from nothing to the scores of a model with and without pre-training."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

MODELS = ("from-scratch", "pre-trained")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_ends_with_two_scores_beside_each_other(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("data_prep", "pretraining", "finetuning"):
        (tmp_path / name).symlink_to(ROOT / name)
    installed = ["--assume-old=.venv/installed", f"BIN={Path(sys.executable).parent}"]
    command = ["make", "--no-print-directory", "demo", *installed]  # make says where it is when another one runs it
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = {}
    for name in MODELS:
        folder = tmp_path / "build" / "demo-scores" / name
        scores[name] = json.loads((folder / "results.json").read_text())["package"]["score"]
        assert (folder / "package" / "curves.png").exists()
    assert scores["from-scratch"] > 0.2  # guessing is right in one of eight
    assert scores["pre-trained"] > scores["from-scratch"] + 0.05  # by chance 0.024; pre-training was seen to give 0.15
    last = done.stdout.rstrip().splitlines()[-2]  # before what to do next
    baseline = json.loads((folder / "results.json").read_text())["package"]["baseline"]["scores"]["dev"]["accuracy"]
    told = [f"{100 * score:.1f}" for score in (baseline, *(scores[name] for name in MODELS))]
    assert last.split()[:5] == ["package", "accuracy", *told]
