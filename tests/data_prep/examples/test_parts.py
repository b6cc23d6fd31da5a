"""Parts of a corpus: the pools of which partners are drawn, rounds of merging, documents for validation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.corpora import CHANCE

from data_prep.common.arrays import Array
from data_prep.examples import merging, sifting
from data_prep.examples import parts as module
from data_prep.examples.merging import SortedFiles, merging_rounds
from data_prep.examples.pairs import find_ranked_document
from data_prep.examples.parts import HELD_OUT, PARTS, Parts, Pool, read_parts
from data_prep.examples.sifting import choose_held_out
from data_prep.examples.streams import begin_stream, draw_below
from data_prep.vocabulary.tokens import list_token_files
from data_prep.work import TokensRecord

SEED = 7
drawn_below: Callable[[Array, int], int] = draw_below
start_stream: Callable[..., Array] = begin_stream
number_at: Callable[[Pool, int], int] = find_ranked_document


def make_parts(folder: Path, sizes: list[int], held_out: list[int]) -> Parts:
    counts: dict[str, Any] = {"source": "", "empty": 0, "sentences": 0, "pieces": 0, "unknown": 0, "text_bytes": 0}
    tokens = [TokensRecord(files=[], elsewhere="x", documents=size, **counts) for size in sizes]
    list_token_files(folder, PARTS, tokens)
    np.save(folder / HELD_OUT, np.array(held_out, np.int64))
    return read_parts(folder)


def members(pool: Pool) -> Array:
    """Lists the documents that can be drawn, in all ranges."""
    return np.array(
        [
            number_at(pool, rank)
            for first, size in zip(pool.firsts.tolist(), pool.sizes.tolist(), strict=True)
            for rank in range(first, first + size)
        ]
    )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets partners come of three parts, shared by four that follow each other."""
    monkeypatch.setattr(module, "FEW_PARTS", 4)
    monkeypatch.setattr(module, "PARTNER_PARTS", 3)
    monkeypatch.setattr(module, "NEIGHBOURS", 4)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 99)), st.lists(st.integers(1, 40), min_size=3, max_size=9))
def test_documents_have_one_rank(tmp_path_factory: pytest.TempPathFactory, chosen: set[int], sizes: list[int]) -> None:
    total = sum(sizes)
    held_out = sorted(number for number in chosen if number < total)
    parts = make_parts(tmp_path_factory.mktemp("parts"), sizes, held_out)
    assert parts.num_documents == total
    training, validation = (parts.pool(0, SEED, validation=kind) for kind in (False, True))
    assert members(training).tolist() == [number for number in range(total) if number not in held_out]
    assert members(validation).tolist() == held_out
    rows = [parts.validation_rows(part) + parts.firsts[part] for part in range(len(sizes))]
    assert np.concatenate(rows).tolist() == held_out


def test_partners_of_many_parts_come_of_a_few_whole_ones(few: None, tmp_path: Path) -> None:
    held_out = [3, 17, 30, 31]
    parts = make_parts(tmp_path, [10, 0, 5, 20, 1, 14], held_out)
    for part in range(6):
        pool = parts.pool(part, SEED, validation=False)
        assert len(pool.firsts) == 3
        homes, counts = np.unique(parts.find(members(pool)), return_counts=True)
        whole = {
            home: int(parts.firsts[home + 1] - parts.firsts[home] - len(parts.validation_rows(home))) for home in homes
        }
        assert all(count % whole[home] == 0 for home, count in zip(homes, counts, strict=True))
        assert not set(members(pool).tolist()) & set(held_out)
        same = parts.pool(part // 4 * 4, SEED, validation=False)
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(pool[:2], same[:2], strict=True))


def test_each_document_is_as_likely_whichever_part_it_is_in(few: None, tmp_path: Path) -> None:
    held_out = [2, 11, 12, 40]
    parts = make_parts(tmp_path, [3, 8, 1, 0, 30], held_out)
    for kind in (False, True):
        counts = np.zeros(42, np.int64)
        for seed in range(3000):
            pool = parts.pool(0, seed, validation=kind)
            state = start_stream(seed, 128, 0, 5)
            group = drawn_below(state, len(pool.firsts))
            counts[number_at(pool, pool.firsts[group] + drawn_below(state, pool.sizes[group]))] += 1
        allowed = np.isin(np.arange(42), held_out) == kind
        assert not counts[~allowed].any()
        assert stats.chisquare(counts[allowed]).pvalue > CHANCE


