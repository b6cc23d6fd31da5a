"""Reads the documents in pieces of a folder for its page: a sample, if they are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from data_prep.arrow_files import map_batches, name_damage, read_batch
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.origins import find_origins_of_folder
from data_prep.shards import KeptFile, Manifest
from data_prep.vocabulary.tokens import make_token_schema

MOST_FILES = 64
"""Files of documents that are read, each of at most 16 MB of text or one document."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Documents:
    """The documents of a file as flat arrays."""

    source: str
    pieces: Array
    sentence_ends: Array
    """Where every sentence ends in the pieces."""
    document_ends: Array
    """Where every document ends in the pieces."""


@dataclass(frozen=True)
class KeptDocuments:
    """All files of documents that are there, in the order of the corpus, each with the folder that has it."""

    files: list[tuple[Path, KeptFile]]
    vocabulary_size: int

    @property
    def sample(self) -> list[tuple[Path, KeptFile]]:
        """Chooses some files from all over the corpus: all of them, where they are few."""
        return choose_evenly(self.files, MOST_FILES)

    def read_sample(self) -> Iterator[Documents]:
        """Maps the chosen files into memory, one after another."""
        for folder, record in self.sample:
            yield read_documents(folder, record, self.vocabulary_size)


def find_kept(folder: Path, manifest: Manifest) -> KeptDocuments:
    """Finds the documents in pieces, those of other folders too; none, where they were not kept or are gone."""
    try:
        origins = list(find_origins_of_folder(folder, str(folder)))
    except DamageError:
        raise
    except UserError:
        origins = []
    files = [(origin.folder, record) for origin in origins for record in origin.manifest.kept]
    return KeptDocuments(files, manifest.vocabulary_size)


def read_documents(folder: Path, record: KeptFile, vocabulary_size: int) -> Documents:
    """Maps a file of documents into memory; raises DamageError unless it has the columns and counts of its record."""
    path = record.find(folder)
    with name_damage(path, "damaged"):
        batch = read_batch(map_batches(path), 0, path)
        if batch.schema != make_token_schema(vocabulary_size) or batch.num_rows != record.rows:
            raise DamageError(f"{path}: its rows or columns are not those of its record")
        sentences = batch["sentences"].values
        bounds = np.asarray(sentences.offsets)
        document_ends = bounds[np.asarray(batch["sentences"].offsets)[1:]]
        if (np.diff(document_ends, prepend=0) < 1).any():
            raise DamageError(f"{path}: has a document without pieces")
        return Documents(record.source, np.asarray(sentences.values), bounds[1:], document_ends)


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Chooses at most `most` items, evenly spread, with the first."""
    if len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]
