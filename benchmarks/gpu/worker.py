#!/usr/bin/env python3
"""Runs the parts of `make gpu` one after another in this process. `run.py` starts it.

The table at the end of this file has all parts, the most important first.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()
    from pretraining.processes.environment import prepare_process

    prepare_process()

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from rich.console import Console

from benchmarks import throughput
from benchmarks.contests import OURS
from benchmarks.gpu.probes import SHARDS, measure_attention, measure_host, run_tests, train_twice
from benchmarks.gpu.run import BROKEN, ENDING, FOUND, PARTIAL, PROFILE, GpuRun, read_state
from benchmarks.measure import describe_environment, run_command
from benchmarks.peer import find_missing_packages
from benchmarks.sides import sides_in_this_process
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json
from data_prep.common.launchers import World
from pretraining.config.settings import Compute, Precision
from pretraining.devices import explain_absence
from pretraining.engine.precision import set_arithmetic
from pretraining.processes.group import choose_device, disconnect

SUBJECT = ("gpu", "torch", "commit")
"""Facts on which all results depend: if one changes, all parts run again."""


Work = Callable[[bool, Path, Console], Any]
"""Measures, in a dry run with a tiny model; returns the results, or writes them into a file."""


@dataclass(frozen=True)
class Part:
    """A part of the measurement."""

    name: str
    seconds: int
    """Its approximate time on one H200; it is not started if less is left."""
    what: str
    measure: Work
    needs: tuple[str, ...] = ()
    """Packages that it needs and that may be missing."""


def compare(contest: str, *against: str, rounds: int = 10) -> Work:
    """Returns a function that measures steps of pre-training beside other sides, with the times of our kernels."""

    def measure(dry: bool, out: Path, console: Console) -> None:
        name, count = ("tiny-128-4", 1) if dry else (contest, rounds)
        profile = GpuRun(dry=dry).folder / PROFILE
        with sides_in_this_process():
            throughput.measure(throughput.Throughput(SHARDS, (name,), against, count, profile, out), console)

    return measure


def compare_answers(dry: bool, out: Path, console: Console) -> None:
    """Measures answers with and without CUDA graphs, beside transformers."""
    inference = import_module("benchmarks.inference")
    contests = ("tiny-128-2",) if dry else inference.CONTESTS["cuda"]
    with sides_in_this_process():
        inference.measure(inference.Inference(contests, 1 if dry else 2, out), console)


def compare_fine_tuning(dry: bool, out: Path, console: Console) -> None:
    """Measures fine-tuning beside the Trainer, each in a process of its own, in which it loops over its steps."""
    fine_tuning = import_module("benchmarks.fine_tuning")
    name, rounds = ("tiny-demo-dynamic", 1) if dry else ("base-demo-dynamic", 3)
    fine_tuning.measure(fine_tuning.FineTuningSpeed((name,), rounds, out), console)


def choose(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Returns the parts with these names or prefixes of names; all if none is given."""
    found = {name: [part for part in parts if f"{part.name}-".startswith(f"{name}-")] for name in names}
    unknown = [name for name in names if not found[name]]
    if unknown:
        there = ", ".join(part.name for part in parts)
        raise UserError(f"{', '.join(unknown)}: no part of this name; there is {there}")
    return [part for part in parts if not names or any(part in some for some in found.values())]


def open_results(settings: GpuRun, about: dict[str, Any], console: Console) -> dict[str, Any]:
    """Returns the earlier results; sets them aside if they are of another GPU, torch or commit."""
    path, state = settings.folder / FOUND, read_state(settings.folder)
    subject = {name: about.get(name) for name in SUBJECT}
    if state.get("subject", subject) != subject:
        aside = path.rename(path.with_stem("results-before"))
        console.print(f"another GPU, torch or commit: all is measured anew; the results of before are in {aside}")
        state = {"parts": {}}
    return {**state, "subject": subject, "environment": about}


