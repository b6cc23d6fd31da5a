"""Finds a document among those that a folder keeps in pieces, by its title or its number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.arrow_files import map_batches, read_batch
from data_prep.common.errors import DamageError, UserError
from data_prep.inspection.lookup import read_document_row
from data_prep.origins import Origin, find_origins_of_folder
from data_prep.shards import Manifest
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary

MOST_LISTED = 10  # documents of one title that are listed


@dataclass(frozen=True)
class KeptDocument:
    """A document in pieces."""

    source: str
    id: str
    title: str
    sentences: list[list[int]]

    def lines(self, vocabulary: Vocabulary) -> Iterator[str]:
        """Yields a heading, then the sentences, with the pieces of a word joined."""
        count = sum(map(len, self.sentences))
        case = "with case" if vocabulary.cased else "in lower case"
        name = " ".join(filter(None, (self.source, self.id, self.title)))
        yield f"{name}: {len(self.sentences):,} sentences, {count:,} pieces, {case}"
        for sentence in self.sentences:
            yield " ".join(vocabulary.pieces[piece] for piece in sentence).replace(" ##", "")


def find_document(folder: Path, wanted: str) -> tuple[KeptDocument, Vocabulary]:
    """Finds the document of a title, or of a number as examples and the table of documents have it."""
    manifest = Manifest.read(folder)
    origins = list(find_origins_of_folder(folder, str(folder)))
    found = _by_title(origins, wanted)
    if not found and wanted.isdigit():
        found = _by_number(folder, manifest, origins, int(wanted))
    if not found:
        raise UserError(f"--document {wanted}: {folder} has no document of just this title")
    documents = [_read(*place) for place in found[:MOST_LISTED]]
    if len(found) > 1 and not wanted.isdigit():
        names = "\n".join(f"  {document.source} {document.id}" for document in documents)
        more = f"\n  and {len(found) - MOST_LISTED:,} more" if len(found) > MOST_LISTED else ""
        raise UserError(f"--document {wanted}: {len(found):,} documents have this title; give a number\n{names}{more}")
    vocabulary = load_vocabulary(folder / VOCABULARY, manifest.vocabulary.cased)
    if max((max(sentence, default=0) for sentence in documents[0].sentences), default=0) >= len(vocabulary):
        raise DamageError(f"{folder}: document {wanted} has a piece beyond its {VOCABULARY}")
    return documents[0], vocabulary


Place = tuple[Path, str, int]  # a file of documents, its source, and a row of it


def _by_title(origins: list[Origin], title: str) -> list[Place]:
    """Finds all documents of a title."""
    return [place for path, source, batch in _files(origins) for place in _rows(path, source, batch, title=title)]


def _by_number(folder: Path, manifest: Manifest, origins: list[Origin], number: int) -> list[Place]:
    """Finds the document of a number, by the table of documents if some were left out, cut or repeated."""
    if manifest.figures and not 0 <= number < manifest.num_documents:
        raise UserError(f"--document {number}: {folder} has {manifest.num_documents:,} documents, from 0")
    total = sum(file.rows for origin in origins for file in origin.manifest.kept)
    if not manifest.figures or total == manifest.num_documents:
        for path, source, batch in _files(origins):
            if number < batch.num_rows:
                return [(path, source, number)]
            number -= batch.num_rows
        return []
    row = read_document_row(folder, number)
    wanted = {name: row[name] for name in ("id", "title")}
    files = ((path, source, batch) for path, source, batch in _files(origins) if source == row["source"])
    return [place for path, source, batch in files for place in _rows(path, source, batch, **wanted)]


def _files(origins: list[Origin]) -> Iterator[tuple[Path, str, pa.RecordBatch]]:
    """Goes through the files of documents, in the order of the corpus."""
    for origin in origins:
        for record in origin.manifest.kept:
            path = record.find(origin.folder)
            yield path, record.source, map_batches(path).get_batch(0)


def _rows(path: Path, source: str, batch: pa.RecordBatch, **wanted: str) -> Iterator[Place]:
    """Finds the rows of a file that have all the values that are wanted."""
    fits = np.ones(batch.num_rows, bool)
    for name, value in wanted.items():
        fits &= np.asarray(pc.equal(batch[name], value))
    yield from ((path, source, row) for row in np.flatnonzero(fits).tolist())


def _read(path: Path, source: str, row: int) -> KeptDocument:
    """Reads a document."""
    batch = read_batch(map_batches(path), 0, path)
    return KeptDocument(source, *(batch[name][row].as_py() for name in ("id", "title", "sentences")))
