"""Copies that are left out, sources that are limited or repeated, and passages held out where documents are few."""

import itertools
import math
import random
from collections import Counter, defaultdict
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import sentence
from hypothesis import example, given
from hypothesis import strategies as st
from support.commands import run_main
from support.corpora import SEED, all_rows, corpus_of, pool_of
from support.shards import SHORT, draw_text, make, read_examples, run, tell, tree, write_rows, write_sources

from data_prep import verify
from data_prep.arrow_files import map_batches
from data_prep.common.errors import UserError
from data_prep.examples import sifting
from data_prep.examples.pairs import plan_segments
from data_prep.examples.sifting import GROUP, choose_passages, compute_shares, draw_times, mark_copies
from data_prep.shards import DOCUMENTS, MANIFEST, WORK, Manifest


def ids(folder: Path) -> list[str]:
    return [row["id"] for row in map_batches(folder / "documents.arrow").read_all().to_pylist()]


# Copies


def test_copies_are_left_out_and_counted(tmp_path: Path) -> None:
    draw, out = random.Random(1), tmp_path / "out"
    different = [draw_text(draw, 8) for _ in range(90)]
    both = different + different[::3]
    order = list(range(120))
    draw.shuffle(order)
    docs = write_rows(tmp_path / "x.jsonl", [both[number] for number in order])
    said = " ".join(run(docs, out, "--drop-copies").split())
    assert "copies 30 left out, as an earlier document has" in said
    corpus = Manifest.read(out).corpus
    assert (corpus.documents, corpus.copies) == (90, 30)
    first = {both[number]: str(place) for place, number in reversed(list(enumerate(order)))}
    assert ids(out) == sorted(first.values(), key=int)
    run_main(verify.main, out)


@pytest.mark.parametrize(("bucket", "rows"), [(16 * 50, 300), (16 * 1000, 64), (1 << 27, 100), (1 << 27, 1 << 20)])
def test_copies_need_little_memory(bucket: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sifting, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(sifting, "ROWS", rows)
    digests = np.random.default_rng(1).integers(0, 2**64, 2000, np.uint64)[
        np.random.default_rng(2).integers(0, 2000, 3000)
    ]
    (tmp_path / WORK).mkdir()
    mark_copies(tmp_path, lambda: (digests[at : at + 70] for at in range(0, 3000, 70)), 3000)
    _, firsts = np.unique(digests, return_index=True)
    marked = np.fromfile(tmp_path / sifting.COPIES, np.uint8)
    np.testing.assert_array_equal(np.flatnonzero(marked == 0), np.sort(firsts))


# Shares of sources


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10**9), min_size=1),
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 0.99)),
)
def test_no_source_has_more_than_its_share_of_what_stays(pieces: dict[str, int], limits: dict[str, float]) -> None:
    limits = {name: limit for name, limit in limits.items() if name in pieces}
    try:
        shares = compute_shares(pieces, limits)
    except UserError:
        assert sum(limits.values()) <= 1 + 1e-9
        assert limits.keys() == pieces.keys()
        return
    total = sum(pieces[name] * shares[name] for name in pieces)
    for name, share in shares.items():
        assert 0 < share <= 1
        part = pieces[name] * share / total
        assert part <= limits.get(name, 1) * (1 + 1e-6)
        assert share == 1 or part >= limits[name] * (1 - 1e-6)


def test_a_source_is_limited_to_its_share(tmp_path: Path) -> None:
    draw, out = random.Random(2), tmp_path / "out"
    for name, size in (("large", 600), ("small", 200)):
        write_rows(tmp_path / name / "x.jsonl", [draw_text(draw, 6) for _ in range(size)])
    docs = ["--docs", tmp_path / "large", tmp_path / "small"]
    assert "large at most 50%" in tell(out, *docs, *SHORT, "--max-share", "large=0.5")
    corpus = Manifest.read(out).corpus
    assert corpus.documents_by_source["small"] == 200
    assert 160 < corpus.documents_by_source["large"] < 240
    assert corpus.over_share == 600 - corpus.documents_by_source["large"]


# Passages


