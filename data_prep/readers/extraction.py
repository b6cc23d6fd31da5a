"""Step 1, documents: files of any format to Arrow files of documents, each a list of its sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.readers import READERS
from data_prep.readers.cutting import Errors, Options, Problems
from data_prep.readers.documents import Document
from data_prep.readers.sources import Bundle
from data_prep.readers.splitting import split_sentences
from data_prep.shards import WORK, write_batches

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("sentences", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
    ]
)


@dataclass(frozen=True)
class ExtractTask:
    """Read one bundle."""

    folder: Path
    bundle: Bundle
    language: str
    text_field: str
    errors: Errors

    @property
    def name(self) -> str:
        return self.bundle.name

    @property
    def weight(self) -> int:
        return self.bundle.weight


def extract(task: ExtractTask) -> dict[str, Any]:
    """Writes the documents of a bundle; a bundle of one huge file makes several parts."""
    problems = Problems(task.errors)
    reader = READERS[task.bundle.format]
    options = Options(problems, task.text_field)
    language = task.language

    def documents() -> Iterator[Document]:
        for span in task.bundle.spans:
            for each in reader.read(span, options):
                sentences = each.passages if reader.has_sentences else split_sentences(language, each.passages)
                if sentences:
                    yield Document(each.id, each.title, sentences)

    parts = []
    for number, batch in enumerate(_parts(documents(), task.bundle.part_bytes)):
        name = f"{WORK}/documents/{task.name}-{number:04}.arrow"
        record = write_batches(task.folder, name, SCHEMA, iter([batch]))
        parts.append({**record.as_json(), "text_bytes": batch["sentences"].values.nbytes})
    return {
        "files": parts,
        "source": task.bundle.source,
        "skipped": problems.skipped,
        "replaced": problems.num_replaced,
    }


def _parts(documents: Iterator[Document], part_bytes: int) -> Iterator[pa.RecordBatch]:
    """Groups documents into record batches of about so many characters."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += sum(map(len, document.passages))
        if size >= part_bytes:
            yield _as_batch(group)
            group, size = [], 0
    if group:
        yield _as_batch(group)


def _as_batch(group: list[Document]) -> pa.RecordBatch:
    columns = [
        pa.array([document.id for document in group]),
        pa.array([document.title for document in group]),
        pa.array([document.passages for document in group], SCHEMA.field("sentences").type),
    ]
    return pa.record_batch(columns, schema=SCHEMA)
