"""The parts of `make gpu`, the most important first, with what each measures and the seconds that it takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import fine_tuning, inference, throughput
from benchmarks.contests import OURS
from benchmarks.gpu.probes import measure_attention, measure_fp8, measure_host
from benchmarks.gpu.run import PROFILE
from benchmarks.measure import ROOT
from benchmarks.sides import sides_in_this_process
from benchmarks.training_sides import Contest
from data_prep.common.errors import UserError
from pretraining.checkpoint.record import list_finished, parse_step
from pretraining.reporting.metrics_file import METRICS, read_all_records

DATA = ROOT / "build/gpu-shards"
"""Shards of all parts."""
TINY = "tiny-128-4"
"""The contest of a dry run."""
SETTLED = 3
"""Steps after a start that do not count: they compile, allocate and read for the first time."""
EVERY = 20
"""Steps between checkpoints of a run."""


@dataclass(frozen=True)
class Place:
    """Where and how a part is measured."""

    dry: bool
    """On a CPU with a tiny model."""
    folder: Path
    """For profiles."""
    out: Path
    """The file of results of a benchmark."""
    console: Console

    def choose(self, real: Any, dry: Any) -> Any:
        """Chooses what a dry run takes in place of the real thing."""
        return dry if self.dry else real


Work = Callable[[Place], Any]
"""Measures; returns the results, or writes them into the file of the place."""


@dataclass(frozen=True)
class Part:
    """A part of the measurement."""

    name: str
    seconds: int
    """Its approximate time on one H200; it is not started if less is left."""
    what: str
    measure: Work
    needs: tuple[str, ...] = ()
    """Packages that it needs, and that may be missing."""


def compare(contest: str, *against: str, rounds: int = 10, profile: bool = True) -> Work:
    """Returns a contest of throughput.py, against other sides than ours."""

    def measure(place: Place) -> None:
        name, count = place.choose((contest, rounds), (TINY, 1))
        profiles = place.folder / PROFILE if profile else None
        settings = throughput.Throughput(DATA, (name,), against or (OURS,), count, profiles, place.out)
        with sides_in_this_process():
            throughput.measure(settings, place.console)

    return measure


def compare_answers(place: Place) -> None:
    """Measures answers with and without CUDA graphs, beside transformers."""
    contests = place.choose(("base-128-1", "base-128-8", "base-384-1", "base-384-8"), ("tiny-128-2",))
    with sides_in_this_process():
        inference.measure(inference.Inference(contests, place.choose(2, 1), place.out), place.console)


def compare_fine_tuning(place: Place) -> None:
    """Measures fine-tuning beside the Trainer, each in a process of its own, in which it loops over its steps."""
    name, rounds = place.choose(("base-demo-dynamic", 3), ("tiny-demo-dynamic", 1))
    fine_tuning.measure(fine_tuning.FineTuningSpeed((name,), rounds, place.out), place.console)


def run_tests(place: Place) -> dict[str, Any]:
    """Runs the tests that need a GPU; a dry run only collects them. Raises UserError if one fails."""
    sources = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [str(path) for path in sources if any(map(path.read_text().count, GPU_MARKS))]
    spread = ("-n", "8") if find_spec("xdist") else ()
    options = "-m pytest -m gpu -q -p no:cacheprovider --tb=short --continue-on-collection-errors".split()
    command = [sys.executable, *options, *place.choose(spread, ("--collect-only",)), *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()[-40:]
    if done.returncode:
        raise UserError("\n".join([*lines, done.stderr[-1000:], f"pytest ended with {done.returncode}"]))
    return {"tests": lines[-1]}


GPU_MARKS = ("mark.gpu", "ON_DEVICE")
"""Words of a test file that has tests marked `gpu`."""


def train_for(command: Sequence[str], run: Path, seconds: float) -> list[dict[str, Any]]:
    """Trains for this time, for some steps and to a checkpoint at least, then kills the run, as a power cut does;
    returns its logged steps."""
    begun = time.time()

    def read_steps() -> list[dict[str, Any]]:
        lines = read_all_records(run / METRICS)
        return [line for line in lines if line["kind"] == "step" and line["time"] > begun]

    with subprocess.Popen(command) as process:
        try:
            steps = read_steps()
            while len(steps) <= SETTLED or steps[-1]["time"] - steps[0]["time"] < seconds or not list_finished(run):
                if process.poll() is not None:
                    raise UserError(f"the run ended with {process.returncode}; its output says why")
                time.sleep(0.2)
                steps = read_steps()
        finally:
            process.kill()
    return read_steps()


def summarise_speed(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over the steps of a start, without the first SETTLED."""
    settled = steps[SETTLED:]
    names = ("pieces_per_second", "flops_utilisation", "waiting_for_data", "seconds_per_step", "peak_memory_bytes")
    known = {name: [step[name] for step in settled if step.get(name) is not None] for name in names}
    medians = {name: statistics.median(values) for name, values in known.items() if values}
    return {"steps": len(settled), **medians}


