"""Goes through the steps with little text in a temporary folder: to compile them, or to estimate what a run takes.

For an estimate of time, disk, tasks and files, some megabytes from all over the text go through every step. All costs
are proportional to the text, but for the rounds of merging, of which there are more where there are many parts; each
costs as much as writing the shards.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
from rich.console import Console

from data_prep.arrow_files import write_batches
from data_prep.common.capacity import room_for_workers
from data_prep.common.compiled import compiled_before, remember_compiled
from data_prep.common.errors import UserError
from data_prep.common.launchers import mpi_size
from data_prep.common.progress import duration
from data_prep.common.terminal import make_table
from data_prep.common.workers import Workers
from data_prep.examples.making import open_maker
from data_prep.examples.merging import SortedFiles, merging_rounds
from data_prep.near_copies.finding import NEAR_STEPS, mark_near_copies
from data_prep.near_copies.signatures import MOST_STRETCHES
from data_prep.origins import take_file
from data_prep.pipeline.inputs import Inputs, print_warning
from data_prep.pipeline.steps import COUNT, ENCODE, READ, Steps, estimate_bytes
from data_prep.readers.extraction import SCHEMA
from data_prep.readers.filters import none_left
from data_prep.readers.reader import COMPRESSED
from data_prep.readers.sources import Bundle, make_bundles
from data_prep.running import Runner, Step, Task
from data_prep.settings import Settings
from data_prep.shards import WORK, example_schema
from data_prep.vocabulary.kinds.declaration import find_kind
from data_prep.vocabulary.tokens import encode_part
from data_prep.work import DocumentsRecord, Joined, Kind, Records, TextFile, WorkFolder

SAMPLE_BYTES = 8 << 20  # text that goes through the steps
SAMPLES = 8  # places that it comes from
EXPANSION = {".gz": 3.0, ".bz2": 4.0, ".xz": 4.0, ".zst": 3.5}
"""Bytes of text for a compressed byte."""
MADE_UP = [["A small text: 10 words, é and 中.", "It is read once.", "Then it goes."] * 50] * 4
MANY_WORDS = " ".join(map(str, range(40_000)))  # so many that the table of words grows
KEEP_ALL = {"docs": (), "extend": 0, "drop_copies": False, "near_copies": None, "max_share": (), "weight": ()}
"""Settings under which no document is left out, and the vocabulary stays as it is."""

ANY_KIND = "any"
"""Stands for what is compiled for all kinds of data, beside which a further kind takes less time."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class MeasuringRunner(Runner):
    """Runs steps and measures their bytes too."""

    written: dict[str, float] = field(default_factory=dict)
    """Bytes of the files that a step wrote."""

    def run(self, step: Step[Task, Kind], tasks: Callable[[], Iterable[Task]]) -> Records[Kind]:
        """Runs the tasks of a step."""
        records = super().run(step, tasks)
        self.written[step.name] = sum(file.size for record in records for file in record.files)
        return records


@contextmanager
def open_trial(settings: Settings, place: Path) -> Iterator[tuple[MeasuringRunner, Steps]]:
    """Opens a folder below another one, in which steps can be gone through."""
    with tempfile.TemporaryDirectory(prefix="cloze-trial-", dir=place) as folder:
        runner = MeasuringRunner(WorkFolder(Path(folder)), Workers(), Console(quiet=True))
        runner.work.path.mkdir()
        yield runner, Steps(runner, settings.model_copy(update=KEEP_ALL))
        open_maker.cache_clear()  # its files are about to go


def rehearse(settings: Settings, size: int, work: Path, console: Console, was_said: bool = False) -> bool:
    """Compiles what a run with these settings calls, unless an earlier run did, and says so.

    Without it every worker would compile the same functions at the same time, in the midst of steps that then seem
    slow. `size` is how many pieces the vocabulary has, or may have: numbers of pieces are stored in the smallest type.
    `work` is a folder with room for temporary files. Returns whether something was compiled.
    """
    schemas = {length: example_schema(length, size, 1) for length in settings.lengths}
    lengths = {
        f"{settings.pairs}-" + "-".join(str(schema.field(name).type) for name in ("pieces", "boundary")): length
        for length, schema in schemas.items()
    }
    kind = find_kind(settings.tokenizer)
    kinds = [kind.title, *lengths, *(f"near-{one}" for one in lengths if settings.near_copies is not None)]
    missing = [one for one in kinds if not compiled_before(one)]
    if not missing:
        return False
    bound = "a minute" if compiled_before(ANY_KIND) else "two minutes"  # 7 to 21 and 65 s where it was slowest
    if not was_said:
        console.print(f"compiling once for {kind.title} with these settings: up to {bound}; later runs skip this")
    once = settings.model_copy(update={"duplicates": 1, "validation": 0.01, "lengths": (*lengths.values(),)})
    with open_trial(once, work) as (runner, steps):
        vocabulary = kind.make_up(size, settings.cased)
        documents = [write_documents(steps.folder)]
        runner.run(COUNT, lambda: steps.part_tasks(documents))
        tokens = steps.cut_documents(documents, vocabulary)
        mark_near_copies(runner, tokens, vocabulary, settings.near_copies)
        steps.make_shards(tokens, vocabulary)
    for one in (ANY_KIND, *missing):
        remember_compiled(one)
    return True


