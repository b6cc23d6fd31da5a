"""Corpora that tests make up, and what must come of them, found as plainly as can be.

Examples are held against the original generator, in which documents are lists of sentences, sentences lists of pieces,
and everything is done a piece at a time; near copies against what comparing each document with each finds.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from data_prep.arrow_files import write_batches
from data_prep.common.arrays import Array
from data_prep.common.workers import Workers
from data_prep.examples.pairs import Segments, place_partners, plan_segments, truncate
from data_prep.examples.parts import Pool
from data_prep.near_copies.finding import NEAR_COPIES, mark_near_copies
from data_prep.running import Runner
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.tokens import Corpus, make_token_schema
from data_prep.work import TokensRecord, WorkFolder, make_numbered_path

# Corpora of bare sizes, and the examples that are planned of them

Sizes = Sequence[Sequence[int]]  # documents, as the numbers of pieces of their sentences
SEED = 12345


def corpus_of(documents: Sizes, first: int = 0) -> Corpus:
    """Makes a corpus as it is read from a file, in which a piece is its own position."""
    sentence_ends = np.cumsum([size for document in documents for size in document]).astype(np.int32)
    document_ends = np.cumsum([len(document) for document in documents]).astype(np.int32)
    pieces = (np.arange(sentence_ends[-1]) % (1 << 16)).astype(np.uint16)
    for array in (pieces, sentence_ends, document_ends):
        array.flags.writeable = False
    books = np.arange(len(documents))
    return Corpus(pieces, sentence_ends, document_ends, np.int64(first), books)


def all_rows(corpus: Corpus) -> Array:
    return np.arange(corpus.document_ends.size)


def pool_of(corpus: Corpus) -> Pool:
    """Makes a pool of all documents of a corpus that has no other parts."""
    return Pool(np.zeros(1, np.int64), np.array([corpus.document_ends.size]), np.empty(0, np.int64), True)


def copied(plan: Segments) -> Segments:
    return Segments(*(column.copy() for column in plan))


class Made(NamedTuple):
    """The examples of a corpus, before and after they are truncated."""

    corpus: Corpus
    room: int
    whole: Segments
    plan: Segments
    short: float
    """The share of documents with a short target."""


def make(corpus: Corpus, length: int, duplicate: int = 0, seed: int = SEED, short: float = 0.0) -> Made:
    """Makes all examples of all documents, which are in one file."""
    whole = plan_segments(corpus, all_rows(corpus), pool_of(corpus), length, duplicate, seed, short)
    place_partners(np.flatnonzero(whole.partner >= 0), whole, corpus)
    plan = copied(whole)
    truncate(np.arange(plan.row.size), plan, length - 3)
    return Made(corpus, length - 3, whole, plan, short)


def starts_of(ends: Array) -> Array:
    return np.concatenate([[0], ends[:-1]])


def first_of_each(row: Array) -> Array:
    """Finds the first examples of the documents."""
    return np.unique(row, return_index=True)[1]


def last_of_each(row: Array) -> Array:
    return row.size - 1 - np.unique(row[::-1], return_index=True)[1]


def document_sizes(lengths: int = 40) -> st.SearchStrategy[list[list[int]]]:
    sentence = st.one_of(st.just(1), st.integers(1, 12), st.integers(1, lengths))
    return st.lists(st.lists(sentence, min_size=1, max_size=15), min_size=1, max_size=8)


LENGTHS = st.integers(8, 40)
SHORT = st.sampled_from([0.0, 0.5, 1.0])


def plan_of(size_a: Array, size_b: Array, number: int = 0) -> Segments:
    """Makes a plan of segments of these sizes, with streams of their own."""
    columns = np.zeros((8, size_a.size), np.int64)
    columns[1], columns[2] = 1000, 1000 + size_a
    columns[3], columns[4] = 5_000_000, 5_000_000 + size_b
    columns[5] = -1
    columns[7] = np.random.default_rng(number).integers(0, 2**63, size_a.size)
    return Segments.from_columns(columns)


def truncated(plan: Segments, room: int) -> Segments:
    result = copied(plan)
    truncate(np.arange(plan.row.size), result, room)
    return result


ONE_PIECE_SENTENCES = [[1] * 80] * 3000


def varied(num_documents: int) -> Sizes:
    """Draws documents of one sentence and of many, sentences of one piece and of more than there is room for."""
    draw = Random(11)
    documents = []
    for number in range(num_documents):
        num_sentences = 1 if number % 9 == 0 else draw.randint(2, 40)
        typical = draw.choice([1, 4, 12, 25])
        sizes = [max(1, round(draw.gauss(typical, typical / 2))) for _ in range(num_sentences)]
        if number % 7 == 0:
            sizes[draw.randrange(num_sentences)] = draw.choice([61, 62, 63, 150])
        documents.append(sizes)
    return documents


# The original generator

SPECIAL_PIECES = 3  # [CLS] A [SEP] B [SEP]
CHANCE = 1e-3  # a right generator fails a comparison this often; the seeds are fixed, so it does so always or never


@dataclass
class Pair:
    """One example, before and after truncation."""

    document: int
    target: int
    num_sentences_a: int
    a: list[int]
    b: list[int]
    partner: int | None
    whole_a: list[int]
    whole_b: list[int]


def flatten(sentences: Iterable[list[int]]) -> list[int]:
    return [piece for sentence in sentences for piece in sentence]


def gather(sentences: Sequence[list[int]], wanted: int) -> Sequence[list[int]]:
    """Takes the first sentences until they have as many pieces as wanted or there are no more, but at least one."""
    size = 0
    for count, sentence in enumerate(sentences, 1):
        size += len(sentence)
        if size >= wanted:
            return sentences[:count]
    return sentences


def make_pairs(documents: Sequence[list[list[int]]], own: int, length: int, short: float, draw: Random) -> list[Pair]:
    """Makes the examples of one document."""
    room = length - SPECIAL_PIECES
    target = draw.randint(2, room) if draw.random() < short else room
    pairs = []
    left = documents[own]
    while left:
        gathered = gather(left, target)
        num_a = draw.randint(1, len(gathered) - 1) if len(gathered) > 1 else 1
        a = flatten(gathered[:num_a])
        partner = None
        if len(gathered) == 1 or draw.random() < 0.5:
            partner = draw_partner(len(documents), own, draw)
            start = draw.randint(0, len(documents[partner]) - 1)
            b = flatten(gather(documents[partner][start:], target - len(a)))
            left = left[num_a:]
        else:
            b = flatten(gathered[num_a:])
            left = left[len(gathered) :]
        pairs.append(Pair(own, target, num_a, *truncate_original(a, b, room, draw), partner, a, b))
    return pairs


def draw_partner(num_documents: int, own: int, draw: Random) -> int:
    for _ in range(10):
        partner = draw.randint(0, num_documents - 1)
        if partner != own:
            return partner
    return own


def truncate_original(a: list[int], b: list[int], room: int, draw: Random) -> tuple[list[int], list[int]]:
    """Drops single pieces of the longer part, from either end, until both fit."""
    a, b = list(a), list(b)
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if draw.random() < 0.5 else -1)
    return a, b


def group_words(pieces: Sequence[int], specials: set[int], continues: Sequence[bool] | Array) -> list[list[int]]:
    """Groups positions into words; one may reach from A over to B."""
    words: list[list[int]] = []
    for position, piece in enumerate(pieces):
        if piece in specials:
            continue
        if words and continues[piece]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def mask_original(
    pieces: Sequence[int], words: list[list[int]], wanted: int, mask_piece: int, num_pieces: int, draw: Random
) -> tuple[list[int], dict[int, int]]:
    """Masks pieces of an example; returns it with what stood at the masked positions."""
    masked, labels = list(pieces), dict[int, int]()
    for word in draw.sample(words, len(words)):
        if len(labels) + len(word) > wanted:
            continue
        for position in word:
            labels[position] = pieces[position]
            if draw.random() < 0.8:
                masked[position] = mask_piece
            elif draw.random() < 0.5:
                masked[position] = draw.randint(0, num_pieces - 1)
    return masked, labels


def chance_alike(ours: Sequence[int] | Array, theirs: Sequence[int] | Array) -> float:
    """Says how likely two samples of whole numbers from one distribution differ as much as these, by chi-square."""
    both = np.concatenate([ours, theirs])
    edges = np.unique(np.quantile(both, np.linspace(0, 1, 21), method="higher"))
    table = np.array([np.bincount(np.searchsorted(edges, sample), minlength=len(edges)) for sample in (ours, theirs)])
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] == 1:
        return 1.0
    return float(stats.chi2_contingency(table).pvalue)


# Near copies

Document = Sequence[int]
"""The ids of the pieces of a document."""
WORDS, ENDINGS = 400, 40
PIECES = (*SPECIAL, *(f"w{number}" for number in range(WORDS)), *(f"##e{number}" for number in range(ENDINGS)))
VOCABULARY = WordPiece(PIECES, cased=False)
FIRST_WORD, FIRST_ENDING = len(SPECIAL), len(SPECIAL) + WORDS


def shingles_of(document: Document) -> set[tuple[tuple[int, ...], ...]]:
    """Lists the groups of five words that follow each other; the whole document where it has fewer."""
    words = [tuple(document[at] for at in word) for word in group_words(document, set(), VOCABULARY.continues)]
    return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}


def exact(documents: Sequence[Document]) -> Iterator[tuple[int, int, float]]:
    """Compares each document with each before it; yields the later, the earlier and their Jaccard index, unless 0."""
    all_shingles = [shingles_of(document) for document in documents]
    for later, here in enumerate(all_shingles):
        for earlier, there in enumerate(all_shingles[:later]):
            if common := len(here & there):
                yield later, earlier, common / len(here | there)


def draw_document(draw: Random, words: int) -> list[int]:
    """Makes up a document of about so many words, a third of them with endings."""
    pieces: list[int] = []
    for _ in range(words):
        pieces.append(draw.randrange(FIRST_WORD, FIRST_ENDING))
        while draw.random() < 0.25:
            pieces.append(draw.randrange(FIRST_ENDING, len(PIECES)))
    return pieces


def alter(draw: Random, document: Document, changes: int) -> list[int]:
    """Replaces some pieces of a document by words, wherever they are."""
    changed = list(document)
    for _ in range(changes):
        changed[draw.randrange(len(changed))] = draw.randrange(FIRST_WORD, FIRST_ENDING)
    return changed


def draw_corpus(seed: int, originals: int, near: int) -> list[list[int]]:
    """Makes up documents, some of which are earlier ones with few or many changes, anywhere in the corpus."""
    draw = Random(seed)
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
