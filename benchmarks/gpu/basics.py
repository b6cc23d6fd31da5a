#!/usr/bin/env python3
"""The parts of `make gpu` besides benchmarks: the setup, shards, a few steps, and the tests that need a GPU.

    python benchmarks/gpu/basics.py data
    python benchmarks/gpu/basics.py smoke
    python benchmarks/gpu/basics.py tests-kernels

Shards are made of the text in the folder that CLOZE_DATA names, or else of the demo corpus.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import importlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import tyro
from rich.console import Console

from benchmarks.gpu.install import CORE, NEEDED, PREPARING
from benchmarks.gpu.parts import DATA, SHARDS, SMOKE
from benchmarks.measure import (
    ROOT,
    describe_environment,
    find_data_folder,
    run_command,
    write_results,
)
from benchmarks.texts import LENGTHS, make_shards
from data_prep.common.errors import UserError
from data_prep.shards import MANIFEST, Manifest

FILES = "wiki/AA/wiki_0*"
"""Real text for the shards: 5 MB, which are 12,000 sequences at 128."""
STEPS, CONTESTS = 2, {"cpu": "tiny-128-2", "cuda": "mini-128-8"}
"""Steps of smoke, and what they train; the second one shows whether the first has left a valid state."""
KERNELS = "engine/test_gpu model/test_gpu_kernels model/test_gpu_attention model/test_fused model/test_losses"
"""The tests on which the speed depends: attention, LAMB, waits for the GPU, our kernels."""


@dataclass(frozen=True)
class OwnPart:
    """Runs a part of `make gpu` that is no benchmark."""

    part: tyro.conf.Positional[Literal["setup", "setup-dry", "data", "smoke", "tests-kernels", "tests-others"]]
    """setup: describe the machine and its packages; setup-dry: also without a GPU; data: make shards; smoke: make two
    steps of a small model in each way of training, to find faults at once; tests: run those that need a GPU, of kernels
    or all others."""
    out: tyro.conf.Positional[Path | None] = None
    """File for the results."""


def describe_machine(dry: bool) -> dict[str, Any]:
    """Describes the environment and missing packages. Raises UserError if no part can run."""
    import torch

    from pretraining.devices import explain_absence

    missing = {}
    for name in (*NEEDED, *PREPARING):
        try:
            importlib.import_module(name.replace("-", "_"))
        except Exception as error:  # a broken package counts as missing
            missing[name] = f"{type(error).__name__}: {error}"
    if not missing.keys().isdisjoint(CORE):
        told = [f"{name}: {why}" for name, why in missing.items()]
        raise UserError("\n".join([*told, "make gpu installs them: rm -r build/gpu-venv, and start it again"]))
    found = {**describe_environment(["torch", *NEEDED]), "cuda": torch.version.cuda, "dry": dry, "missing": missing}
    if not dry and "gpu" not in found:
        why, cure = explain_absence()
        raise UserError(f"torch {torch.__version__} finds no GPU: {why}\n{cure}, or take make gpu DRY=1")
    return {**found, "gpus": torch.cuda.device_count()}


def ensure_shards(shards: Path) -> dict[str, Any]:
    """Makes the shards if they are missing, and describes them."""
    data = find_data_folder()
    if not (shards / MANIFEST).exists():
        missing = [name for name in PREPARING if find_spec(name) is None]
        if missing:
            raise UserError(
                f"{shards}: is missing, and {', '.join(missing)} to make it\n"
                f"make gpu-wheels prepares it on a machine with a network"
            )
        if (data / "wiki").is_dir():
            make_shards(shards, "--docs", data / FILES, "--vocab", data / "vocab.txt", *LENGTHS)
        else:
            make_shards(shards, "--docs", "demo")
    manifest = Manifest.read(shards)
    size = sum(path.stat().st_size for path in shards.rglob("*") if path.is_file())
    return {"vocabulary": manifest.vocabulary_size, "fingerprint": manifest.fingerprint, "mib": round(size / 2**20, 1)}


def try_all(say: Callable[[str], None]) -> dict[str, Any]:
    """Makes steps in each way of training: the sides of throughput.py that are ours, and fp16 on a GPU. Each has a
    process of its own, since a fault of the GPU ends its process."""
    import torch

    from benchmarks.contests import OURS
    from benchmarks.sides import open_sides
    from benchmarks.throughput import MASKED, SIDES
    from benchmarks.training_sides import Contest
    from data_prep.common.launchers import World
    from pretraining.engine.precision import choose_dtype
    from pretraining.processes.group import choose_device

    device = choose_device("auto", World())
    shape, read = Contest.parse(CONTESTS[device.type]).open(DATA)
    others = {f"{OURS}, {architecture}" for architecture in MASKED}  # other models, no other ways
    ours = {name: side for name, side in SIDES.items() if name.startswith(OURS) and name not in others}
    ways = {name: (side, choose_dtype("auto", device)) for name, side in ours.items()}
    if device.type == "cuda":
        ways["fp16"] = SIDES[OURS], torch.float16
    found: dict[str, dict[str, Any]] = {}
    for name, (kind, dtype) in ways.items():
        try:
            with open_sides({name: kind}, shape, device, dtype) as sides:
                seconds = [round(sides[name].ask("step", read(step)), 4) for step in range(STEPS)]
                loss = sides[name].ask("last_loss")
            found[name] = {"seconds": seconds, "loss": loss}
            found[name] |= {} if loss == loss else {"failed": "the loss is no number"}
        except UserError as error:
            found[name] = {"failed": str(error)}
        say(f"{name}: {found[name].get('failed') or seconds}")
    failed = sum("failed" in each for each in found.values())
    return {"ways": found, "passed": len(found) - failed, "failed": failed}


def list_marked_tests(of_kernels: bool) -> list[str]:
    """Lists the test files marked `gpu`: those of kernels, or the others."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    kernels = {ROOT / "tests/pretraining" / f"{name}.py" for name in KERNELS.split()}
    return [str(path) for path in marked if (path in kernels) == of_kernels]


def run_tests(of_kernels: bool) -> int:
    """Runs tests marked `gpu`; returns pytest's exit code."""
    options = ["-m", "gpu", "--verbose", "-rs", "-p", "no:cacheprovider"]
    options += ["--continue-on-collection-errors"]  # a broken file does not stop the others
    tests = [sys.executable, "-m", "pytest", *options, *list_marked_tests(of_kernels)]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode


def do_part(settings: OwnPart, console: Console) -> int:
    """Runs a part, prints and writes its results; returns the exit code."""
    code, found = 0, dict[str, Any]()
    if settings.part in ("setup", "setup-dry"):
        found = describe_machine(settings.part == "setup-dry")
    elif settings.part == SHARDS:
        found = ensure_shards(DATA)
    elif settings.part == SMOKE:
        found = try_all(lambda line: console.print(line, markup=False))
        code = 1 if found["failed"] else 0
    else:
        code = run_tests(settings.part == "tests-kernels")
    if found and settings.out is not None:
        write_results(settings.out, found)
    console.print("\n".join(f"{name}: {value}" for name, value in found.items()), markup=False)
    return code


if __name__ == "__main__":
    run_command(OwnPart, do_part, "gpu")
