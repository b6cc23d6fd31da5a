"""Examples of whole sentences, as many as fit; sentences that are longer than an example has room for are parted."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
from conftest import sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.corpora import (
    CHANCE,
    LENGTHS,
    ONE_PIECE_SENTENCES,
    SEED,
    SHORT,
    Sizes,
    all_rows,
    corpus_of,
    document_sizes,
    first_of_each,
    starts_of,
    varied,
)
from support.shards import run

from data_prep.arrow_files import read_shard
from data_prep.examples.pairs import plan_segments
from data_prep.examples.parting import part_sentences
from data_prep.shards import Manifest, ShardSet
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.tokens import Corpus


@settings(max_examples=60)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_without_pairs_nothing_of_a_document_is_lost(documents: Sizes, length: int, short: float, seed: int) -> None:
    corpus = corpus_of(documents)
    plan = plan_segments(corpus, all_rows(corpus), None, length, 0, seed, short)
    for row in all_rows(corpus):
        mine = plan.row == row
        parts = [range(*bounds) for bounds in zip(plan.a_start[mine], plan.a_end[mine], strict=True)]
        begin = sum(sum(document) for document in documents[:row])
        assert list(itertools.chain(*parts)) == list(range(begin, begin + sum(documents[row])))
        assert all(1 <= len(part) <= length - 2 for part in parts)
    assert (plan.partner == -1).all()
    assert (plan.b_end == plan.b_start).all()


@settings(max_examples=60)
@given(document_sizes(), LENGTHS, st.integers(0, 2**63 - 1))
def test_without_pairs_as_many_sentences_as_fit_make_an_example(documents: Sizes, length: int, seed: int) -> None:
    """A sentence is cut only where it is longer than the room, and what is left of it begins the next example."""
    corpus, room = corpus_of(documents), length - 2
    plan = plan_segments(corpus, all_rows(corpus), None, length, 0, seed, 0.0)
    starts, ends = starts_of(corpus.sentence_ends), corpus.sentence_ends
    for row, start, end in zip(plan.row, plan.a_start, plan.a_end, strict=True):
        if end not in ends:
            assert end - start == room
            assert np.searchsorted(starts, start, side="right") == np.searchsorted(starts, end, side="right")
        elif end != ends[corpus.document_ends[row] - 1]:
            assert ends[np.searchsorted(ends, end) + 1] - start > room


def test_without_pairs_short_targets_are_as_with_them() -> None:
    plan = plan_segments(corpus_of(ONE_PIECE_SENTENCES), np.arange(3000), None, 15, 0, SEED, 1.0)
    targets = (plan.a_end - plan.a_start)[first_of_each(plan.row)]
    assert (targets.min(), targets.max()) == (2, 13)
    assert stats.chisquare(np.bincount(targets - 2, minlength=12)).pvalue > CHANCE


def test_without_pairs_the_examples_of_a_document_depend_on_no_other() -> None:
    documents = varied(30)
    corpus = corpus_of(documents)
    together = plan_segments(corpus, all_rows(corpus), None, 32, 1, SEED, 0.5)
    alone = plan_segments(corpus_of(documents[20:], 20), np.array([5]), None, 32, 1, SEED, 0.5)
    mine = together.row == 25
    np.testing.assert_array_equal(alone.state, together.state[mine])
    before = sum(sum(document) for document in documents[:20])
    np.testing.assert_array_equal(alone.a_start + before, together.a_start[mine])
    np.testing.assert_array_equal(alone.a_end + before, together.a_end[mine])


PIECES = (*SPECIAL, "a", "b", "##c", ".", ")")
MARKS = WordPiece(PIECES, cased=False).marks


def corpus_with(text: str) -> Corpus:
    """Makes a corpus of one sentence."""
    pieces = np.array([PIECES.index(piece) for piece in text.split()], np.uint16)
    return corpus_of([[len(pieces)]])._replace(pieces=pieces)


def parts_of(text: str, room: int) -> list[str]:
    corpus = corpus_with(text)
    ends = part_sentences(corpus, MARKS, room).corpus.sentence_ends
    return [" ".join(text.split()[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@settings(max_examples=60)
@given(document_sizes(200), st.integers(5, 60), st.integers(0, 99))
def test_every_sentence_fits_and_no_piece_is_lost(documents: Sizes, room: int, seed: int) -> None:
    corpus = corpus_of(documents)
    pieces = np.random.default_rng(seed).choice(np.arange(5, 10), corpus.pieces.size, p=[0.4, 0.3, 0.2, 0.07, 0.03])
    parted = part_sentences(corpus._replace(pieces=pieces.astype(np.uint16)), MARKS, room)
    ends, sizes = parted.corpus.sentence_ends, np.diff(corpus.sentence_ends, prepend=0)
    assert (np.diff(ends, prepend=0) > 0).all()
    assert np.diff(ends, prepend=0).max() <= room
    assert set(corpus.sentence_ends) <= set(ends)
    np.testing.assert_array_equal(ends[parted.corpus.document_ends - 1], corpus.sentence_ends[corpus.document_ends - 1])
    fit = np.flatnonzero(sizes <= room)
    starts = corpus.sentence_ends - sizes
    assert not any(((ends > starts[one]) & (ends < corpus.sentence_ends[one])).any() for one in fit)
    assert parted.num_parted == (sizes > room).sum()


def test_a_sentence_is_parted_at_its_full_stops_and_else_before_words() -> None:
    one, closed = "a b a b a b a b .", "b a b a b a b . )"
    assert parts_of(f"{one} {closed} {one}", 20) == [one, closed, one]
    words = parts_of("a ##c b " * 30, 40)
    assert max(len(part.split()) for part in words) <= 25
    assert all(part.startswith(("a", "b")) for part in words)


def kept(folder: Path, length: int) -> float:
    """Which share of the text the shards have as segment A, or as a B that follows it."""
    manifest, own = Manifest.read(folder), 0
    for shards in manifest.files():
        if not shards.path.startswith(f"length-{length}/"):
            continue
        batch = read_shard(folder / shards.path)
        sizes, boundary = np.diff(np.asarray(batch["pieces"].offsets)), np.asarray(batch["boundary"]).astype(int)
        follows = ~np.asarray(batch["random_next"].to_numpy(zero_copy_only=False))
        own += (boundary - 2).sum() + (sizes - boundary - 1)[follows].sum()
    return float(own / manifest.corpus.pieces)


def make(folder: Path, texts: list[str], pieces: int = 2000) -> tuple[Path, str]:
    """Makes shards of texts; returns their folder and what was said."""
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = folder.parent / f"{folder.name}-shards"
    return out, run(folder, out, "--lengths", "128", "--duplicates", "1", "--vocab-size", pieces)


def test_marks_without_a_partner_lose_no_text(tmp_path: Path) -> None:
    draw = random.Random(0)
    articles = [[" ".join(sentence(draw) for _ in range(6)) for _ in range(8)] for _ in range(60)]
    for paragraphs in articles:
        paragraphs[0], paragraphs[-1] = f'It is 6" wide. {paragraphs[0]}', f'{paragraphs[-1]} It is 12" long.'
    lined, _ = make(tmp_path / "lined", ["\n".join(paragraphs) for paragraphs in articles])
    flat, said = make(tmp_path / "flat", [" ".join(paragraphs) for paragraphs in articles])
    assert kept(flat, 128) > kept(lined, 128) - 0.005
    assert "sentences longer than an example lose" not in said
    figures = next(one for one in Manifest.read(flat).figures if one.set == ShardSet(128, 0))
    assert abs(figures.own / figures.text - kept(flat, 128)) < 0.02


def test_text_without_full_stops_is_parted_and_warned_of(tmp_path: Path) -> None:
    draw = random.Random(1)
    texts = [" ".join(sentence(draw).rstrip(".!?") for _ in range(100)) for _ in range(30)]
    out, said = make(tmp_path / "bare", texts, pieces=150)
    assert kept(out, 128) > 0.8
    assert "sentences longer than an example lose" in said
