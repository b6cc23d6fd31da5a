"""Near copies are those that comparing each document with each would find, and nothing else, whatever the machine."""

import csv
import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from support.corpora import draw_corpus, draw_document, exact, mark, write_tokens
from support.marks import slow

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.workers import open_workers
from data_prep.near_copies import candidates, signatures
from data_prep.near_copies.candidates import FEW, ComparedRecord
from data_prep.near_copies.finding import COMPARE, NEAR_COPIES, NEAR_STEPS
from data_prep.shards import NEAR_REPORT, WORK
from data_prep.work import WorkFolder

THRESHOLDS = (0.5, 0.65, 0.8, 0.9)


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    return draw_corpus(seed=3, originals=400, near=1000)


@pytest.fixture(scope="module")
def indices(documents: list[list[int]]) -> dict[int, float]:
    """Finds for each document how near the nearest earlier one is."""
    nearest: dict[int, float] = {}
    for later, _, index in exact(documents):
        nearest[later] = max(index, nearest.get(later, 0.0))
    return nearest


def compared(folder: Path) -> int:
    """Counts the pairs that were compared."""
    return sum(record.compared for _, _, record in WorkFolder(folder).journal(COMPARE.name, ComparedRecord).read())


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_near_copies_are_those_of_the_exact_answer(
    threshold: float, documents: list[list[int]], indices: dict[int, float], tmp_path: Path
) -> None:
    found = {*search(tmp_path, documents, threshold).tolist()}
    truth = {number for number, index in indices.items() if index >= threshold}
    assert found <= truth
    assert len(found) >= 0.95 * len(truth)
    assert 200 < len(truth) < 1500
    near = {number for number, index in indices.items() if threshold <= index < threshold + 0.05}
    assert len(near) >= 20, "pairs at the threshold are among them"


def search(folder: Path, documents: list[list[int]], threshold: float, per_file: int = 90) -> Array:
    return mark(folder, write_tokens(folder, documents, per_file), threshold)


@pytest.fixture(scope="module")
def expected(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Array:
    return search(tmp_path_factory.mktemp("expected"), documents, 0.7)


LIMITS = [slow(2, 2000, {}), slow(1, 19, {"KEYS": 500}), (1, 90, {"KEYS": 1000, "MOST_STRETCHES": 5, "PAIRS": 1})]


@pytest.mark.parametrize(("size", "per_file", "limits"), LIMITS, ids=str)
def test_workers_files_little_memory_and_few_stretches_change_nothing(
    size: int, per_file: int, limits: dict[str, int], documents: list[list[int]], expected: Array, tmp_path: Path
) -> None:
    places = {"KEYS": candidates, "MOST_STRETCHES": signatures, "PAIRS": candidates}
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in limits.items():
            patched.setattr(places[name], name, limit)
        with open_workers(size, preload="data_prep.near_copies.finding") as workers:
            tokens = write_tokens(tmp_path, documents, per_file)
            np.testing.assert_array_equal(mark(tmp_path, tokens, 0.7, workers), expected)


def test_documents_that_are_all_alike_are_compared_once_each(tmp_path: Path) -> None:
    """Comparing each with each would be twelve million comparisons."""
    stub = list(range(5, 35))
    found = search(tmp_path, [stub] * 5000, 0.8, 800)
    np.testing.assert_array_equal(found, np.arange(1, 5000))
    assert compared(tmp_path) == 4999
    sizes = [record.files[0].rows for record in WorkFolder(tmp_path).read_records(candidates.FIND_STEP)]
    assert sum(sizes) <= FEW * 13 * 5000


def test_a_document_that_goes_still_takes_others_with_it(tmp_path: Path) -> None:
    """The first and the last have little in common, but each is a near copy of the one before it."""
    chain = [list(range(5 + shift, 105 + shift)) for shift in range(0, 60, 5)]
    [(_, _, index)] = list(exact([chain[0], chain[-1]]))
    assert index < 0.3
    np.testing.assert_array_equal(search(tmp_path, chain, 0.8, 3), np.arange(1, len(chain)))


def test_who_has_just_the_threshold_is_a_near_copy(tmp_path: Path) -> None:
    documents = [list(range(first, first + 34)) for first in (5, 15)]
    assert [index for *_, index in exact(documents)] == [0.5]
    np.testing.assert_array_equal(search(tmp_path, documents, 0.5, 2), [1])


@pytest.mark.parametrize("short", [[5], [5, 6, 7, 8], [5, 6, 7, 8, 9], [445 - 1]])
def test_short_documents_are_near_copies_of_the_same_alone(short: list[int], tmp_path: Path) -> None:
    documents = [[6], short, [*short, 10], [7, 8], short]
    np.testing.assert_array_equal(search(tmp_path, documents, 0.6, 2), [4])


PLACES = (*(f"/{step}/" for step in NEAR_STEPS), "near-parts.arrow", Path(NEAR_COPIES).name, NEAR_REPORT)


def at_writing(place: str, then: Callable[[], None]) -> Callable[[int], None]:
    """Makes an os.fsync that does something in the midst of a step, or of a file that there is one of."""
    usual, seen = os.fsync, list[str]()
    last = 1 if place in ("/candidates/", *PLACES[len(NEAR_STEPS) :]) else 3

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if place in path.replace(".tmp", ""):
            seen.append(path)
            if len(seen) == last:
                then()
        usual(descriptor)

    return fsync


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", PLACES)
def test_a_search_goes_on_after_a_full_disk_and_a_kill(
    place: str, documents: list[list[int]], expected: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = write_tokens(tmp_path, documents, 90)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", at_writing(place, fill_disk))
        with pytest.raises(UserError, match=f"{place}.*: cannot be written: No space left on device"):
            mark(tmp_path, tokens, 0.7)
        patched.undo()
        patched.setattr(os, "fsync", at_writing(place, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        child = get_context("fork").Process(target=mark, args=(tmp_path, tokens, 0.7))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    np.testing.assert_array_equal(mark(tmp_path, tokens, 0.7), expected)


def test_near_copies_outlive_their_texts(documents: list[list[int]], expected: Array, tmp_path: Path) -> None:
    """Later steps delete token documents, and a run that goes on from there looks for nothing anew."""
    tokens = write_tokens(tmp_path, documents, 90)
    mark(tmp_path, tokens, 0.7)
    assert not any((tmp_path / WORK / step).exists() for step in NEAR_STEPS)
    shutil.rmtree(tmp_path / WORK / "tokens")
    np.testing.assert_array_equal(mark(tmp_path, tokens, 0.7), expected)


def test_the_report_shows_true_pairs_from_all_over(documents: list[list[int]], expected: Array, tmp_path: Path) -> None:
    search(tmp_path, documents, 0.7)
    with (tmp_path / NEAR_REPORT).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    for row in rows:
        later, earlier = int(row["id"]), int(row["earlier id"])
        [(_, _, index)] = list(exact([documents[earlier], documents[later]]))
        assert later in expected
        assert earlier < later
        assert float(row["jaccard"]) == round(index, 4) >= 0.7
        assert row["title"] == f"title {later}"
        assert row["source"] == row["earlier source"] == "made up"
    assert int(rows[0]["id"]) == expected[0]
    assert int(rows[-1]["id"]) > 0.9 * len(documents)


def test_where_nothing_is_near_nothing_goes(tmp_path: Path) -> None:
    draw = random.Random(3)
    different = [draw_document(draw, 80) for _ in range(100)]
    assert not search(tmp_path, different, 0.5, 30).size
    assert (tmp_path / NEAR_REPORT).read_text().count("\n") == 1
