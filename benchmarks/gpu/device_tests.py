#!/usr/bin/env python3
"""Runs the tests that are marked `gpu`, and counts how they end."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import subprocess
import tempfile
from dataclasses import dataclass
from xml.etree import ElementTree

import tyro

from benchmarks.measure import write_results

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class DeviceTests:
    """Runs the tests that need a GPU."""

    out: Path
    """File for the counts."""


def count(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by a report of pytest's."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, errors, failures, skipped = (
        sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "errors", "failures", "skipped")
    )
    return {"passed": tests - errors - failures - skipped, "failed": errors + failures, "skipped": skipped}


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code."""
    settings = tyro.cli(DeviceTests, args=arguments, prog="device_tests.py")
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "--verbose", "-rs", f"--junitxml={report}", "-p", "no:cacheprovider"]
        code = subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False).returncode
        if report.exists():
            write_results(settings.out, count(report))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