def write_documents(folder: Path) -> DocumentsRecord:
    """Writes documents that are made up, as the first step does."""
    texts = [*MADE_UP, [MANY_WORDS]]
    batch = pa.record_batch([[""] * len(texts), [""] * len(texts), texts], schema=SCHEMA)
    file = write_batches(folder, f"{WORK}/documents/0.arrow", SCHEMA, [batch])
    text = TextFile(**file.as_json(), text_bytes=0)
    return DocumentsRecord(files=[text], source="", skipped=[], left_out=[], replaced=0)


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


class Amount(NamedTuple):
    """How much text a run has."""

    sources: float
    """Bytes of the sources that are read."""
    taken: float = 0.0
    """Bytes of text whose documents are taken from other folders, in pieces."""
    repeated: float = 1.0
    """How often a byte is there by the weights of the sources."""


def add_up_text(inputs: Inputs) -> Amount:
    """Adds up the files that are read and those that are taken."""
    by_source: Counter[str] = Counter()
    for file in inputs.files:
        by_source[file.source] += round(file.size * EXPANSION.get(Path(file.path).suffix, 1.0))
    for one in inputs.origins.kept_files:
        by_source[one.source] += one.text_bytes
    weighed = sum(size * inputs.settings.weights.get(source, 1.0) for source, size in by_source.items())
    taken = sum(one.text_bytes for one in inputs.origins.kept_files)
    return Amount(sum(file.size for file in inputs.files), taken, weighed / max(by_source.total(), 1))


def plan_steps(settings: Settings, costs: Costs, amount: Amount, parts: int) -> list[StepForecast]:
    """Estimates the costs of all steps, for an amount of text in `parts` parts."""
    text = amount.sources * costs.text
    found: list[StepForecast] = []

    def expect(name: str, tasks: int, disk: float, step: str = "") -> None:
        found.append(StepForecast(name.replace("-", " "), tasks, costs.seconds.get(step or name, 0) * text, disk))

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
        for step in NEAR_STEPS * (1 + (settings.validation > 0)):  # once more for what is held out together
            expect(step, min(parts, MOST_STRETCHES), tokens + sum(map(estimate_size, NEAR_STEPS)))
        tokens += estimate_size(ENCODE.name)  # what is left of a file is another one
    text *= amount.repeated
    kept, sets = tokens + (amount.repeated != 1) * estimate_size(ENCODE.name), settings.duplicates + 1
    for length in settings.lengths:
        examples, shards = f"examples-{length}", f"shards-{length}"
        made, stored = estimate_size(examples), estimate_size(shards)
        expect(examples, parts, kept + made)
        for _, _, target in merging_rounds(SortedFiles(length, parts), int(made), sets):
            expect(f"merge-{length}", target.num_files, kept + made * (1 + 1 / target.num_files), shards)
        disk = kept + max(made, stored) * (1 + 1 / sets)  # the examples of a set go when its shards are there
        expect(shards, max(sets, round(stored / settings.shard_bytes)), disk)
        kept += stored
    return found


