"""Examples of full sentences of one document after another, with separators, as RoBERTa has them."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import write_wiki
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run_main
from support.corpora import (
    LENGTHS,
    SEED,
    SHORT,
    Sizes,
    all_rows,
    corpus_of,
    document_sizes,
    first_of_each,
    group_words,
    varied,
)
from support.shards import interrupted_at, make, run, tree

from data_prep import shards, show, verify
from data_prep.arrow_files import read_shard
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import write_json
from data_prep.examples.pairs import join_documents, plan_joined
from data_prep.examples.parting import part_sentences
from data_prep.examples.sifting import choose_held_out
from data_prep.inspection.lookup import Wanted, find_example
from data_prep.readers import sources
from data_prep.seals import seal
from data_prep.shards import MANIFEST, Manifest, ShardSet
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import Corpus, hash_documents, read_corpus
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.model.masks import count_masked
from pretraining.objectives.declaration import Objective, configure_objective, objectives
from pretraining.objectives.mlm import MaskedSettings

SEPARATOR = 60_000  # of corpora whose pieces are their own positions
FULL = ("--pairs", "full-sentences")


class Packed(NamedTuple):
    """An example: the row of the document that it begins in, and its pieces."""

    row: int
    pieces: tuple[int, ...]


def pack_sentences(corpus: Corpus, rows: Array, room: int, separator: int) -> Iterator[Packed]:
    """Packs sentence after sentence as the paper says it, without any of the code under test."""
    pieces, ends, starts = corpus.pieces.tolist(), corpus.sentence_ends.tolist(), [0, *corpus.sentence_ends.tolist()]
    bounds = [0, *corpus.document_ends.tolist()]
    now, begun = list[int](), -1
    for row in rows.tolist():
        between = [separator] * bool(now)
        for sentence in range(bounds[row], bounds[row + 1]):
            rest = pieces[starts[sentence] : ends[sentence]]
            if len(now) + len(between) + len(rest) > room:
                if now:
                    yield Packed(begun, tuple(now))
                now, between = [], []
                while len(rest) > room:
                    yield Packed(row, tuple(rest[:room]))
                    rest = rest[room:]
            begun = begun if now else row
            now, between = [*now, *between, *rest], []
    if now:
        yield Packed(begun, tuple(now))


def plan(corpus: Corpus, rows: Array, length: int, short: float = 0.0, seed: int = SEED) -> list[Packed]:
    """Plans examples by the code under test."""
    joined = join_documents(corpus, rows, SEPARATOR)
    found = plan_joined(corpus, rows, joined, length, 0, seed, short)
    assert (found.partner == -1).all()
    assert (found.b_end == found.b_start).all()
    columns = zip(found.row.tolist(), found.a_start, found.a_end, strict=True)
    return [Packed(row, tuple(joined.pieces[start:end].tolist())) for row, start, end in columns]


@st.composite
def chosen_documents(draw: st.DrawFn) -> tuple[Sizes, Array]:
    """Draws documents, and some of their rows, of which the others are held out."""
    documents = draw(document_sizes())
    rows = [row for row in range(len(documents)) if draw(st.integers(0, 4))]
    return documents, np.array(rows, np.int64)


@settings(max_examples=60)
@given(chosen_documents(), LENGTHS)
def test_sentences_are_packed_as_the_paper_says(chosen: tuple[Sizes, Array], length: int) -> None:
    corpus, rows = corpus_of(chosen[0]), chosen[1]
    assert plan(corpus, rows, length) == [*pack_sentences(corpus, rows, length - 2, SEPARATOR)]


@settings(max_examples=60)
@given(chosen_documents(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_no_piece_is_lost_and_no_separator_is_at_an_end(
    chosen: tuple[Sizes, Array], length: int, short: float, seed: int
) -> None:
    corpus, rows = corpus_of(chosen[0]), chosen[1]
    found = plan(corpus, rows, length, short, seed)
    ends = np.append(corpus.sentence_ends, 0)[corpus.document_ends - 1]
    documents = [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    pieces = [piece for each in found for piece in each.pieces if piece != SEPARATOR]
    assert pieces == [piece for row in rows for piece in documents[row]]
    for each in found:
        assert 1 <= len(each.pieces) <= length - 2
        assert SEPARATOR not in (each.pieces[0], each.pieces[-1])
        assert each.pieces[0] in documents[each.row]
        separated = [number for number, piece in enumerate(each.pieces) if piece == SEPARATOR]
        assert all(each.pieces[number - 1] + 1 in ends for number in separated)


def test_an_example_has_the_stream_and_the_target_of_the_document_it_begins_in() -> None:
    """The other documents decide where it begins, and nothing else."""
    documents = varied(40)
    firsts = []
    for corpus in (corpus_of(documents), corpus_of(documents[20:], 20)):
        rows = all_rows(corpus)
        found = plan_joined(corpus, rows, join_documents(corpus, rows, SEPARATOR), 24, 3, SEED, 0.5)
        first = first_of_each(found.row)
        firsts.append(dict(zip((found.row[first] + corpus.first).tolist(), found.state[first].tolist(), strict=True)))
    whole, part = firsts
    both = whole.keys() & part.keys()
    assert len(both) > 15
    assert all(whole[document] == part[document] for document in both)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of length 64 of several parts, in which whole words are masked."""
    place = tmp_path_factory.mktemp("full")
    write_wiki(place / "wiki", documents=240, files=6)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "SMALLEST_BUNDLE", 4096)
        more = ("--lengths", "64", "--validation", "0.2", "--masking", "whole-word")
        run(place / "wiki", place / "data", *FULL, *more)
        with interrupted_at("examples-64"):
            run(place / "wiki", place / "stopped", *FULL, *more, code=130)
        run(place / "wiki", place / "stopped", *FULL, *more)
    assert tree(place / "stopped") == tree(place / "data")
    return place / "data"


