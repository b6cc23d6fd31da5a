"""Token documents for tests of near copies, and the exact answer of which of them are some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from data_prep.arrow_files import write_batches
from data_prep.common.arrays import Array
from data_prep.common.workers import Workers
from data_prep.near_copies.finding import NEAR_COPIES, mark_near_copies
from data_prep.running import Runner
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.tokens import make_token_schema
from data_prep.work import TokensRecord, WorkFolder, make_numbered_path

Document = Sequence[int]
"""The ids of the pieces of a document."""
WORDS, ENDINGS = 400, 40
PIECES = (*SPECIAL, *(f"w{number}" for number in range(WORDS)), *(f"##e{number}" for number in range(ENDINGS)))
VOCABULARY = WordPiece(PIECES, cased=False)
FIRST_WORD, FIRST_ENDING = len(SPECIAL), len(SPECIAL) + WORDS


def words_of(document: Document) -> list[tuple[int, ...]]:
    """Joins each piece with those that continue it."""
    words: list[list[int]] = []
    for piece in document:
        if words and PIECES[piece].startswith("##"):
            words[-1].append(piece)
        else:
            words.append([piece])
    return [tuple(word) for word in words]


def shingles_of(document: Document) -> set[tuple[tuple[int, ...], ...]]:
    """Lists the groups of five words that follow each other; the whole document where it has fewer."""
    words = words_of(document)
    return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}


def exact(documents: Sequence[Document]) -> Iterator[tuple[int, int, float]]:
    """Compares each document with each before it; yields the later, the earlier and their Jaccard index, unless 0."""
    all_shingles = [shingles_of(document) for document in documents]
    for later, here in enumerate(all_shingles):
        for earlier, there in enumerate(all_shingles[:later]):
            if common := len(here & there):
                yield later, earlier, common / len(here | there)


def draw_document(draw: random.Random, words: int) -> list[int]:
    """Makes up a document of about so many words, a third of them with endings."""
    pieces: list[int] = []
    for _ in range(words):
        pieces.append(draw.randrange(FIRST_WORD, FIRST_ENDING))
        while draw.random() < 0.25:
            pieces.append(draw.randrange(FIRST_ENDING, len(PIECES)))
    return pieces


def alter(draw: random.Random, document: Document, changes: int) -> list[int]:
    """Replaces some pieces of a document by words, wherever they are."""
    changed = list(document)
    for _ in range(changes):
        changed[draw.randrange(len(changed))] = draw.randrange(FIRST_WORD, FIRST_ENDING)
    return changed


def draw_corpus(seed: int, originals: int, near: int) -> list[list[int]]:
    """Makes up documents, some of which are earlier ones with few or many changes, anywhere in the corpus."""
    draw = random.Random(seed)
    documents = [draw_document(draw, draw.randint(1, 120)) for _ in range(originals)]
    for _ in range(near):
        document = draw.choice(documents)
        documents.append(alter(draw, document, draw.randint(0, len(document) // 12 + 1)))
    draw.shuffle(documents)
    return documents


def write_tokens(folder: Path, documents: Sequence[Document], per_file: int) -> list[TokensRecord]:
    """Writes a corpus as shard.py has it once it is in pieces; the fifth file and some others have no documents."""
    VOCABULARY.write(folder)
    schema = make_token_schema(len(PIECES))
    kind = schema.field("sentences").type
    records = []
    bounds = [*range(0, len(documents), per_file), len(documents)]
    bounds[4:4] = bounds[4:5]
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        some = documents[first:end]
        names = pa.array([str(row) for row in range(first, end)], pa.string())
        titles = pa.array([f"title {row}" for row in range(first, end)], pa.string())
        sentences = pa.array([_cut(document) for document in some], kind)
        digests = pa.array(np.zeros(len(some), np.uint64))
        batch = pa.record_batch([names, titles, sentences, digests], schema=schema)
        file = write_batches(folder, make_numbered_path("tokens", number), schema, [batch])
        pieces = sum(map(len, some))
        unused = dict.fromkeys(("empty", "sentences", "unknown", "text_bytes"), 0)
        counts: dict[str, Any] = {"documents": len(some), "pieces": pieces, **unused}
        records.append(TokensRecord(files=[file], source="made up", **counts))
    return records


def _cut(document: Document) -> list[list[int]]:
    """Cuts a document into sentences before words, which changes nothing of its shingles."""
    starts = [at for at in range(0, len(document), 9) if not at or not PIECES[document[at]].startswith("##")]
    return [list(document[begin:end]) for begin, end in itertools.pairwise([*starts, len(document)])]


def mark(folder: Path, tokens: Iterable[TokensRecord], threshold: float, workers: Workers | None = None) -> Array:
    """Finds near copies in a folder; returns the documents that are some."""
    runner = Runner(WorkFolder(folder), workers or Workers(), Console(quiet=True))
    mark_near_copies(runner, tokens, VOCABULARY, threshold)
    return np.flatnonzero(np.fromfile(folder / NEAR_COPIES, np.uint8))