def train_twice(place: Place) -> dict[str, Any]:
    """Trains by train.py, kills the run after a checkpoint, and continues it. Raises UserError if it continues with
    another step than that after the checkpoint."""
    contest = Contest.parse(place.choose("large-128-1024", "tiny-128-8"))
    own = ("--model.size", contest.size, "--phases.0.batch", contest.sequences)
    lengths = [word for n in (0, 1) for word in (f"--phases.{n}.length", contest.length)]  # 1 is never reached
    often = ("--checkpoints.every", EVERY, "--checkpoints.keep", 2, "--evaluation.every", 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ("--recipe", "bert_large_lamb", "--data", DATA, "--out", run, *own, *lengths, *often)
        train = ROOT / "pretraining/train.py"
        command = [sys.executable, str(train), *map(str, words), "--logging.tensorboard", "false"]
        first = train_for(command, run, place.choose(45, 1))
        saved = parse_step(list_finished(run)[-1])
        second = train_for(command, run, place.choose(15, 1))
    before = {step["step"]: step["loss"] for step in first}
    again = [abs(step["loss"] - before[step["step"]]) for step in second if step["step"] in before]
    if second[0]["step"] != saved + 1:
        raise UserError(f"the run continues with step {second[0]['step']} after the checkpoint of step {saved}")
    return {
        "first": summarise_speed(first),
        "continued": summarise_speed(second),
        "killed_after_step": first[-1]["step"],
        "newest_checkpoint": saved,
        "steps_made_again": len(again),
        "largest_difference_of_their_losses": max(again, default=None),
    }


def probe(measure: Callable[..., Any], *given: Any) -> Work:
    """Returns a measurement of probes.py, whose results are printed."""

    def run(place: Place) -> Any:
        found = measure(*given, place.dry)
        place.console.print("\n".join(f"{name}: {each}" for name, each in found.items()), markup=False)
        return found

    return run


OWN, EAGER, LAMB, MUON = (f"{OURS}, {name}" for name in ("own attention", "no graphs", "LAMB", "Muon"))
DETERMINISTIC, PEER = f"{OURS}, deterministic", "transformers"
TEXTS, TESTS = ("numba", "sentencex", "tokenizers"), ("pytest", "pytest_timeout", "hypothesis")
PARTS = (
    Part("host", 5, "microseconds of the host for a launch", probe(measure_host)),
    Part("tests", 90, "tests that need a GPU", run_tests, TESTS),
    Part("attention", 25, "attention alone, flash and ours, at 128 and 512", probe(measure_attention, DATA)),
    Part("large-128", 40, "large, 1,024 x 128, flash and our attention in turns", compare("large-128-1024", OWN)),
    Part("large-512", 40, "large, 256 x 512, flash and our attention in turns", compare("large-512-256", OWN)),
    Part("small-large", 30, "large, 64 x 128: graphs, LAMB, Muon", compare("large-128-64", EAGER, LAMB, MUON)),
    Part("small-base", 15, "base, 32 x 128: graphs", compare("base-128-32", EAGER, rounds=20)),
    Part("small-mini", 15, "mini, 64 x 128: graphs, LAMB, Muon", compare("mini-128-64", EAGER, LAMB, MUON, rounds=20)),
    Part("fp8", 10, "products of a layer in FP8 and bf16", probe(measure_fp8)),
    Part("answers", 50, "answers of base, with and without graphs, and of transformers", compare_answers),
    Part("fine-tuning", 60, "fine-tuning of base, beside the Trainer", compare_fine_tuning, TEXTS),
    Part("run", 120, "a run by train.py, killed and continued", train_twice),
    Part("deterministic", 20, "the same bits", compare("large-128-256", DETERMINISTIC, profile=False)),
    Part("peer", 70, "large beside compiled transformers", compare("large-128-256", f"{PEER}, compiled"), (PEER,)),
)  # fmt: skip
