"""The parts of `make gpu`, the most important first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.install import PREPARING, TESTING
from data_prep.common.errors import UserError

SETUP, SHARDS, SMOKE = "setup", "data", "smoke"
FIRST = (SETUP, SHARDS)
"""Parts that all others need. They run once on each machine, since results may come from another one."""
BASICS = "gpu/basics.py"
PEER = ("transformers",)


@dataclass(frozen=True)
class GpuPart:
    """A part of the measurement, in a process of its own."""

    name: str
    what: str
    command: tuple[str, ...]
    """A script in benchmarks/ with its options, to which `--out FILE` is added."""
    minutes: float = 1.0
    """Its approximate time on one H200; it is not started if less is left."""
    needs: tuple[str, ...] = ()
    """Packages that it needs in addition."""

    def lacks(self, missing: Collection[str]) -> list[str]:
        """Returns the missing packages that it needs."""
        return [name for name in self.needs if name in missing]


def build_parts(shards: Path, folder: Path, dry: bool) -> list[GpuPart]:
    """Builds all parts in order; with `dry`, the same for a tiny model."""

    read = ("--shards", str(shards))
    train = ("throughput.py", *read, "--peer", "none", "--rounds", "1" if dry else "10", "--contests")

    def throughput(contest: str, *options: str) -> tuple[str, ...]:
        return (*train, "tiny-128-4" if dry else contest, *options)  # in a dry run, all sizes are the same command

    def against(*sides: str) -> tuple[str, ...]:
        return ("--against", *sides)

    compiled = against("cloze, compiled")
    theirs = (*against("transformers, compiled", "transformers"), "--apart")
    exact = against("cloze, deterministic")
    tests = (BASICS, "tests", "--only")
    smoke = (*read, *(("--contest", "tiny-128-2") if dry else ()))
    profile = ("--profile", str(folder / "profile"))
    trainer, tuning = build_trainer_words(dry), build_tuning_words(dry)
    inference, scaling = build_inference_words(dry), build_scaling_words(shards, dry)
    return [
        GpuPart(SETUP, "what is installed, and on what machine", (BASICS, SETUP, *["--dry"] * dry), 0.3),
        GpuPart(SHARDS, "shards to train on", (BASICS, SHARDS, *read), 0.3),
        GpuPart(SMOKE, "steps: plain, compiled, LAMB, the same bits, fp16", ("gpu/smoke.py", *smoke), 1.0),
        GpuPart("large-128", "large at 128, compiled and not", throughput("large-128-256", *compiled), 1.6),
        GpuPart("profile", "which kernels take the time of a step", throughput("large-128-256", *profile), 0.7),
        GpuPart("large-512", "large at 512, compiled and not", throughput("large-512-64", *compiled), 1.6),
        GpuPart("auto-128", "large at 128, as many as fit", throughput("large-128-auto", *compiled, "--apart"), 3.0),
        GpuPart("auto-512", "large at 512, as many as fit", throughput("large-512-auto", *compiled, "--apart"), 3.0),
        GpuPart("tests-kernels", "tests of kernels, LAMB and waits", (*tests, "kernels"), 4.5, TESTING),
        GpuPart("peer-128", "large at 128, and transformers", throughput("large-128-256", *theirs), 3.5, PEER),
        GpuPart("peer-512", "large at 512, and transformers", throughput("large-512-64", *theirs), 3.5, PEER),
        GpuPart("trainer", "a run by its command, killed once", ("gpu/trainer.py", *read, *trainer), 3.5),
        GpuPart("lamb", "what LAMB's step costs", throughput("large-128-64", *against("cloze, LAMB")), 0.8),
        GpuPart("base-128", "base at 128, and transformers", throughput("base-128-512", *theirs), 1.5, PEER),
        GpuPart("fine-tuning", "fine-tuning, and transformers", ("fine_tuning.py", *tuning), 0.9, PREPARING),
        GpuPart("inference", "answers of base, and of transformers", ("inference.py", *inference), 1.1),
        GpuPart("deterministic", "what the same bits cost", throughput("large-128-256", *exact), 0.8),
        GpuPart("ranks", "as many ranks as there are GPUs", ("scaling.py", *scaling), 1.0),
        GpuPart("tests-others", "the other tests that need a GPU", (*tests, "others"), 2.0, TESTING),
    ]


def build_trainer_words(dry: bool) -> tuple[str, ...]:
    """Returns the words of trainer.py: a tiny model in a dry run."""
    return ("--size", "tiny", "--seconds", "4", "--batch", "8", "--every", "5") if dry else ()


def build_tuning_words(dry: bool) -> tuple[str, ...]:
    """Returns the words of fine_tuning.py, for sentences of the demo corpus."""
    usual = ("--contests", "demo-dynamic", "--numbers", "autocast")
    few = ("--size", "tiny", "--steps", "1", "--rounds", "1")
    return (*usual, *(few if dry else ("--size", "base", "--steps", "32")))


def build_inference_words(dry: bool) -> tuple[str, ...]:
    """Returns the words of inference.py: without sentences, which need numba; the side in fp32 is the reference."""
    ours, theirs = ("cloze fp32", "cloze bf16"), ("transformers bf16", "transformers autocast")
    few = ("--sizes", "tiny", "--batches", "2", "--rounds", "1", "--sides", *ours)
    usual = ("--sizes", "base", "--batches", "1", "32", "--lengths", "128", "384", "--sides", *ours, *theirs)
    return ("--sentences", "0", *(few if dry else usual))


def build_scaling_words(shards: Path, dry: bool) -> tuple[str, ...]:
    """Returns the words of scaling.py."""
    few = ("--processes", "1", "--recipe", "demo", "--sequences", "4", "--batch", "8", "--steps", "1", "--rounds", "1")
    return ("--data", str(shards), *(few if dry else ("--rounds", "2")))


def choose(parts: Sequence[GpuPart], names: Sequence[str]) -> list[GpuPart]:
    """Returns the parts with these names or prefixes of names, and FIRST; all parts if none is given."""
    unknown = [name for name in names if not any(_is_named(part, name) for part in parts)]
    if unknown:
        there = ", ".join(part.name for part in parts)
        raise UserError(f"{', '.join(unknown)}: no part of this name; there is {there}")
    return [part for part in parts if not names or any(_is_named(part, name) for name in (*names, *FIRST))]


def _is_named(part: GpuPart, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}-")