@example(48, 1000, 0.2)  # 9.6 documents to hold out are ten
@given(st.integers(1, 3000), st.integers(0, 10**7), st.sampled_from([0.0, 0.001, 0.005, 0.02, 0.2]))
def test_passages_lie_apart_and_are_a_small_share(documents: int, sentences: int, share: float) -> None:
    passages = choose_passages(documents, sentences, share, seed=3)
    if not share or documents >= 200 or round(documents * share) >= 10 or sentences * max(share, 0.05) < 200:
        assert not passages
        return
    assert len(passages) >= 10
    assert sum(size for _, size in passages) <= max(share, 0.05) * sentences
    assert all(size >= 20 for _, size in passages)
    assert all(first + 2 * size <= then for (first, size), (then, _) in itertools.pairwise(passages))
    assert passages[-1][0] + passages[-1][1] <= sentences


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes six books, whose sentences begin with the numbers of the book and the sentence."""
    folder, draw = tmp_path_factory.mktemp("text") / "books", random.Random(4)
    folder.mkdir()
    for book, size in enumerate((300, 4100, 900, 1500, 700, 1200)):
        lines = (f"b{book} s{number} {sentence(draw)}" for number in range(size))
        (folder / f"{book}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def prepared(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    run(books, out, "--format", "sentences")
    return out


def words_of(folder: Path) -> dict[bool, list[tuple[list[str], list[str], bool]]]:
    """Lists the words of A and of B of all examples, for training and for validation, as they were before masking."""
    found = defaultdict(list)
    for chosen in Manifest.read(folder).sets():
        for row in read_examples(folder, chosen):
            found[chosen.validation].append((row["a"].split(), row["b"].split(), row["random_next"]))
    return found


def test_the_partner_is_of_another_book(prepared: Path) -> None:
    """Each book is the partner of every other, and of itself only where ten draws found no other."""
    found = words_of(prepared)
    for kind, examples in found.items():
        own: Counter[bool] = Counter()
        for a, b, random_next in examples:
            homes = [{word for word in part if word[0] == "b" and word[1:].isdigit()} for part in (a, b)]
            if random_next and all(homes):
                own[bool(homes[0] & homes[1])] += 1
        assert own[True] <= (0.002 if not kind else 0.05) * own.total()


def test_no_sentence_of_a_passage_is_in_training(prepared: Path) -> None:
    marks = {}
    for kind, examples in words_of(prepared).items():
        marks[kind] = {
            (first, second)
            for a, b, _ in examples
            for part in (a, b)
            for first, second in itertools.pairwise(part[:-1])  # the last may be cut
            if first[0] == "b" and second[0] == "s" and first[1:].isdigit() and second[1:].isdigit()
        }
    assert len(marks[True]) > 100
    assert not marks[True] & marks[False]
    assert len({book for book, _ in marks[True]}) >= 3
    corpus = Manifest.read(prepared).corpus
    assert (corpus.documents, corpus.validation_documents) == (6, 10)
    assert len(ids(prepared)) == (corpus.passages or 0) > 16
    run_main(verify.main, prepared)


def write_books(folder: Path, books: int, copied: int, sentences: int) -> Path:
    """Writes long books into a folder, and copies of the first of them into another one."""
    draw = random.Random(6)
    for number in range(books):
        text = "\n".join(f"b{number} {sentence(draw)}" for _ in range(sentences))
        for name in ("x", "y") if number < copied else ("x",):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / f"{number}.txt").write_text(text)
    return folder


def test_no_passage_is_of_a_text_that_has_a_copy(tmp_path: Path) -> None:
    tell(tmp_path / "out", "--docs", write_books(tmp_path / "docs", 6, 4, 900), *SHORT, "--format", "sentences")
    held_out = words_of(tmp_path / "out")[True]
    books = {word for a, b, _ in held_out for word in (*a, *b) if word[0] == "b" and word[1:].isdigit()}
    assert books
    assert books <= {"b4", "b5"}


def test_where_all_books_have_copies_it_is_said_what_helps(books: Path, tmp_path: Path) -> None:
    docs = write_books(tmp_path / "docs", 3, 3, 1400)
    said = tell(tmp_path / "out", "--docs", docs, *SHORT, "--format", "sentences")
    assert "all long ones have copies; use more text or --drop-copies" in said
    alone = books / "1.txt"  # also one book alone has validation
    for number, (text, words) in enumerate({docs: ["--drop-copies"], alone: []}.items()):
        out = make(tmp_path / str(number), "--docs", text, *SHORT, "--format", "sentences", *words)
        assert Manifest.read(out).corpus.validation_documents == 10


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words that name two texts, and settings."""
    return ["--docs", *write_sources(tmp_path_factory.mktemp("texts")), *SHORT, "--validation", "0.1"]