def read_restored(folder: Path, chosen: ShardSet) -> Iterator[tuple[int, tuple[int, ...], set[int]]]:
    """Reads the examples of a set: their document, their pieces without masks, and the places of their masks."""
    for record in Manifest.read(folder).sets()[chosen]:
        for row in read_shard(folder / record.path).to_pylist():
            labels = {each["position"]: each["piece"] for each in row["masked"]}
            pieces = tuple(labels.get(place, piece) for place, piece in enumerate(row["pieces"]))
            assert (row["boundary"], row["random_next"]) == (len(pieces), False)
            yield row["document"], pieces, {*labels}


@pytest.mark.slow
@pytest.mark.parametrize("validation", [False, True])
def test_shards_have_the_documents_of_each_part_packed(validation: bool, data: Path) -> None:
    """Documents held out are packed among themselves; examples go beyond no part."""
    manifest, vocabulary = Manifest.read(data), load_vocabulary(data, False)
    files = [(record.path, record.rows) for record in manifest.kept]
    assert len(files) > 3
    firsts = np.cumsum([0, *(rows for _, rows in files)])
    corpora = [read_corpus(data / path, first) for (path, _), first in zip(files, firsts, strict=False)]
    digests = [hash_documents(one.pieces, one.sentence_ends, one.document_ends) for one in corpora]
    held_out = choose_held_out(lambda: digests, manifest.num_documents, 0.2, 12345)
    expected = Counter[tuple[int, tuple[int, ...]]]()
    for corpus in corpora:
        parted = part_sentences(corpus, vocabulary.marks, 62).corpus
        rows = all_rows(corpus)[np.isin(corpus.first + all_rows(corpus), held_out) == validation]
        for row, pieces in pack_sentences(parted, rows, 62, vocabulary.special.sep):
            expected[int(corpus.first) + row, (vocabulary.special.cls, *pieces, vocabulary.special.sep)] += 1
    found = Counter((document, pieces) for document, pieces, _ in read_restored(data, ShardSet(64, 0, validation)))
    assert found == expected
    assert any(vocabulary.special.sep in pieces[:-1] for _, pieces in found)


