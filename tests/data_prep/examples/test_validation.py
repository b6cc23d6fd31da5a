"""The choice of documents for validation by their digests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.common.arrays import Array
from data_prep.examples import validation
from data_prep.examples.validation import choose_held_out


def in_parts(digests: Array, size: int) -> Iterator[Array]:
    for at in range(0, len(digests), size):
        yield digests[at : at + size]


def chosen(digests: Array, share: float, size: int = 1000, seed: int = 5) -> Array:
    return choose_held_out(lambda: in_parts(digests, size), len(digests), share, seed)


def different(count: int) -> Array:
    return np.random.default_rng(3).integers(0, 2**64, count, np.uint64)


@pytest.mark.parametrize("count", [200, 5000, 300_000])
@pytest.mark.parametrize("share", [0.005, 0.1, 0.9])
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

    original = validation._first_texts
    monkeypatch.setattr(validation, "_first_texts", counting)
    chosen(different(500_000), 0.005)
    assert most < 5000


def test_a_text_with_very_many_copies_stays_in_training() -> None:
    """Boilerplate that is a tenth of all documents would be most of validation."""
    digests = different(20_000)
    for seed in range(30):
        digests[np.random.default_rng(seed).permutation(20_000)[:2000]] = digests[seed]
        numbers = chosen(digests, 0.005, seed=seed)
        assert len(numbers) >= 90
        assert not (digests[numbers] == digests[seed]).any()


@settings(deadline=None, max_examples=60)
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
