"""What takes long to load is loaded by those alone who need it."""

import subprocess
import sys

from conftest import ROOT

PLANNING = "config.schedule planning.plan data.order data.dataset"
"""Modules that are imported on login nodes, and by each rank."""
FINE_TUNING = """engine.step checkpoint.reading checkpoint.writing huggingface.folders huggingface.verify
processes.watchdog reporting.run_log reporting.figures"""


def test_imports_load_nothing_that_is_not_needed() -> None:
    steps = {PLANNING: {"torch", "numba"}, FINE_TUNING: {"pretraining.training", "pretraining.data.batches"}}
    code = "import sys\n"
    for modules in steps:
        code += f"import {', '.join(f'pretraining.{name}' for name in modules.split())}\nprint(*sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    for line, others in zip(done.stdout.splitlines(), steps.values(), strict=True):
        assert not {*line.split()} & (others | {"transformers", "matplotlib"})
