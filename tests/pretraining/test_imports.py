"""What takes long to load is loaded by those alone who need it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

FINE_TUNING = (
    "engine.step checkpoint.reading checkpoint.writing huggingface.folders huggingface.verify processes.watchdog "
    "reporting.run_log reporting.figures"
)


@pytest.mark.parametrize(
    ("modules", "others"),
    [
        ("config.schedule planning.plan data.order data.dataset", "torch numba"),  # on login nodes, and by each rank
        (FINE_TUNING, "pretraining.training pretraining.data transformers matplotlib"),
    ],
)
def test_imports_load_nothing_that_is_not_needed(modules: str, others: str) -> None:
    code = f"import sys, {', '.join(f'pretraining.{name}' for name in modules.split())}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {*done.stdout.split()} & {*others.split()}
