"""Every command ends in one line under a Python that will not do, and hears signals that its starter blocks."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.commands import block_all_signals
from support.copies import write_other_copy
from support.marks import slow

ENTRIES = [
    path
    for floor in ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster")
    for path in sorted((ROOT / floor).rglob("*.py"))
    if '\nif __name__ == "__main__"' in path.read_text() and path.name != "beginning.py"
]
FIRST_READ = [ROOT / "data_prep" / name for name in ("__init__.py", "common/__init__.py", "common/beginning.py")]
"""What every entry imports before its Python is known to be new enough."""
BARE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
STANDARD_LIBRARY_ALONE = {"cluster/submit.py"}
AS_OLD = """
import runpy, sys
sys.version_info = (VERSION, 10, "final", 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def line_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a command said that ended with 2, which is one line."""
    assert done.returncode == 2, done
    assert not done.stdout
    [line] = done.stderr.splitlines()
    return line


def run(*words: str, path: Path | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command, with packages of a folder or without any."""
    environment = BARE if path is None else {**BARE, "PYTHONPATH": str(path)}
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize("path", [*ENTRIES, *FIRST_READ], ids=name)
def test_an_old_python_understands_what_it_reads_before_it_is_refused(path: Path) -> None:
    """Which is the standard library alone."""
    tree = ast.parse(path.read_text(), feature_version=(3, 6))
    assert not [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    if path in ENTRIES:
        at = next(number for number, node in enumerate(tree.body) if isinstance(node, ast.If))
        before = [node for node in tree.body[:at] if isinstance(node, ast.Import | ast.ImportFrom)]
        assert {ast.unparse(node) for node in before} <= {"import sys", "from pathlib import Path"}
        assert "\n    begin(" in ast.unparse(tree.body[at])


def test_submit_needs_the_standard_library_alone() -> None:
    assert run(sys.executable, "-S", "-E", "cluster/submit.py", "--help").returncode == 0


@pytest.mark.parametrize("version", [slow("3.6"), "3.9"])
def test_a_python_that_is_too_old_is_told_in_a_line(version: str) -> None:
    """A real one where there is any, otherwise this one that says so of itself."""
    places = [os.environ["PATH"], *map(str, (Path.home() / ".pyenv/versions").glob("*/bin"))]
    old = shutil.which(f"python{version}", path=os.pathsep.join(places))
    python = [sys.executable, "-S", "-c", AS_OLD.replace("VERSION", version.replace(".", ", "))]
    if old is not None and not run(old, "--version").returncode:
        python = [old]
    for path in ENTRIES if version == "3.6" else ENTRIES[::9]:  # that each asks first is shown above
        if name(path) not in STANDARD_LIBRARY_ALONE or version == "3.6":
            said = line_of(run(*python, name(path), "--help"))
            assert re.match(rf"error: \S+ is Python {version}, and this needs 3\.(10|9) or newer; .*\.venv", said)


PACKAGE = """
import os, signal
if signal.pthread_sigmask(signal.SIG_BLOCK, []):
    os._exit(9)
import absent
"""
"""A package that lacks another one, and minds signals that are blocked."""


NEED_MORE = [path for path in ENTRIES if name(path) not in STANDARD_LIBRARY_ALONE]


@pytest.mark.parametrize("path", [slow(path) if at % 9 else path for at, path in enumerate(NEED_MORE)], ids=name)
def test_a_python_without_the_packages_is_told_in_a_line_and_hears_all_signals(path: Path, tmp_path: Path) -> None:
    """Slurm 25.05 starts the tasks of srun with SIGCHLD blocked; here all are."""
    for package in "tyro rich torch numpy psutil pydantic pyarrow matplotlib jinja2 packaging".split():
        (tmp_path / f"{package}.py").write_text(PACKAGE)
    write_other_copy(tmp_path)
    done = run(sys.executable, "-S", name(path), "--help", path=tmp_path, preexec_fn=block_all_signals)
    assert re.match(r"error: \S+ has no package absent; .*\.venv", line_of(done))


CLOSED = """
import sys
from data_prep.common.beginning import begin
begin()
print("nobody reads this")
print("nor this", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, "it would have what is printed"
    file.write(sys.stdin.read() + "content")
"""


def test_closed_streams_read_and_write_nothing(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    assert run(*command, path=ROOT).returncode == 0
    assert (tmp_path / "file").read_text() == "content"


def test_a_file_of_ours_that_cannot_be_there_is_told_in_a_line() -> None:
    """An objective of two names, say, which is found where files are imported."""
    program = "from data_prep.common.beginning import begin; begin(); from data_prep.common import errors; "
    done = run(sys.executable, "-c", program + "raise errors.UserError('ltr.py: mend it')")
    assert (done.returncode, done.stderr) == (2, "error: ltr.py: mend it\n")