def test_masks_hide_whole_words_and_no_separator(data: Path) -> None:
    special, continues = load_vocabulary(data, False).special, load_vocabulary(data, False).continues
    for _, pieces, masks in read_restored(data, ShardSet(64, 1)):
        assert not {special.cls, special.sep} & {pieces[place] for place in masks}
        for word in group_words(pieces, {special.cls, special.sep}, continues):
            assert masks.issuperset(word) or not masks & set(word)
    run_main(verify.main, data)
    assert all(one.own == one.text for one in Manifest.read(data).figures)


def make_batch(folder: Path, length: int, objective: Objective) -> tuple[Any, Any]:
    """Makes a batch for training of the first examples; returns it with them."""
    dataset = Dataset(Corpora.one(folder), length, objective=objective)
    examples = dataset.first_examples(300)
    keys = np.arange(300).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return dataset.training_batch(examples, keys, 0.0), dataset.read(examples)


@pytest.mark.parametrize("length", [64, 24])
def test_dynamic_masks_choose_no_separator(length: int, data: Path) -> None:
    """Also where examples are cut."""
    special = load_vocabulary(data, False).special
    objective = configure_objective(MaskedSettings(name="mlm", masks="dynamic", rate=0.45))
    batch, rows = make_batch(data, length, objective)
    text = rows.restore_text()
    assert (text == special.sep).sum() > len(rows.lengths) + 10
    labels = text[batch.chosen.numpy()]
    assert labels.tolist() == batch.labels.tolist()
    assert not {special.cls, special.sep} & {*labels.tolist()}
    assert len(labels) == count_masked(rows.lengths, 0.45).sum()


def test_one_direction_predicts_the_separators(data: Path) -> None:
    """As the end of a text, which a model of one direction has to know."""
    special = load_vocabulary(data, False).special
    batch, rows = make_batch(data, 64, objectives()["ltr"])
    text = rows.restore_text()
    assert (batch.pieces.tolist(), len(batch.labels)) == (text.tolist(), (rows.lengths - 1).sum())
    assert (batch.labels.numpy() == special.sep).sum() == (text == special.sep).sum()


def test_a_rate_that_very_short_documents_cannot_have_is_refused(data: Path) -> None:
    manifest = Manifest.read(data)
    manifest = manifest.model_copy(update={"settings": manifest.settings.model_copy(update={"masking": "token"})})
    fits, beyond = (
        configure_objective(MaskedSettings(name="mlm", masks="dynamic", rate=rate, last_rate=last))
        for rate, last in ((0.49, 0.1), (0.3, 0.5))
    )
    assert not list(fits.data_faults(manifest))
    [fault] = beyond.data_faults(manifest)
    assert fault.startswith('objective.masks = "dynamic": a rate of 0.5, and up to half of an example of very short')
    alone = manifest.model_copy(update={"settings": manifest.settings.model_copy(update={"pairs": "none"})})
    assert not list(beyond.data_faults(alone))
    assert not list(objectives()["ltr"].data_faults(manifest))


def test_an_example_is_shown_with_its_documents(data: Path) -> None:
    for index in range(3):
        example, _ = find_example(Wanted(data, index=index))
        said = run_main(show.main, data, "--index", index)
        assert f"no B; document {example.document} wiki" in said


def test_a_version_that_does_not_know_them_refuses_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.0.0 read format 1 alone. An early folder of that number is read here, and other shards keep it."""
    other = make(tmp_path / "other", "--from", data, "--lengths", "64", "--duplicates", "1")
    assert (Manifest.read(data).format, Manifest.read(other).format) == (2, 1)
    content = {**json.loads((data / MANIFEST).read_text()), "format": 1}
    early = Path(shutil.copytree(data, tmp_path / "early"))
    seal(content)
    write_json(early / MANIFEST, content)
    assert verify.main([str(early)]) == 0
    monkeypatch.setattr(shards, "FORMATS", (1,))
    with pytest.raises(UserError, match=r"manifest\.json: of format 2; this version reads 1$"):
        Manifest.read(data)
