"""A little text goes through all steps of a run: to learn what they cost, or to compile what they call.

The steps are those of pipeline.py, each with one task for a part, and what they took stands beside.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from data_prep.common.errors import UserError
from data_prep.common.languages import DEFAULT
from data_prep.examples.lengths import add_counts, estimated_bytes
from data_prep.examples.making import ExamplesTask, make_examples, shard_sets
from data_prep.examples.merging import MergeTask, SortedFiles, merge
from data_prep.examples.parts import HELD_OUT, read_parts, write_parts
from data_prep.examples.shard_files import ShardTask, write_shard
from data_prep.examples.validation import choose_held_out
from data_prep.readers.extraction import ExtractTask, extract
from data_prep.readers.reader import COMPRESSED
from data_prep.readers.sources import Bundle
from data_prep.settings import Settings
from data_prep.shards import example_schema, map_batches
from data_prep.vocabulary.tokens import PartTask, add_up, count_part, encode_part
from data_prep.vocabulary.vocabulary import Vocabulary, train_vocabulary

SAMPLE_BYTES = 8 << 20  # of text that goes through the steps
SAMPLES = 8  # places that it comes from
EXPANSION = {".gz": 3.0, ".bz2": 4.0, ".zst": 3.5}  # of text, where no sample says it


@dataclass
class Costs:
    """What a byte of text takes: in seconds of a core for every step, and in bytes on the disk."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By the names of the steps."""
    text: float = 1.0
    """Bytes of text for a byte of the sources."""
    documents: float = 1.03
    tokens: float = 0.48
    examples: dict[int, float] = field(default_factory=dict)
    """Bytes of all sets of a length before they are in shards, by length."""
    shards: dict[int, float] = field(default_factory=dict)
    """Bytes of the shards of all sets of a length, by length."""


@dataclass
class Sample:
    """Some text on its way through the steps of a run, in a folder that is thrown away."""

    folder: Path
    settings: Settings
    costs: Costs
    parts: list[PartTask] = field(default_factory=list)
    text: int = 0
    """Bytes of text."""
    num_pieces: int = 0
    """How many pieces the vocabulary has."""

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Adds the time that something takes to the costs of a step."""
        start = time.perf_counter()
        yield
        self.costs.seconds[step] = self.costs.seconds.get(step, 0) + (time.perf_counter() - start) / self.text

    def read(self, bundles: list[Bundle]) -> None:
        """Reads pieces of work from all over the text, of large compressed files only the beginning."""
        s, read, start = self.settings, 0.0, time.perf_counter()
        for bundle in bundles[:: -(-len(bundles) // SAMPLES)]:
            if self.text >= SAMPLE_BYTES:
                break
            cut = bundle.weight > bundle.part_bytes and bundle.spans[0].path.endswith(COMPRESSED)
            limit = SAMPLE_BYTES / SAMPLES if cut else math.inf
            text_field = s.text_field_of(bundle.source)
            language = s.language_of(bundle.source) or DEFAULT
            record = extract(ExtractTask(self.folder, bundle, language, text_field, "skip", s.formulas, limit))
            sizes = [file["text_bytes"] for file in record["files"]]
            self.parts += [
                PartTask(self.folder, file["path"], size, s.cased)
                for file, size in zip(record["files"], sizes, strict=True)
            ]
            self.text += sum(sizes)
            read += sum(sizes) / EXPANSION[Path(bundle.spans[0].path).suffix] if cut else bundle.weight
        self.text = max(self.text, 1)
        self.costs.text = self.text / max(read, 1)
        self.costs.seconds["documents"] = (time.perf_counter() - start) / self.text
        self.costs.documents = self._size_of(part.path for part in self.parts)

    def _size_of(self, paths: Iterator[str]) -> float:
        """Adds up the sizes of files; returns them for a byte of text."""
        return sum((self.folder / path).stat().st_size for path in paths) / self.text

    def encode(self, given: Vocabulary | None) -> None:
        """Cuts the sample into pieces of the vocabulary that is given, or of one that is trained from it."""
        counts = [count_part(part)["files"][0]["path"] for part in self.parts] if given is None else []
        vocabulary = given or train_vocabulary(
            add_up(self.folder / path for path in counts), self.settings.vocab_size, self.settings.cased
        )
        vocabulary.write(self.folder)
        self.parts = [replace(part, vocabulary_sha256=vocabulary.sha256) for part in self.parts]
        with self.timed("tokens"):
            records = [encode_part(part) for part in self.parts]
        paths = [record["files"][0]["path"] for record in records if record["documents"]]
        self.costs.tokens = self._size_of(iter(paths))
        self.num_pieces = len(vocabulary)
        kept = [record for record in records if record["documents"]]
        if not kept:
            raise UserError("no document has any text in the sample; is the text in this format, and in this field?")
        write_parts(self.folder, zip(paths, (r["documents"] for r in kept), (r["pieces"] for r in kept), strict=True))
        digests = [np.array(map_batches(self.folder / path).get_batch(0)["digest"]) for path in paths]
        np.save(
            self.folder / HELD_OUT,
            choose_held_out(lambda: digests, sum(map(len, digests)), self.settings.validation, 0),
        )

    def make(self, length: int) -> None:
        """Makes the examples of a length, merges them and makes a shard of them."""
        key = self.folder.name
        parts = read_parts(self.folder, key)
        files = SortedFiles(length, len(parts.paths))
        with self.timed(files.step):
            records = [
                make_examples(ExamplesTask(self.folder, part, length, key, self.settings, 0))
                for part in range(files.num_files)
            ]
        totals = add_counts(record["counts"] for record in records)
        sets = shard_sets(length, self.settings.duplicates, parts.held_out.size > 0)
        schema = example_schema(length, self.num_pieces, 1 << 24)
        self.costs.examples[length] = self._size_of(record["files"][0]["path"] for record in records)
        self.costs.shards[length] = sum(estimated_bytes(total, schema) for total in totals) / self.text
        with self.timed(f"merge-{length}"):
            merge(MergeTask(self.folder, files, SortedFiles(length, 1, 1, 1), 0, files.num_files, len(sets), 0))
        with self.timed(f"shards-{length}"):
            for number, shards in enumerate(sets):
                write_shard(ShardTask(self.folder, shards, 0, 1, number, files, 0))
        read_parts.cache_clear()
