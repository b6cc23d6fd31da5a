"""Compiles all loops before the workers start, by making shards of a little text in a folder that is thrown away.

Without it every worker would compile the same functions at the same time, in the midst of steps that then seem slow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console

from data_prep.common.compiled import compiled_before, remember_compiled
from data_prep.common.progress import StepProgress
from data_prep.examples.making import ExamplesTask, make_examples, shard_sets
from data_prep.examples.merging import MergeTask, SortedFiles, merge
from data_prep.examples.parts import HELD_OUT, read_parts, write_parts
from data_prep.examples.shard_files import ShardTask, write_shard
from data_prep.examples.validation import choose_held_out
from data_prep.settings import Settings
from data_prep.shards import WORK, example_schema, map_batches, write_batches
from data_prep.vocabulary.tokens import PartTask, count_part, encode_part
from data_prep.vocabulary.vocabulary import SPECIAL, Vocabulary

DOCUMENTS = [["A small text: 10 words, é and 中.", "It is read once.", "Then it goes."] * 50] * 4
MANY_WORDS = " ".join(map(str, range(40_000)))  # so many that the table of words grows
STEPS = 4  # words, tokens, examples, shards


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
    vocabulary.write(folder)
    texts = [*DOCUMENTS, [MANY_WORDS]]
    batch = pa.record_batch({"id": [""] * len(texts), "title": [""] * len(texts), "sentences": texts})
    record = write_batches(folder, f"{WORK}/documents/0.arrow", batch.schema, [batch])
    task = PartTask(folder, record.path, 0, settings.cased, vocabulary.sha256)
    count_part(task)
    yield
    tokens = encode_part(task)["files"][0]["path"]
    yield
    digests = np.array(map_batches(folder / tokens).get_batch(0)["digest"])  # a copy, as a run takes
    np.save(folder / HELD_OUT, choose_held_out(lambda: [digests], len(digests), 0.01, settings.seed))
    write_parts(folder, [(tokens, len(digests), 0)])
    once = settings.model_copy(update={"duplicates": 1, "docs": ()})
    for length in settings.lengths:
        make_examples(ExamplesTask(folder, 0, length, "rehearsal", once, 0))
    yield
    for length in settings.lengths:
        files, sets = SortedFiles(length, 1), shard_sets(length, 1, validation=True)
        merged = SortedFiles(length, 1, 2, 1)
        merge(MergeTask(folder, files, merged, 0, 1, len(sets), 0))
        write_shard(ShardTask(folder, sets[0], 0, 1, 0, merged, 0))
    read_parts.cache_clear()
    yield