def format_size(number: float) -> str:
    """Spells a number of bytes in a unit that fits it."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def measure_costs(inputs: Inputs, console: Console) -> Costs:
    """Runs all steps on a sample of the text in a temporary folder, and measures their costs."""
    settings, given, place = inputs.settings, inputs.vocabulary, find_existing_folder(inputs.folder)
    rehearse(settings, len(given) if given else settings.vocab_size, place, console)
    with open_trial(settings, place) as (runner, steps):
        documents, read = read_sample(steps, make_bundles(inputs.files))
        files = [file for record in documents for file in record.files]
        chosen = choose_sample([*inputs.origins.make_tasks(steps.folder, "skip")], lambda task: task.file.text_bytes)
        taken = [take_file(task) for task in chosen]
        if not (files or taken):
            if any(record.num_filtered for record in documents):
                raise UserError(none_left(documents, settings))
            raise UserError("no document has any text in the sample; is the text in this format, and in this field?")
        vocabulary = steps.make_vocabulary(documents, given)
        vocabulary.write(steps.folder)
        for task in steps.part_tasks(documents, vocabulary.sha256):
            encode_part(task)  # as a worker that has learned the words of the text
        tokens = Joined((taken, steps.cut_documents(documents, vocabulary)))
        mark_near_copies(runner, tokens, vocabulary, settings.near_copies)
        made = steps.make_shards(tokens, vocabulary)
    for length in settings.lengths:
        schema = example_schema(length, len(vocabulary), 1 << 24)
        sets = (figures for figures in made.figures if figures.length == length)
        runner.written[f"shards-{length}"] = sum(estimate_bytes(figures, schema) for figures in sets)
    size = sum(file.text_bytes for file in files)
    everything = size + sum(record.text_bytes for record in taken)

    def divide(costs: dict[str, float]) -> dict[str, float]:
        of_text = (READ.name, COUNT.name, ENCODE.name)
        return {name: cost / max(size if name in of_text else everything, 1) for name, cost in costs.items()}

    return Costs(divide(runner.seconds), divide(runner.written), size / max(read, 1))


def choose_sample(items: Sequence[Item], measure: Callable[[Item], float]) -> Iterator[Item]:
    """Chooses items from all over a list as a sample, until they have as much text as it takes."""
    size = 0.0
    for item in items[:: max(1, -(-len(items) // SAMPLES))]:
        if size < SAMPLE_BYTES:
            yield item
            size += measure(item)


def read_sample(steps: Steps, bundles: list[Bundle]) -> tuple[list[DocumentsRecord], float]:
    """Reads pieces of work from all over the text, of large compressed files only the beginning.

    Returns the records, and how many bytes of the sources were read.
    """
    limit = SAMPLE_BYTES / SAMPLES
    chosen = [*choose_sample(bundles, lambda bundle: limit if is_cut(bundle) else bundle.weight)]
    tasks = [
        replace(steps.extract_task(bundle), errors="skip", limit=limit if is_cut(bundle) else math.inf)
        for bundle in chosen
    ]
    records, read = [*steps.runner.run(READ, lambda: tasks)], 0.0
    for bundle, record in zip(chosen, records, strict=True):
        size = sum(file.text_bytes for file in record.files)
        read += size / EXPANSION[Path(bundle.spans[0].path).suffix] if is_cut(bundle) else bundle.weight
    return records, read


def is_cut(bundle: Bundle) -> bool:
    """Returns whether only the beginning of a bundle is read for the sample: of a large file that is compressed."""
    return bundle.weight > bundle.part_bytes and bundle.spans[0].path.endswith(COMPRESSED)


def find_existing_folder(folder: Path) -> Path:
    """Finds the nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def print_forecast(inputs: Inputs, console: Console) -> None:
    """Prints what a run will take; makes nothing."""
    settings, ranks = inputs.settings, mpi_size()
    workers = ranks if ranks > 1 else settings.workers or room_for_workers()
    bundles, kept = make_bundles(inputs.files), inputs.origins.kept_files
    if not (bundles or kept):
        raise UserError("the files have nothing in them to read")
    costs, amount = measure_costs(inputs, console), add_up_text(inputs)
    size = amount.sources * costs.text
    read = max(len(bundles), round(size / bundles[0].part_bytes)) if bundles else 0
    steps = plan_steps(settings, costs, amount, read + len(kept))
    table = make_table("step", ">tasks (a file each)", ">on one core", f">on {workers} workers", ">on the disk")
    for step in steps:
        times = (duration(step.core_seconds), duration(step.core_seconds / min(workers, step.tasks)))
        table.add_row(step.name, f"{step.tasks:,}", *times, format_size(step.disk))
    console.print(table)
    seconds = sum(step.core_seconds / min(workers, step.tasks) for step in steps)
    trained = "" if inputs.vocabulary else ", and up to a minute or two for the vocabulary"
    console.print(f"time: {duration(seconds)} on {workers} workers like this one{trained}")
    shards = sum(step.tasks for step in steps if step.name.startswith("shards"))
    stored = sum(costs.written[f"shards-{length}"] for length in settings.lengths) * bool(shards)
    stay = f"{format_size(stored * (size + amount.taken) * amount.repeated)} in {shards:,} shards stay"
    folder, need = inputs.folder, max(step.disk for step in steps)
    console.print(f"disk: {format_size(need)} at the largest, of which {stay}")
    used = sum(os.lstat(Path(place, name)).st_size for place, _, names in os.walk(folder) for name in names)
    free = shutil.disk_usage(find_existing_folder(folder)).free + used  # files of an earlier run are written anew
    if need > free:
        room = f"{format_size(need)} in {folder} at its largest, and {format_size(free)} are free"
        print_warning(console, f"the run will need some {room}")
