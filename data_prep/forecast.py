"""Estimates what a run takes, from a sample of the text: time, disk, tasks and files.

Some megabytes from all over the text go through every step. All costs are proportional to the text, except for files
that are opened for partners and for shards: these grow with the number of parts, and are added.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.progress import duration
from data_prep.common.terminal import make_table
from data_prep.examples.making import TOGETHER
from data_prep.examples.merging import SortedFiles, merging_rounds
from data_prep.examples.parts import FEW_PARTS, PARTNER_PARTS
from data_prep.near_copies.finding import NEAR_STEPS, mark_near_copies
from data_prep.near_copies.signatures import MOST_STRETCHES
from data_prep.origins import Origins, TakeTask, take_file
from data_prep.readers.extraction import extract
from data_prep.readers.filters import none_left
from data_prep.readers.reader import COMPRESSED
from data_prep.readers.sources import Bundle, SourceFile, make_bundles
from data_prep.settings import Settings
from data_prep.shards import example_schema
from data_prep.steps import COUNT, ENCODE, READ, Steps, estimate_bytes
from data_prep.trial import open_trial, rehearse
from data_prep.vocabulary.tokens import encode_part
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import DocumentsRecord, Joined

OPEN_SECONDS = 0.0005  # to open a file of token documents, and to place the partners that are in it
SLICE_SECONDS = 0.0003  # to open a sorted file, and to find the slice of it that is of a shard
PIECES, PIECE_BYTES = 0.22, 2.65  # pieces of English for a byte of it, and what one takes in shards
SAMPLE_BYTES = 8 << 20  # text that goes through the steps
SAMPLES = 8  # places that it comes from
EXPANSION = {".gz": 3.0, ".bz2": 4.0, ".xz": 4.0, ".zst": 3.5}
"""Bytes of text for a compressed byte, if there is no sample."""


class Costs(NamedTuple):
    """Costs of a byte of text, by the names of the steps."""

    seconds: dict[str, float]
    """Core seconds."""
    written: dict[str, float]
    """Bytes of the files that a step writes."""
    text: float = 1.0
    """Bytes of text for a byte of the sources."""


class StepForecast(NamedTuple):
    """The estimated costs of a step."""

    name: str
    tasks: int
    """Each task writes a file."""
    core_seconds: float
    disk: float
    """Bytes on the disk, at most, while the step runs."""


class Text(NamedTuple):
    """The text of a run: files to read, and documents of other folders."""

    files: list[SourceFile]
    origins: Origins


class Amount(NamedTuple):
    """How much text a run has."""

    sources: float
    """Bytes of the sources that are read."""
    taken: float = 0.0
    """Bytes of text whose documents are taken from other folders, in pieces."""
    repeated: float = 1.0
    """How often a byte is there by the weights of the sources."""

    @classmethod
    def from_text(cls, settings: Settings, text: Text) -> Amount:
        """Adds up the files that are read, expanded, and those that are taken."""
        by_source: Counter[str] = Counter()
        for file in text.files:
            by_source[file.source] += round(file.size * EXPANSION.get(Path(file.path).suffix, 1.0))
        read = by_source.total()
        for one in text.origins.kept_files:
            by_source[one.source] += one.text_bytes
        weighed = sum(size * settings.weights.get(source, 1.0) for source, size in by_source.items())
        return cls(read, by_source.total() - read, weighed / max(by_source.total(), 1))


def plan_steps(settings: Settings, costs: Costs, amount: Amount, parts: int) -> list[StepForecast]:
    """Estimates the costs of all steps, for an amount of text in `parts` parts."""
    text = amount.sources * costs.text
    found: list[StepForecast] = []

    def expect(step: str, tasks: int, disk: float, opening: float = 0, name: str = "") -> None:
        seconds = costs.seconds.get(step, 0) * text + opening
        found.append(StepForecast(name or step.replace("-", " "), tasks, seconds, disk))

    def estimate_size(step: str) -> float:
        return costs.written.get(step, 0) * text

    documents, tokens = estimate_size(READ.name), estimate_size(ENCODE.name)
    if text:
        expect(READ.name, parts, documents)
        expect(ENCODE.name, parts, documents + tokens)
    if settings.documents_only:
        return found
    text += amount.taken
    if settings.near_copies is not None:
        for step in NEAR_STEPS:
            expect(step, min(parts, MOST_STRETCHES), tokens + sum(map(estimate_size, NEAR_STEPS)))
        tokens += estimate_size(ENCODE.name)  # what is left of a file is another one
    text *= amount.repeated
    kept, sets = tokens + (amount.repeated != 1) * estimate_size(ENCODE.name), settings.duplicates + 1
    sweeps = -(-sets // TOGETHER) * (parts if parts <= FEW_PARTS else PARTNER_PARTS) if settings.pairs == "nsp" else 0
    for length in settings.lengths:
        made, stored = estimate_size(f"examples-{length}"), estimate_size(f"shards-{length}")
        expect(f"examples-{length}", parts, kept + made, parts * sweeps * OPEN_SECONDS)
        files = SortedFiles(length, parts)
        for _, _, target in merging_rounds(files, int(made), sets):
            disk = kept + made * (1 + 1 / target.num_files)
            expect(f"merged-{length}-1", target.num_files, disk, name=f"merge {length}")
            files = target
        shards = max(sets, round(stored / settings.shard_bytes))
        opening = shards * files.num_files * SLICE_SECONDS
        disk = kept + max(made, stored) * (1 + 1 / sets)  # the examples of a set go when its shards are there
        expect(f"shards-{length}", shards, disk, opening)
        kept += stored
    return found


def make_usual_costs(settings: Settings) -> Costs:
    """Returns the costs on the disk of English text, for a warning without a sample."""
    written = {READ.name: 1.03, ENCODE.name: 0.48, NEAR_STEPS[0]: 0.2}
    for length in settings.lengths:
        stored = PIECES * PIECE_BYTES * (settings.duplicates + settings.validation)
        keys = 2 * 8 * PIECES * settings.duplicates / length  # half full
        written |= {f"shards-{length}": stored, f"examples-{length}": stored + keys}
    return Costs({}, written)


def describe_disk_need(folder: Path, steps: list[StepForecast]) -> str:
    """Returns a warning if a run needs more disk than is free, files of an earlier run included; otherwise ""."""
    used = sum(os.lstat(Path(place, name)).st_size for place, _, names in os.walk(folder) for name in names)
    needed, free = max(step.disk for step in steps), shutil.disk_usage(find_existing_folder(folder)).free + used
    if needed <= free:
        return ""
    return f"the run will need some {format_size(needed)} in {folder} at its largest, and {format_size(free)} are free"


def format_size(number: float) -> str:
    """Spells a number of bytes in a unit that fits it."""
    factor, unit = next((one for one in ((1e12, "TB"), (1e9, "GB")) if number >= one[0]), (1e6, "MB"))
    return f"{number / factor:,.1f} {unit}"


def measure_costs(settings: Settings, given: Vocabulary | None, text: Text, folder: Path, console: Console) -> Costs:
    """Runs all steps on a sample of the text in a temporary folder, and measures their costs."""
    place = find_existing_folder(folder)
    rehearse(settings, len(given) if given else settings.vocab_size, place, console)
    with open_trial(settings, place) as (runner, steps):
        start = time.perf_counter()
        documents, read = read_sample(steps, make_bundles(text.files))
        runner.seconds[READ.name] = time.perf_counter() - start
        files = [file for record in documents for file in record.files]
        runner.written[READ.name] = sum(file.size for file in files)
        taken = [take_file(task) for task in choose_sample(text.origins, steps.folder)]
        if not (files or taken):
            if any(record.num_filtered for record in documents):
                raise UserError(none_left(documents, settings))
            raise UserError("no document has any text in the sample; is the text in this format, and in this field?")
        vocabulary = steps.make_vocabulary(documents, given)
        vocabulary.write(steps.folder)
        for task in steps.part_tasks(documents, vocabulary.sha256):
            encode_part(task)  # as a worker that has learned the words of the text
        tokens = Joined((taken, steps.cut_documents(documents, vocabulary)))
        mark_near_copies(steps.runner, tokens, vocabulary, settings.near_copies)
        made = steps.make_shards(tokens, vocabulary)
    for length in settings.lengths:
        schema = example_schema(length, len(vocabulary), 1 << 24)
        sets = (figures for figures in made.figures if figures.length == length)
        runner.written[f"shards-{length}"] = sum(estimate_bytes(figures, schema) for figures in sets)
    size = sum(file.text_bytes for file in files)
    everything = size + sum(record.text_bytes for record in taken)

    def divide(costs: Mapping[str, float]) -> dict[str, float]:
        of_text = (READ.name, COUNT.name, ENCODE.name)
        return {name: cost / max(size if name in of_text else everything, 1) for name, cost in costs.items()}

    return Costs(divide(runner.seconds), divide(runner.written), size / max(read, 1))


def choose_sample(origins: Origins, folder: Path) -> Iterator[TakeTask]:
    """Chooses files of the documents of other folders, from all over them, as a sample."""
    tasks, size = list(origins.make_tasks(folder, "skip")), 0
    for task in tasks[:: max(1, -(-len(tasks) // SAMPLES))]:
        if size < SAMPLE_BYTES:
            yield task
            size += task.file.text_bytes


def read_sample(steps: Steps, bundles: list[Bundle]) -> tuple[list[DocumentsRecord], float]:
    """Reads pieces of work from all over the text, of large compressed files only the beginning.

    Returns the records, and how many bytes of the sources were read.
    """
    records: list[DocumentsRecord] = []
    text, read = 0, 0.0
    for bundle in bundles[:: max(1, -(-len(bundles) // SAMPLES))]:
        if text >= SAMPLE_BYTES:
            break
        cut = bundle.weight > bundle.part_bytes and bundle.spans[0].path.endswith(COMPRESSED)
        limit = SAMPLE_BYTES / SAMPLES if cut else math.inf
        records.append(extract(replace(steps.extract_task(bundle), errors="skip", limit=limit)))
        size = sum(file.text_bytes for file in records[-1].files)
        text += size
        read += size / EXPANSION[Path(bundle.spans[0].path).suffix] if cut else bundle.weight
    return records, read


def find_existing_folder(folder: Path) -> Path:
    """Finds the nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def print_forecast(
    settings: Settings, given: Vocabulary | None, text: Text, folder: Path, workers: int, console: Console
) -> None:
    """Prints what a run into a folder will take."""
    bundles, kept = make_bundles(text.files), text.origins.kept_files
    if not (bundles or kept):
        raise UserError("the files have nothing in them to read")
    costs = measure_costs(settings, given, text, folder, console)
    amount = Amount.from_text(settings, text)._replace(sources=sum(file.size for file in text.files))
    size = amount.sources * costs.text
    read = max(len(bundles), round(size / bundles[0].part_bytes)) if bundles else 0
    steps = plan_steps(settings, costs, amount, read + len(kept))
    table = make_table("step", ">tasks", ">on one core", f">on {workers} workers", ">on the disk", ">files")
    for step in steps:
        times = (duration(step.core_seconds), duration(step.core_seconds / min(workers, step.tasks)))
        table.add_row(step.name, f"{step.tasks:,}", *times, format_size(step.disk), f"{step.tasks:,}")
    console.print(table)
    seconds = sum(step.core_seconds / min(workers, step.tasks) for step in steps)
    trained = "" if given else ", and up to a minute or two for the vocabulary"
    console.print(f"time: {duration(seconds)} on {workers} workers like this one{trained}")
    shards = sum(step.tasks for step in steps if step.name.startswith("shards"))
    stored = sum(costs.written[f"shards-{length}"] for length in settings.lengths) * bool(shards)
    stay = f"{format_size(stored * (size + amount.taken) * amount.repeated)} in {shards:,} shards stay"
    console.print(f"disk: {format_size(max(step.disk for step in steps))} at the largest, of which {stay}")
    if note := describe_disk_need(folder, steps):
        console.print(f"warning: {note}", markup=False, style="yellow", soft_wrap=True)
