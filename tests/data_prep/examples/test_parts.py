"""The pools of which partners are drawn: any document is as likely as another, however many parts there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.original import CHANCE

from data_prep.common.arrays import Array
from data_prep.examples import parts as module
from data_prep.examples.pairs import find_ranked_document
from data_prep.examples.parts import HELD_OUT, Parts, Pool, read_parts, write_parts
from data_prep.examples.streams import begin_stream, draw_below

SEED = 7
drawn_below: Callable[[Array, int], int] = draw_below
start_stream: Callable[..., Array] = begin_stream
number_at: Callable[[Pool, int], int] = find_ranked_document


def make_parts(folder: Path, sizes: list[int], held_out: list[int]) -> Parts:
    write_parts(folder, [(f"tokens/{number}.arrow", size, 10 * size) for number, size in enumerate(sizes)])
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


@settings(deadline=None, max_examples=50)
@given(st.sets(st.integers(0, 99)), st.lists(st.integers(0, 40), min_size=3, max_size=9))
def test_every_document_has_one_rank(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int], sizes: list[int]
) -> None:
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
    for validation in (False, True):
        counts = np.zeros(42, np.int64)
        for seed in range(6000):
            pool = parts.pool(0, seed, validation=validation)
            state = start_stream(seed, 128, 0, 5)
            group = drawn_below(state, len(pool.firsts))
            counts[number_at(pool, pool.firsts[group] + drawn_below(state, pool.sizes[group]))] += 1
        allowed = np.isin(np.arange(42), held_out) == validation
        assert not counts[~allowed].any()
        assert stats.chisquare(counts[allowed]).pvalue > CHANCE


def test_numbers_beyond_32_bits(tmp_path: Path) -> None:
    """Ten terabytes have some five thousand million documents."""
    sizes = [40_000] * 140_000
    held_out = [5, 4_300_000_000, 5_599_999_999]
    parts = make_parts(tmp_path, sizes, held_out)
    assert parts.num_documents == 5_600_000_000
    pool = parts.pool(139_999, SEED, validation=False)
    drawn = [
        number_at(pool, pool.firsts[group] + drawn_below(state, pool.sizes[group]))
        for number in range(2000)
        for state in [start_stream(SEED, 128, 0, number)]
        for group in [drawn_below(state, len(pool.firsts))]
    ]
    assert max(drawn) > 2**32 > min(drawn)
    assert stats.kstest(np.unique(parts.find(np.array(drawn))) / len(sizes), "uniform").pvalue > CHANCE
    assert parts.validation_rows(139_999).tolist() == [39_999]
