"""The simulation of many ranks, with few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.processes import ROOT

from data_prep.common.files import read_json


def test_a_small_simulation(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    out.write_text('{"beats": {"3": "of an earlier run"}}')
    words = ["--ranks", "3", "--only", "meeting", "votes", "connecting_when_they_speak", "checkpoint", "--out", out]
    command = [sys.executable, str(ROOT / "benchmarks" / "ranks.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=90)
    assert done.returncode == 0, done.stderr
    found = read_json(out)
    assert found["beats"] == {"3": "of an earlier run"}
    assert found["meeting"]["3"]["requests_of_a_rank"] < 20
    assert found["votes"]["3"]["turns"] == 2
    assert found["connecting_when_they_speak"]["3"]["sockets_of_a_rank"] == 1.0
    assert found["checkpoint"]["3"]["files"] == 10
    assert found["checkpoint"]["3"]["files_opened_for_moments"] == 2
    assert "processor" in found["environment"]
