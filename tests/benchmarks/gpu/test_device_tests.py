"""The ends of tests are counted as pytest reports them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.basics import count

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise OSError

def test_one(): pass
def test_two(): pass
def test_three(): assert 0
def test_four(broken): pass
@pytest.mark.skip
def test_five(): pass
"""


def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    assert count(tmp_path / "report.xml") == {"passed": 2, "failed": 2, "skipped": 1}
