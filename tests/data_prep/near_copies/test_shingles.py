"""Documents that are alike share a key as likely as is promised, and are paired, however little is in memory."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.corpora import (
    FIRST_ENDING,
    FIRST_WORD,
    PIECES,
    VOCABULARY,
    Document,
    alter,
    draw_corpus,
    draw_document,
    shingles_of,
    write_tokens,
)

from data_prep.arrow_files import map_batches
from data_prep.common.arrays import Array
from data_prep.near_copies import candidates, signatures
from data_prep.near_copies.candidates import FEW, find_candidates, make_find_tasks
from data_prep.near_copies.signatures import (
    FOUND,
    MOST_MINIMA,
    PATH,
    Banding,
    Texts,
    choose_banding,
    compute_keys,
    count_slots,
    fill_shingles,
    jaccard,
    make_sign_tasks,
    read_stretches,
    read_texts,
    sign,
)
from data_prep.vocabulary.tokens import list_token_files

few_words = st.integers(FIRST_WORD, FIRST_WORD + 2)  # so few that shingles repeat
pieces = st.lists(few_words | st.integers(FIRST_ENDING, FIRST_ENDING + 1), min_size=1, max_size=60)


def shingles(document: Document) -> Array:
    """Hashes the shingles of a document, which stands between two others."""
    there = np.array([FIRST_WORD, *document, FIRST_ENDING, FIRST_WORD], np.uint16)
    found = np.empty(len(document), np.uint64)
    return found[: fill_shingles(found, there, 1, len(document) + 1, VOCABULARY.continues)]


@given(pieces)
@example([FIRST_ENDING])
@example([FIRST_WORD] * 4)
@example([FIRST_WORD] * 5)
def test_there_are_as_many_different_shingles_as_groups_of_words(document: Document) -> None:
    assert len(np.unique(shingles(document))) == len(shingles_of(document))


@given(pieces, pieces, st.integers(0, 30))
@example([FIRST_WORD, FIRST_ENDING], [FIRST_WORD + 1, FIRST_ENDING], 0)
def test_the_index_is_that_of_the_sets(one: Document, other: Document, shared: int) -> None:
    other = [*one[:shared], *other]
    here, there = shingles_of(one), shingles_of(other)
    hashes = shingles(one), shingles(other)
    room = count_slots(sum(map(len, hashes)))
    slots, owners = np.empty(room, np.uint64), np.full(room, 9, np.uint8)
    assert jaccard(*hashes, slots, owners) == len(here & there) / len(here | there)


def test_equal_words_in_another_order_are_other_shingles() -> None:
    words = [FIRST_WORD + number for number in range(30)]
    assert not {*shingles(words).tolist()} & {*shingles(words[::-1]).tolist()}


def test_the_same_hashes_on_every_machine() -> None:
    """They decide which documents are left out, so they may not change."""
    assert len(PIECES) == 445
    assert [hex(value) for value in shingles([FIRST_WORD, FIRST_ENDING, *range(FIRST_WORD, FIRST_WORD + 5)])] == [
        "0xfd4c4f2af8d14f1d",
        "0x498753ce1fed4b82",
    ]


def keys(documents: Sequence[Document], banding: Banding) -> Array:
    bounds = np.cumsum([0, *map(len, documents)])
    return compute_keys(Texts(np.concatenate(documents).astype(np.uint16), bounds), VOCABULARY.continues, banding)


def chance(banding: Banding, jaccard: float) -> float:
    """Computes the chance that two documents with this Jaccard index share a key."""
    return float(1 - (1 - jaccard**banding.rows) ** banding.bands)


@given(st.floats(0.5, 0.999))
def test_the_threshold_itself_is_found_as_surely_as_promised(threshold: float) -> None:
    banding = choose_banding(threshold)
    assert chance(banding, threshold) >= FOUND
    assert banding.bands * banding.rows <= MOST_MINIMA
    one_more = Banding(MOST_MINIMA // (banding.rows + 1), banding.rows + 1)
    assert chance(one_more, threshold) < FOUND, "one row more would leave fewer pairs below the threshold"


def test_above_the_threshold_almost_all_are_found_and_far_below_it_few() -> None:
    for threshold in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        banding = choose_banding(threshold)
        above = np.mean([chance(banding, index) for index in np.linspace(threshold, 1, 101)])
        assert above > 0.985
        assert chance(banding, threshold / 4) < 0.05
    assert choose_banding(0.8) == Banding(13, 7)


@pytest.mark.parametrize("changes", [1, 4, 12])
def test_minima_are_shared_as_often_as_the_index_says(changes: int) -> None:
    """With one row a band, each minimum has a key. Of 128 draws, the share strays from the index as chance says."""
    draw = random.Random(changes)
    documents = [draw_document(draw, draw.randint(30, 200)) for _ in range(300)]
    others = [alter(draw, document, changes) for document in documents]
    sets = [(shingles_of(one), shingles_of(other)) for one, other in zip(documents, others, strict=True)]
    indices = np.array([len(one & other) / len(one | other) for one, other in sets])
    same = keys(documents, Banding(128, 1)) == keys(others, Banding(128, 1))
    strays = (same.mean(axis=1) - indices) / np.sqrt(np.maximum(indices * (1 - indices), 0.01) / 128)
    assert abs(strays.mean()) < 0.2
    assert 0.8 < strays.std() < 1.2
    by_function = same.mean(axis=0)
    assert np.all(abs(by_function - indices.mean()) < 5 * np.sqrt(0.25 / 300))


def test_equal_documents_share_all_keys_and_others_none() -> None:
    draw = random.Random(5)
    documents = [draw_document(draw, 50) for _ in range(50)]
    found = keys([*documents, *documents], choose_banding(0.8))
    np.testing.assert_array_equal(found[:50], found[50:])
    assert len(np.unique(found[:50])) == 50 * 13


Pairs = set[tuple[int, int]]
BANDING = Banding(6, 2)


def prepare(folder: Path, num_documents: int, per_file: int) -> int:
    """Writes a corpus with its keys; returns how many keys there are."""
    documents = draw_corpus(1, num_documents // 2, num_documents // 2)
    documents[50:200:10] = [documents[40]] * 15
    list_token_files(folder, PATH, write_tokens(folder, documents, per_file))
    for task in make_sign_tasks(folder, read_stretches(folder), BANDING, VOCABULARY.sha256):
        sign(task)
    return BANDING.bands * num_documents


def expected(folder: Path) -> Pairs:
    """Pairs by the definition, with all keys in memory."""
    parts = read_stretches(folder)
    texts = [read_texts(folder / parts.path(part)) for part in range(len(parts.paths))]
    keys = np.concatenate([compute_keys(one, VOCABULARY.continues, BANDING) for one in texts])
    having = defaultdict(list)
    for document, row in enumerate(keys.tolist()):
        for key in row:
            having[key].append(document)
    return {(later, one) for same in having.values() for later in same for one in same[:FEW] if one < later}


@pytest.mark.parametrize(
    ("keys", "stretches", "per_file"), [(1 << 19, 128, 30), (100, 128, 30), (20, 3, 17), (40, 1, 9)]
)
def test_pairs_are_the_same_however_little_is_in_memory(
    keys: int, stretches: int, per_file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "KEYS", keys)
    monkeypatch.setattr(signatures, "MOST_STRETCHES", stretches)
    num_keys = prepare(tmp_path, 240, per_file)
    assert read_stretches(tmp_path).num_stretches <= stretches
    found: Pairs = set()
    for task in make_find_tasks(tmp_path, num_keys):
        [file] = find_candidates(task).files
        table = map_batches(tmp_path / file.path).read_all()
        later, earlier = (table[name].to_pylist() for name in ("later", "earlier"))
        assert later == sorted(later)
        found |= {*zip(later, earlier, strict=True)}
    assert found == expected(tmp_path)
    assert len(found) > 150
