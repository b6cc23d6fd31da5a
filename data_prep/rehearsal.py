"""Compiles all loops before the workers start, by making shards of a little text in a folder that is thrown away.

Without it every worker would compile the same functions at the same time, in the midst of steps that then seem slow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from data_prep.common.compiled import compiled_before, remember_compiled
from data_prep.common.progress import StepProgress
from data_prep.sample import Costs, Sample
from data_prep.settings import Settings
from data_prep.shards import WORK, example_schema, write_batches
from data_prep.vocabulary.tokens import PartTask, count_part
from data_prep.vocabulary.vocabulary import SPECIAL, Vocabulary

DOCUMENTS = [["A small text: 10 words, é and 中.", "It is read once.", "Then it goes."] * 50] * 4
MANY_WORDS = " ".join(map(str, range(40_000)))  # so many that the table of words grows
STEPS = 3  # words, tokens, lengths


def rehearse(settings: Settings, size: int, work: Path, console: Console, said: bool = False) -> bool:
    """Compiles what a run with these settings calls, unless an earlier run did; shows that, and how long it takes.

    `size` is how many pieces the vocabulary has, or may have: numbers of pieces are stored in the smallest type.
    `work` is the folder that the run has for its own needs. Returns whether it is said that something is compiled.
    """
    schemas = [example_schema(length, size, 1) for length in settings.lengths]
    kinds = f"{settings.pairs}-" + "-".join(
        str(schema.field(name).type) for schema in schemas for name in ("pieces", "boundary")
    )
    if compiled_before(kinds):
        return said
    if not said:
        console.print("compiling, once: later runs begin without")
    progress = StepProgress(console, "compiling", "", STEPS, 0)
    with progress.shown(), tempfile.TemporaryDirectory(prefix="rehearsal-", dir=work) as folder:
        for _ in _steps(Path(folder), settings, size):
            progress.advance(1, 0)
    remember_compiled(kinds)
    return True


def _steps(folder: Path, settings: Settings, size: int) -> Iterator[None]:
    """Takes the steps of a run one by one, as the workers do, each with a task for every kind of its functions."""
    numbers = (str(number) for number in range(size))
    vocabulary = Vocabulary((*SPECIAL, *numbers)[:size], settings.cased)
    texts = [*DOCUMENTS, [MANY_WORDS]]
    batch = pa.record_batch({"id": [""] * len(texts), "title": [""] * len(texts), "sentences": texts})
    record = write_batches(folder, f"{WORK}/documents/0.arrow", batch.schema, [batch])
    once = settings.model_copy(update={"duplicates": 1, "validation": 0.01, "docs": ()})
    sample = Sample(folder, once, Costs(), [PartTask(folder, record.path, 0, settings.cased)], text=1)
    count_part(sample.parts[0])
    yield
    sample.encode(vocabulary)
    yield
    for length in settings.lengths:
        sample.make(length)
    yield