def rows(folder: Path) -> list[tuple[str, str]]:
    """Lists source and id of every row of the table of documents."""
    table = map_batches(folder / DOCUMENTS).read_all()
    return list(zip(table["source"].to_pylist(), table["id"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def once(docs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("once") / "out", *docs)


@pytest.mark.slow
def test_documents_are_repeated_and_those_held_out_there_once(docs: list[str], once: Path, tmp_path: Path) -> None:
    """Of a weight of 2.5, half of the documents are there three times; of 0.5, half of them are left out."""
    words = ["--weight", "more=2.5", "--weight", "wiki=0.5"]
    weighed = make(tmp_path / "weighed", *docs, *words)
    runs = [(row, len(list(group))) for row, group in groupby(rows(weighed))]
    assert len({row for row, _ in runs}) == len(runs)  # the rows of a document follow each other
    assert {row for row, _ in runs} <= {*rows(once)}
    counts = Counter((source, times) for (source, _), times in runs)
    assert {source: {times for name, times in counts if name == source} for source in ("wiki", "more")} == {
        "wiki": {1},
        "more": {1, 2, 3},
    }
    corpus = Manifest.read(weighed).corpus
    before = Manifest.read(once).corpus
    assert (corpus.documents, corpus.validation_documents) == (before.documents, before.validation_documents)
    assert corpus.weighed == len(rows(weighed))
    held_out = counts["more", 1]
    assert counts["more", 3] == math.floor(0.5 * (90 - held_out) + 0.5)
    wiki_held_out = before.validation_documents - held_out
    assert counts["wiki", 1] - wiki_held_out == math.floor(0.5 * (150 - wiki_held_out) + 0.5)
    figures = {one.set: one for one in Manifest.read(weighed).figures}
    same = {one.set: one for one in Manifest.read(once).figures}
    validation = next(one for one in figures if one.validation)
    assert figures[validation].text == same[validation].text  # what is held out is the same, and there once
    assert Manifest.read(weighed).settings.weight == {"more": 2.5, "wiki": 0.5}
    assert tree(make(tmp_path / "two", *docs, *words, "--workers", "2")) == tree(weighed)


def test_a_weight_of_one_changes_nothing(docs: list[str], once: Path, tmp_path: Path) -> None:
    weighed, plain = tree(make(tmp_path / "weighed", *docs, "--weight", "more=1")), tree(once)
    assert {name for name in plain if plain[name] != weighed.get(name)} == {MANIFEST}


@pytest.mark.parametrize(("weight", "left"), [("3.7", 74), ("0.125", 3)])
def test_just_the_share_that_is_asked_for_is_there_whatever_the_seed(tmp_path: Path, weight: str, left: int) -> None:
    """A half is rounded up."""
    words = " ".join(f"word{number}" for number in range(20)).split()
    docs = write_rows(tmp_path / "a.jsonl", [" ".join(words[: 2 + number]) + "." for number in range(20)])
    found = []
    for seed in (1, 2):
        asked = ["--docs", docs, *SHORT, "--validation", "0", "--weight", f"a={weight}", "--seed", seed]
        found.append(Counter(rows(make(tmp_path / str(seed), *asked))))
    assert [one.total() for one in found] == [left] * 2
    assert all(times - int(float(weight)) in (0, 1) for one in found for times in one.values())
    assert len({tuple(sorted(one.items())) for one in found}) > 1


@given(
    st.integers(1, 3 * GROUP), st.floats(0.01, 4), st.integers(0, 99), st.lists(st.integers(0, 3 * GROUP), max_size=5)
)
def test_files_do_not_change_what_is_drawn(total: int, weight: float, seed: int, ends: list[int]) -> None:
    whole = draw_times(seed, weight, 0, total, total)
    assert whole.sum() == math.floor(total * weight + 0.5)
    assert set(whole.tolist()) <= {int(weight), int(weight) + 1}
    bounds = [0, *sorted(end for end in ends if end < total), total]
    parts = [draw_times(seed, weight, start, total, end - start) for start, end in pairwise(bounds)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_what_takes_turns_in_the_order_is_drawn_alike() -> None:
    """Where documents of two topics take turns, half of the documents have half of either."""
    drawn = draw_times(7, 0.5, 0, 40_000, 40_000)
    assert [abs(int(drawn[start::2].sum()) - 10_000) < 300 for start in (0, 1)] == [True, True]


def test_weights_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One sentence. And another one.\n")
    said = tell(tmp_path / "out", "--docs", tmp_path / "one.txt", *SHORT, "--weight", "one=0.000001", code=2)
    assert "--weight: leaves no document for training; take larger weights" in said


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 50))
def test_the_rows_of_a_document_are_never_partners(times: list[int], duplicate: int) -> None:
    """However much of the corpus they are, as long as there is another document; one that is there once may be its own
    partner after ten draws, as in the original."""
    corpus = corpus_of([[3, 4, 3]] * sum(times))._replace(books=np.repeat(np.arange(len(times)), times))
    plan = plan_segments(corpus, all_rows(corpus), pool_of(corpus), 16, duplicate, SEED, 0.0)
    drawn = plan.partner >= 0
    repeated = np.repeat(times, times)[plan.row[drawn]] > 1
    same = corpus.books[plan.row[drawn]] == corpus.books[plan.partner[drawn]]
    assert not (same & repeated).any()
