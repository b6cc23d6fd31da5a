"""What a run will take before anything runs: time, disk, memory, tasks and files, out of a sample of the text.

Some megabytes from all over the text go through every step, and what that took stands for the rest: everything grows
with the text. What grows with the number of parts besides, files to open for partners and for shards, is added with
what opening one takes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data_prep.common.errors import UserError
from data_prep.common.progress import duration
from data_prep.examples.making import TOGETHER
from data_prep.examples.merging import SortedFiles, merging_rounds
from data_prep.examples.parts import FEW_PARTS, PARTNER_PARTS
from data_prep.readers.sources import Bundle, SourceFile, make_bundles
from data_prep.rehearsal import rehearse
from data_prep.sample import EXPANSION, Costs, Sample
from data_prep.settings import Settings
from data_prep.shards import WORK
from data_prep.vocabulary.vocabulary import Vocabulary

OPEN_SECONDS = 0.0005  # to open a file of token documents, and to place the partners that are in it
SLICE_SECONDS = 0.0003  # to open a sorted file, and to find the slice of it that is of a shard
PIECES, PIECE_BYTES = 0.22, 2.65  # pieces of English for a byte of it, and what one takes in shards


@dataclass(frozen=True)
class Step:
    """What a step of a run will take."""

    name: str
    tasks: int
    core_seconds: float
    disk: float
    """Bytes on the disk, at most, while the step runs."""
    files: int
    """Files that the step writes."""


def steps_of(settings: Settings, costs: Costs, source_bytes: float, parts: int) -> list[Step]:
    """Works out what the steps of a run take, for so many bytes of the sources in so many parts."""
    text = source_bytes * costs.text
    seconds = {name: each * text for name, each in costs.seconds.items()}
    documents, tokens = costs.documents * text, costs.tokens * text
    found = [
        Step("documents", parts, seconds.get("documents", 0), documents, parts),
        Step("tokens", parts, seconds.get("tokens", 0), documents + tokens, parts),
    ]
    finished, sets = 0.0, settings.duplicates + 1
    sweeps = -(-sets // TOGETHER) * (parts if parts <= FEW_PARTS else PARTNER_PARTS) if settings.pairs == "nsp" else 0
    for length in settings.lengths:
        made, written = costs.examples.get(length, 0) * text, costs.shards.get(length, 0) * text
        opening = parts * sweeps * OPEN_SECONDS
        found.append(
            Step(
                f"examples {length}",
                parts,
                seconds.get(f"examples-{length}", 0) + opening,
                tokens + finished + made,
                parts,
            )
        )
        files = SortedFiles(length, parts)
        for _, _, target in merging_rounds(files, int(made), sets):
            cost, disk = seconds.get(f"merge-{length}", 0), made * (1 + 1 / target.num_files)
            found.append(Step(f"merge {length}", target.num_files, cost, tokens + finished + disk, target.num_files))
            files = target
        shards = max(sets, round(written / settings.shard_bytes))
        cost = seconds.get(f"shards-{length}", 0.0) + shards * files.num_files * SLICE_SECONDS
        finished += written
        found.append(Step(f"shards {length}", shards, cost, tokens + finished + made, shards))
    return found


def usual_costs(settings: Settings) -> Costs:
    """Gives what English text takes on the disk, where no sample is taken."""
    made = PIECES * PIECE_BYTES * (settings.duplicates + settings.validation)
    shards = dict.fromkeys(settings.lengths, made)
    keys = {length: 2 * 8 * PIECES * settings.duplicates / length for length in settings.lengths}  # half full
    return Costs(shards=shards, examples={length: shards[length] + keys[length] for length in settings.lengths})


def expanded(files: list[SourceFile]) -> float:
    """Estimates the bytes of the sources once they are expanded."""
    return sum(file.size * EXPANSION.get(Path(file.path).suffix, 1.0) for file in files)


def free_bytes(folder: Path) -> int:
    """Finds how much room there is for a folder, with what an earlier run has left in it."""
    used = sum(os.lstat(Path(place, name)).st_size for place, _, names in os.walk(folder) for name in names)
    return shutil.disk_usage(existing(folder)).free + used


def disk_note(folder: Path, steps: list[Step]) -> str:
    """Compares what a run will have on the disk at most with the room there is; nothing where that is enough."""
    needed, free = max(step.disk for step in steps), free_bytes(folder)
    if needed <= free:
        return ""
    return f"the run will need some {size_of(needed)} in {folder} at its largest, and {size_of(free)} are free"


def size_of(number: float) -> str:
    """Spells a number of bytes in a unit that fits it."""
    unit = next((unit for unit, factor in (("TB", 1e12), ("GB", 1e9)) if number >= factor), "MB")
    return f"{number / {'TB': 1e12, 'GB': 1e9, 'MB': 1e6}[unit]:,.1f} {unit}"


def measure(
    settings: Settings, given: Vocabulary | None, bundles: list[Bundle], folder: Path, console: Console
) -> Costs:
    """Takes a sample of the text through all steps, in a folder that is thrown away, and finds what each took."""
    with tempfile.TemporaryDirectory(prefix="cloze-check-", dir=existing(folder)) as place:
        work = Path(place)
        (work / WORK).mkdir()
        rehearse(settings, len(given) if given else settings.vocab_size, work, console)
        sample = Sample(work, settings.model_copy(update={"docs": ()}), Costs())
        sample.read(bundles)
        sample.encode(given)
        for length in settings.lengths:
            sample.make(length)
        return sample.costs


def existing(folder: Path) -> Path:
    """Finds the nearest folder that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def forecast(
    settings: Settings, given: Vocabulary | None, files: list[SourceFile], folder: Path, workers: int, console: Console
) -> None:
    """Says what a run into a folder will take."""
    bundles = make_bundles(files)
    if not bundles:
        raise UserError("the files have nothing in them to read")
    costs = measure(settings, given, bundles, folder, console)
    size = sum(file.size for file in files)
    parts = max(len(bundles), round(size * costs.text / bundles[0].part_bytes))
    steps = steps_of(settings, costs, size, parts)
    console.print(forecast_table(steps, workers))
    seconds = sum(step.core_seconds / min(workers, step.tasks) for step in steps)
    kept = sum(step.files for step in steps if step.name.startswith("shards"))
    shards = sum(costs.shards.values()) * size * costs.text
    trained = "" if given else ", and up to a minute or two for the vocabulary"
    console.print(f"time: {duration(seconds)} on {workers} workers like this one{trained}")
    largest = size_of(max(step.disk for step in steps))
    console.print(f"disk: {largest} at the largest, of which {size_of(shards)} in {kept:,} shards stay")
    if note := disk_note(folder, steps):
        console.print(f"warning: {note}", style="yellow", soft_wrap=True)


def forecast_table(steps: list[Step], workers: int) -> Table:
    """Lays out what the steps will take."""
    table = Table(box=None, pad_edge=False)
    for name in ("step", "tasks", "on one core", f"on {workers} workers", "on the disk", "files"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step in steps:
        seconds = step.core_seconds / min(workers, step.tasks)
        table.add_row(
            step.name,
            f"{step.tasks:,}",
            duration(step.core_seconds),
            duration(seconds),
            size_of(step.disk),
            f"{step.files:,}",
        )
    return table