def run_part(part: Part, settings: GpuRun, state: dict[str, Any], console: Console) -> None:
    """Runs a part, and writes the results of all so far before and after it."""
    begun, ended, found, threads = time.time(), "done", None, torch.get_num_threads()
    state["running"] = {"name": part.name, "begun": begun, "limit": begun + 30 + 2 * part.seconds}
    write_json(settings.folder / FOUND, state)
    console.print(f"== {part.name}: {part.what}", markup=False)
    out = settings.folder / PARTIAL
    out.unlink(missing_ok=True)
    try:
        set_arithmetic(Precision(), Compute(), choose_device("auto", World()))  # whatever the part before has set
        found = part.measure(settings.dry, out, console)
    except Exception as error:
        ended = f"failed: {error}"
        if not isinstance(error, UserError):
            traceback.print_exc()
    measured = read_json(out) if out.exists() else found
    torch.set_num_threads(threads)
    seconds = round(time.time() - begun, 1)
    state["parts"][part.name] = {"begun": begun, "ended": ended, "seconds": seconds, "measured": measured}
    del state["running"]
    write_json(settings.folder / FOUND, state)
    with suppress(RuntimeError):  # after a fault of the GPU
        disconnect()
    lines = [f"{name}: {each}" for name, each in (found or {}).items()]
    console.print("\n".join([*lines, f"== {part.name}: {ended} after {seconds} s"]), markup=False)


def has_fault() -> bool:
    """Whether the GPU fails all that this process asks of it, as after an illegal address."""
    try:
        return torch.cuda.is_available() and torch.ones(1, device="cuda").item() != 1
    except RuntimeError:
        return True


def measure(settings: GpuRun, console: Console) -> int:
    """Runs the parts; returns the exit code."""
    chosen, left = choose(PARTS, settings.parts), list[str]()
    if settings.do == "list":
        console.print("\n".join(f"{part.name:14} {part.seconds:4} s  {part.what}" for part in chosen), markup=False)
        return Code.DONE
    about = describe_environment(["torch", "triton", "deepspeed", "transformers", "numpy"])
    if not settings.dry and "gpu" not in about:
        why, cure = explain_absence()
        raise UserError(f"torch {torch.__version__} finds no GPU: {why}\n{cure}, or take make gpu DRY=1")
    state = open_results(settings, about, console)
    for part in chosen:
        record = state["parts"].get(part.name, {"begun": 0.0, "ended": ""})
        absent = find_missing_packages(*part.needs)
        is_due = settings.again or settings.dry or record["ended"] != "done"
        if record["begun"] >= settings.since or not is_due:
            console.print(f"== {part.name}: {record['ended']} already", markup=False)
        elif absent:
            console.print(f"== {part.name}: left out, for want of {', '.join(absent)}", markup=False)
        elif settings.until - ENDING - time.time() < part.seconds:
            left.append(part.name)
        else:
            run_part(part, settings, state, console)
            if has_fault():
                return BROKEN
    if left:
        console.print(f"left for the next time: {', '.join(left)}; the same command goes on with them")
    return Code.STOPPED if left else Code.DONE


OWN, EAGER, LAMB, MUON = (f"{OURS}, {name}" for name in ("own attention", "no graphs", "LAMB", "Muon"))
TESTS = ("pytest", "pytest_timeout", "hypothesis")
PARTS = (
    Part("host", 5, "microseconds of the host for a launch", measure_host),
    Part("tests", 60, "tests that need a GPU", run_tests, TESTS),
    Part("attention", 25, "nanoseconds of attention a piece, at 128 and 512", measure_attention),
    Part("large-128", 40, "large, 1,024 x 128: flash and our attention in turns", compare("large-128-1024", OWN)),
    Part("large-512", 40, "large, 256 x 512: flash and our attention in turns", compare("large-512-256", OWN)),
    Part("small-large", 30, "large, 64 x 128: graphs, LAMB, Muon", compare("large-128-64", EAGER, LAMB, MUON)),
    Part("small-base", 15, "base, 32 x 128: graphs", compare("base-128-32", EAGER, rounds=20)),
    Part("peer", 75, "compiled transformers", compare("large-128-256", "transformers, compiled"), ("transformers",)),
    Part("small-mini", 15, "mini, 64 x 128: graphs, LAMB, Muon", compare("mini-128-64", EAGER, LAMB, MUON, rounds=20)),
    Part("answers", 50, "answers of base, with and without graphs, and of transformers", compare_answers),
    Part("fine-tuning", 60, "fine-tuning of base, beside the Trainer", compare_fine_tuning, ("tokenizers",)),
    Part("run", 95, "a run by train.py, killed and continued", train_twice),
    Part("deterministic", 20, "what the same bits cost", compare("large-128-256", f"{OURS}, deterministic")),
)

if __name__ == "__main__":
    run_command(GpuRun, measure, "gpu")
