"""Runs the steps on a little text in a temporary folder: to compile what they call, or to measure their costs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from data_prep.arrow_files import write_batches
from data_prep.common.compiled import compiled_before, remember_compiled
from data_prep.common.workers import Workers
from data_prep.examples.making import open_maker
from data_prep.near_copies.finding import mark_near_copies
from data_prep.pipeline.steps import Steps
from data_prep.readers.extraction import SCHEMA
from data_prep.running import Runner, Step, Task
from data_prep.settings import Settings
from data_prep.shards import WORK, example_schema
from data_prep.vocabulary.kinds.declaration import find_kind
from data_prep.work import DocumentsRecord, Kind, Records, TextFile, WorkFolder

DOCUMENTS = [["A small text: 10 words, é and 中.", "It is read once.", "Then it goes."] * 50] * 4
MANY_WORDS = " ".join(map(str, range(40_000)))  # so many that the table of words grows
KEEP_ALL = {"docs": (), "extend": 0, "drop_copies": False, "near_copies": None, "max_share": (), "weight": ()}
"""Settings under which no document is left out, and the vocabulary stays as it is."""


@dataclass(frozen=True)
class MeasuringRunner(Runner):
    """Runs steps and measures their seconds and bytes."""

    seconds: dict[str, float] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    """Bytes of the files that a step wrote."""

    def run(self, step: Step[Task, Kind], tasks: Callable[[], Iterable[Task]]) -> Records[Kind]:
        """Runs the tasks of a step."""
        start = time.perf_counter()
        records = super().run(step, tasks)
        self.seconds[step.name] = time.perf_counter() - start
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


def rehearse(settings: Settings, size: int, work: Path, console: Console) -> None:
    """Compiles what a run with these settings calls, unless an earlier run did, and says so.

    Without it every worker would compile the same functions at the same time, in the midst of steps that then seem
    slow. `size` is how many pieces the vocabulary has, or may have: numbers of pieces are stored in the smallest type.
    `work` is a folder with room for temporary files.
    """
    schemas = [example_schema(length, size, 1) for length in settings.lengths]
    kinds = f"{settings.tokenizer or ''}{settings.pairs}-{'near-' * (settings.near_copies is not None)}" + "-".join(
        str(schema.field(name).type) for schema in schemas for name in ("pieces", "boundary")
    )
    if compiled_before(kinds):
        return
    console.print("compiling, once, for up to some minutes: later runs begin without")
    once = settings.model_copy(update={"duplicates": 1, "validation": 0.01})
    with open_trial(once, work) as (runner, steps):
        vocabulary = find_kind(settings.tokenizer).make_up(size, settings.cased)
        documents = [write_documents(steps.folder)]
        steps.count([*steps.part_tasks(documents)])
        tokens = steps.cut_documents(documents, vocabulary)
        mark_near_copies(runner, tokens, vocabulary, settings.near_copies)
        steps.make_shards(tokens, vocabulary)
    remember_compiled(kinds)


def write_documents(folder: Path) -> DocumentsRecord:
    """Writes documents that are made up, as the first step does."""
    texts = [*DOCUMENTS, [MANY_WORDS]]
    batch = pa.record_batch([[""] * len(texts), [""] * len(texts), texts], schema=SCHEMA)
    file = write_batches(folder, f"{WORK}/documents/0.arrow", SCHEMA, [batch])
    text = TextFile(**file.as_json(), text_bytes=0)
    return DocumentsRecord(files=[text], source="", skipped=[], left_out=[], replaced=0)
