"""A sieve lets documents through as a filter after the other says, and tells of the others what can be relied on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.readers import sieve
from data_prep.readers.filters import make_filters
from data_prep.readers.reader import Document
from data_prep.readers.sieve import MOST_EXAMPLES, Sieve, add_up
from data_prep.settings import Settings
from data_prep.work import DocumentsRecord

FILTERS = make_filters(Settings(min_words=3, max_words=6))
SIZES = st.lists(st.integers(0, 9), max_size=80)


def documents_of(sizes: list[int]) -> list[Document]:
    """Makes documents of so many words; one of no words has no passage."""
    return [Document(str(n), "", ["word " * size] if size else []) for n, size in enumerate(sizes)]


def sifted(sizes: list[int], block: int = 1 << 20) -> tuple[list[Document], DocumentsRecord]:
    one = Sieve("task", FILTERS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sieve, "BLOCK", block)
        passed = list(one.sift(documents_of(sizes)))
    return passed, DocumentsRecord(files=[], source="", skipped=[], left_out=[], replaced=0, filtered=one.record())


@given(SIZES)
def test_those_that_pass_all_filters_stay_in_their_order(sizes: list[int]) -> None:
    passed, record = sifted(sizes)
    assert [document.id for document in passed] == [str(n) for n, size in enumerate(sizes) if 3 <= size <= 6]
    counts = {name: total.number for name, total in add_up([record]).items()}
    assert counts == {"min_words": sum(0 < size < 3 for size in sizes), "max_words": sum(size > 6 for size in sizes)}
    assert record.num_filtered == sum(counts.values())


@given(SIZES, st.integers(1, 60))
def test_how_many_are_asked_at_once_changes_nothing(sizes: list[int], block: int) -> None:
    assert sifted(sizes, block) == sifted(sizes)


@given(SIZES)
def test_examples_are_some_of_those_left_out(sizes: list[int]) -> None:
    total = add_up([sifted(sizes)[1]])["min_words"]
    left_out = [str(n) for n, size in enumerate(sizes) if 0 < size < 3]
    shown = [one.id for _, one in total.examples]
    assert len(shown) == min(MOST_EXAMPLES, len(left_out))
    assert shown == sorted(shown, key=int)
    assert set(shown) <= set(left_out)
    assert [one.figure for _, one in total.examples] == [str(sizes[int(name)]) for name in shown]


def test_examples_come_from_all_tasks_and_from_all_over_them() -> None:
    def task(name: str) -> DocumentsRecord:
        one = Sieve(name, FILTERS)
        assert not list(one.sift(documents_of([1] * 1000)))
        return DocumentsRecord(files=[], source=name, skipped=[], left_out=[], replaced=0, filtered=one.record())

    examples = add_up(task(str(n)) for n in range(4))["min_words"].examples
    assert len(examples) == MOST_EXAMPLES
    assert len({source for source, _ in examples}) >= 3
    assert [source for source, _ in examples] == sorted(source for source, _ in examples)
    numbers = [int(one.id) for _, one in examples]
    assert min(numbers) < 250
    assert max(numbers) > 750


def test_examples_are_cut_short() -> None:
    one = Sieve("task", FILTERS)
    assert not list(one.sift([Document("", "", ["x" * 150, "y" * 150]), Document("", "", ["z " * 1000])]))
    beginnings = {name: own.examples[0].beginning for name, own in one.record().items()}
    assert beginnings == {"min_words": "x" * 150 + " " + "y" * 49, "max_words": "z " * 100}