def test_numbers_beyond_32_bits(tmp_path: Path) -> None:
    """Ten terabytes have some five thousand million documents."""
    sizes = [1_400_000] * 4000
    held_out = [5, 4_300_000_000, 5_599_999_999]
    parts = make_parts(tmp_path, sizes, held_out)
    assert parts.num_documents == 5_600_000_000
    pool = parts.pool(3999, SEED, validation=False)
    drawn = [
        number_at(pool, pool.firsts[group] + drawn_below(state, pool.sizes[group]))
        for number in range(2000)
        for state in [start_stream(SEED, 128, 0, number)]
        for group in [drawn_below(state, len(pool.firsts))]
    ]
    assert max(drawn) > 2**32 > min(drawn)
    assert stats.kstest(np.unique(parts.find(np.array(drawn))) / len(sizes), "uniform").pvalue > CHANCE
    assert parts.validation_rows(3999).tolist() == [1_399_999]


ROUNDS = {1: [], 256: [], 257: [52], 4000: [64], 65_536: [256], 65_537: [257, 52], 625_000: [2442, 63]}


@pytest.mark.parametrize(("num_parts", "rounds"), ROUNDS.items())
def test_rounds_grow_with_the_logarithm_of_the_parts(num_parts: int, rounds: list[int]) -> None:
    found = list(merging_rounds(SortedFiles(128, num_parts), num_parts * 60_000_000, 6))
    assert [target.num_files for _, _, target in found] == rounds
    for source, fan_in, target in found:
        assert fan_in <= 256
        assert fan_in * target.num_files >= source.num_files > fan_in * (target.num_files - 1)
        assert target.num_ranges % source.num_ranges == 0
        in_memory = num_parts * 10_000_000 / target.num_files / target.num_ranges
        assert in_memory < 1.5 * merging.RANGE_BYTES
        assert in_memory > merging.RANGE_BYTES / 2 or target.num_ranges == source.num_ranges


def in_parts(digests: Array, size: int) -> Iterator[Array]:
    for at in range(0, len(digests), size):
        yield digests[at : at + size]


def chosen(digests: Array, share: float, size: int = 1000, seed: int = 5) -> Array:
    return choose_held_out(lambda: in_parts(digests, size), len(digests), share, seed)


def different(count: int) -> Array:
    return np.random.default_rng(3).integers(0, 2**64, count, np.uint64)


@pytest.mark.parametrize(("count", "share"), [(200, 0.005), (200, 0.9), (5000, 0.1), (5000, 0.9), (60_000, 0.005)])
def test_as_many_are_chosen_as_asked_for_whatever_the_parts(count: int, share: float) -> None:
    digests = different(count)
    numbers = chosen(digests, share)
    assert len(numbers) == max(10, round(count * share))
    assert (np.diff(numbers) > 0).all()
    np.testing.assert_array_equal(numbers, chosen(digests, share, size=7919))
    assert len(np.intersect1d(numbers, chosen(digests, share, seed=6))) < len(numbers)


def test_few_digests_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def counting(ranks: Array, copies: Array, *more: object) -> Array | None:
        nonlocal most
        most = max(most, len(ranks))
        return original(ranks, copies, *more)  # type: ignore[arg-type]

    original = sifting._take_first_texts
    monkeypatch.setattr(sifting, "_take_first_texts", counting)
    chosen(different(100_000), 0.005)
    assert most < 5000


def test_a_text_with_very_many_copies_stays_in_training() -> None:
    """Boilerplate that is a tenth of all documents would be most of validation."""
    digests = different(20_000)
    for seed in range(30):
        digests[np.random.default_rng(seed).permutation(20_000)[:2000]] = digests[seed]
        numbers = chosen(digests, 0.005, seed=seed)
        assert len(numbers) >= 90
        assert not (digests[numbers] == digests[seed]).any()


@settings(max_examples=40)
@given(st.lists(st.integers(0, 300), min_size=2, max_size=900), st.sampled_from([0.005, 0.05, 0.3]))
def test_copies_are_chosen_together_and_something_is_left(texts: list[int], share: float) -> None:
    digests = different(301)[np.array(texts)]
    numbers = chosen(digests, share)
    assert len(numbers) < len(digests)
    rest = np.delete(digests, numbers)
    assert not np.isin(digests[numbers], rest).any()
    assert (len(numbers) == 0) == (len(set(texts)) == 1)


def test_nothing_is_chosen_of_one_document_or_where_none_is_wanted() -> None:
    assert not len(chosen(different(1), 0.5))
    assert not len(chosen(different(100), 0))
