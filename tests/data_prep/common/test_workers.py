"""What worker processes leave behind where all that belongs to them is killed at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

WORK = """
import os, signal, time
from pathlib import Path
from data_prep.common.workers import open_workers
if __name__ == "__main__":
    with open_workers(2, "json") as workers:
        list(workers.run(time.sleep, [0.3] * 6))
        maps = Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()
        print(*{line.split()[5] for line in maps if "/dev/shm/sem." in line}, flush=True)
        os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="Linux has its semaphores there")
def test_workers_that_are_killed_at_once_leave_no_semaphores(tmp_path: Path) -> None:
    program = tmp_path / "work.py"
    program.write_text(WORK)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(names := done.stdout.split()) >= 5
    assert [name for name in names if Path(name).exists()] == []


def test_helpers_run_no_module_of_the_current_folder(tmp_path: Path) -> None:
    """`python -c` looks there first, and it may be one in which others write."""
    program, here = tmp_path / "work.py", tmp_path / "here"
    program.write_text(WORK.replace("os.killpg(0, signal.SIGKILL)", ""))
    (here / "multiprocessing").mkdir(parents=True)
    (here / "multiprocessing" / "__init__.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "planted").exists()
