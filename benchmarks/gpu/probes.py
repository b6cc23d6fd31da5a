"""What `make gpu` measures besides benchmarks: what bounds a step, the tests that need a GPU, and a run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import ROOT
from benchmarks.training_sides import Contest
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.checkpoint.record import list_finished, parse_step
from pretraining.engine.precision import choose_dtype
from pretraining.model import gpu_layouts
from pretraining.model.attention import lay_out
from pretraining.model.batch import PretrainingBatch
from pretraining.model.dropout import Dropout
from pretraining.processes.group import choose_device
from pretraining.reporting.hardware import measure_seconds, synchronize
from pretraining.reporting.metrics_file import METRICS, read_all_records

SHARDS = ROOT / "build/gpu-shards"
"""Shards of all parts."""
SETTLED, EVERY = 3, 20
"""Steps after a start that do not count, since they compile and allocate; steps between checkpoints of a run."""
CALLS, ROUNDS = 200, 10
"""Launches before one waits for the GPU, whose queue holds more; and how often."""


class _Double(torch.autograd.Function):
    """The smallest function of autograd."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x + x

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad + grad


def measure_calls(device: torch.device, work: Callable[[], object]) -> float:
    """Measures the median microseconds that the host needs for a call; it does not wait for the GPU meanwhile."""
    found = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        found.append(timeit(work, number=CALLS))
    return round(1e6 * median(found[1:]) / CALLS, 2)


def measure_host(dry: bool, *_: object) -> dict[str, float]:  # noqa: ARG001
    """Measures the microseconds of the host for a launch in four ways; without Triton or a GPU in three."""
    device = choose_device("auto", World())
    x, double = torch.zeros(16, 64, device=device), cast(Any, _Double.apply)
    weight, learns = torch.zeros(64, 64, device=device), torch.zeros(16, 64, device=device, requires_grad=True)
    works: dict[str, Callable[[], object]] = {
        "a bare launch": lambda: x.add_(1),
        "F.linear": lambda: F.linear(x, weight),
        "an autograd function, forward and backward": lambda: double(learns).backward(x),
    }
    if device.type == "cuda" and find_spec("triton"):
        kernels = import_module("pretraining.model.gpu_kernels")
        row = x.to(torch.bfloat16)
        works["a Triton launch"] = lambda: kernels.gelu_forward(row, row[0], False)
    return {name: measure_calls(device, work) for name, work in works.items()}


def measure_attention(dry: bool, *_: object) -> dict[str, float]:
    """Measures nanoseconds of attention a piece by each kernel, on batches of real lengths."""
    found = dict[str, float]()
    for name in ("tiny-128-4",) if dry else ("large-128-1024", "large-512-256"):
        shape, read = Contest.parse(name).open(SHARDS)
        for choice in ("flash", "own"):
            gpu_layouts.choose(choice)
            for what, seconds in time_attention(shape.hidden, shape.heads, read(0)).items():
                found[f"{name}, {choice}, {what}"] = round(seconds, 1)
    return found


def time_attention(hidden: int, heads: int, batch: PretrainingBatch) -> dict[str, float]:
    """Times the chosen kernels of attention on a batch, forward and with the gradients."""
    device = choose_device("auto", World())
    dtype, batch = choose_dtype("auto", device), batch.to(device)
    pieces = len(batch.pieces)
    qkv, bias = (torch.randn(*rows, 3 * hidden, device=device, dtype=dtype) for rows in ((pieces,), ()))
    grad = torch.randn(pieces, hidden, device=device, dtype=dtype)
    dropout = Dropout(0.1, torch.arange(pieces, dtype=torch.int32, device=device))
    layout = lay_out(batch.starts, batch.lengths, grad, heads, dropout=dropout)
    attend, leaves = layout.attends_sums(grad) or layout.attend, (qkv.requires_grad_(), bias.requires_grad_())

    def attend_both_ways() -> None:
        torch.autograd.grad(attend(*leaves, heads, dropout), leaves, grad)

    works = {"forward": lambda: attend(*leaves, heads, dropout), "forward and backward": attend_both_ways}
    return {what: 1e9 * measure_seconds(device, work, 1.0) / pieces for what, work in works.items()}


def run_tests(dry: bool, *_: object) -> dict[str, Any]:
    """Runs the tests that need a GPU; a dry run only collects them. Raises UserError if one fails."""
    sources = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [str(path) for path in sources if "mark.gpu" in path.read_text() or "ON_DEVICE" in path.read_text()]
    how = ["--collect-only"] if dry else ["-n", "8"] if find_spec("xdist") else []
    words = "-m pytest -m gpu -q -p no:cacheprovider --tb=short --continue-on-collection-errors".split()
    command = [sys.executable, *words, *how, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode:
        raise UserError("\n".join([*lines[-60:], done.stderr[-1000:], f"pytest ended with {done.returncode}"]))
    return {"tests": lines[-1]}


def train_for(command: Sequence[str], run: Path, seconds: float) -> list[dict[str, Any]]:
    """Trains for this time, for some steps and to a checkpoint at least, then kills the run, as a power cut does;
    returns its logged steps."""
    begun, steps = time.time(), list[dict[str, Any]]()
    with subprocess.Popen(command) as process:
        try:
            while len(steps) <= SETTLED or time.time() < begun + seconds or not list_finished(run):
                if process.poll() is not None:
                    raise UserError(f"the run ended with {process.returncode}; its output says why")
                time.sleep(0.5)
                lines = read_all_records(run / METRICS)
                steps = [line for line in lines if line["kind"] == "step" and line["time"] > begun]
        finally:
            process.kill()
    return steps


def summarise_speed(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over the steps of a start, without the first SETTLED."""
    names = ("pieces_per_second", "flops_utilisation", "waiting_for_data", "seconds_per_step", "peak_memory_bytes")
    known = {name: [step[name] for step in steps[SETTLED:] if step.get(name) is not None] for name in names}
    return {"steps": len(steps), **{name: median(values) for name, values in known.items() if values}}


def train_twice(dry: bool, *_: object) -> dict[str, Any]:
    """Trains by train.py, kills the run after a checkpoint, and continues it. Raises UserError if it does not continue
    with the step after the checkpoint."""
    size, sequences, seconds = ("tiny", 8, (1, 1)) if dry else ("large", 1024, (60, 30))
    words = f"--recipe bert_large_lamb --model.size {size} --phases.0.batch {sequences} --phases.0.length 128 "
    words += f"--phases.1.length 128 --checkpoints.every {EVERY} --evaluation.every 1000000 --logging.tensorboard false"
    with tempfile.TemporaryDirectory() as folder:
        run, train = Path(folder) / "run", str(ROOT / "pretraining/train.py")
        command = [sys.executable, train, *words.split(), "--data", str(SHARDS), "--out", str(run)]
        first = train_for(command, run, seconds[0])
        saved = parse_step(list_finished(run)[-1])
        second = train_for(command, run, seconds[1])
    if second[0]["step"] != saved + 1:
        raise UserError(f"the run continues with step {second[0]['step']} after the checkpoint of step {saved}")
    return {"first": summarise_speed(first), "continued": summarise_speed(second)}
