"""What the shards hold: the promises that training relies on."""

import random
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import WORDS
from support.shards import make, read_examples, tree

from data_prep.arrow_files import map_batches, read_shard
from data_prep.shards import KEPT, Manifest, ShardSet

DOCUMENTS, LENGTH = 120, 48
ASKED = ["--format", "sentences", "--lengths", str(LENGTH), "128", "--duplicates", "2", "--vocab-size", "400"]
ASKED += ["--shard-size", "64KB"]


@pytest.fixture(scope="module")
def marked_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes documents whose sentences begin with the numbers of the document and the sentence: `d 3 s 14 …`."""
    draw, text = random.Random(5), ""
    for document in range(DOCUMENTS):
        for number in range(draw.randint(1, 30)):
            words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 12)))
            text += f"d {document} s {number} {words}.\n"
        text += "\n"
    path = tmp_path_factory.mktemp("marked") / "text.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def shards(marked_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("nsp") / "out", "--docs", marked_text, *ASKED, "--validation", "0.1")


@pytest.fixture(scope="module")
def unpaired(marked_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = ("--pairs", "none", "--validation", "0")
    return make(tmp_path_factory.mktemp("none") / "out", "--docs", marked_text, *ASKED, *more)


def marks(text: str) -> list[tuple[int, int]]:
    """Finds the sentences that begin in a text by their marks."""
    return [(int(document), int(number)) for document, number in re.findall(r"\bd (\d+) s (\d+)\b", text)]


def test_types_are_the_smallest_and_nothing_may_be_missing(shards: Path) -> None:
    schema = read_shard(shards / "length-48/duplicate-0/shard-00000.arrow").schema
    piece, position = pa.uint16(), pa.uint8()
    masked = pa.struct([pa.field("position", position, nullable=False), pa.field("piece", piece, nullable=False)])
    pieces, masks = (pa.list_(pa.field("item", item, nullable=False)) for item in (piece, masked))
    columns = {"pieces": pieces, "masked": masks, "boundary": position}
    columns |= {"random_next": pa.bool_(), "document": pa.uint8()}
    assert schema == pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def test_b_follows_a_or_comes_from_another_document(shards: Path) -> None:
    seen = Counter[bool]()
    for example in read_examples(shards, ShardSet(128, 0)):
        homes_a = {document for document, _ in marks(example["a"])}
        assert homes_a <= {example["document"]}
        homes_b = {document for document, _ in marks(example["b"])}
        if example["random_next"]:
            assert example["document"] not in homes_b
        else:
            assert homes_b <= {example["document"]}
            if homes_a and homes_b:
                assert marks(example["a"])[-1][1] < marks(example["b"])[0][1]
        seen[example["random_next"]] += 1
    assert min(seen.values()) > 0.25 * seen.total()


def test_no_document_held_out_is_seen_in_training(shards: Path) -> None:
    held_out = {example["document"] for example in read_examples(shards, ShardSet(48, 0, validation=True))}
    assert len(held_out) == Manifest.read(shards).corpus.validation_documents == 12
    for chosen in Manifest.read(shards).sets():
        for example in read_examples(shards, chosen):
            homes = {document for document, _ in marks(example["a"] + " " + example["b"])} | {example["document"]}
            assert homes <= held_out if chosen.validation else not homes & held_out


def test_every_sentence_is_used_exactly_once_in_each_set_without_pairs(unpaired: Path, marked_text: Path) -> None:
    written = Counter(marks(marked_text.read_text()))
    for chosen in Manifest.read(unpaired).sets():
        seen = Counter(mark for example in read_examples(unpaired, chosen) for mark in marks(example["a"]))
        assert seen == written
        assert all(example["b"] == "" and not example["random_next"] for example in read_examples(unpaired, chosen))


def test_the_order_is_shuffled_over_the_whole_corpus(unpaired: Path) -> None:
    for chosen in Manifest.read(unpaired).sets():
        order = np.array([example["document"] for example in read_examples(unpaired, chosen)])
        ranks = np.argsort(np.argsort(order, kind="stable"))
        assert abs(np.corrcoef(ranks, np.arange(len(order)))[0, 1]) < 4 / np.sqrt(len(order))
        assert np.mean(np.diff(order) == 0) < 0.06


def test_duplicates_are_masked_and_shuffled_anew(unpaired: Path) -> None:
    first, second = (list(read_examples(unpaired, ShardSet(48, duplicate))) for duplicate in (0, 1))
    assert sorted(example["a"] for example in first) == sorted(example["a"] for example in second)
    assert [example["a"] for example in first] != [example["a"] for example in second]
    positions = {example["a"]: [mask["position"] for mask in example["masked"]] for example in first}
    same = np.mean([positions[example["a"]] == [mask["position"] for mask in example["masked"]] for example in second])
    assert same < 0.2


def test_shards_have_about_the_size_asked_for(shards: Path) -> None:
    for records in Manifest.read(shards).sets().values():
        if len(records) > 2:
            assert all(0.7 * 64_000 < record.size < 1.4 * 64_000 for record in records)


def test_the_manifest_says_what_is_there(shards: Path) -> None:
    manifest = Manifest.read(shards)
    for number, chosen in enumerate(manifest.sets()):
        said, rows = manifest.figures[number], list(read_examples(shards, chosen))
        assert (said.examples, said.pieces) == (len(rows), sum(len(row["pieces"]) for row in rows))
        assert said.masked == sum(len(row["masked"]) for row in rows) == sum(said.split)
        assert said.random_next == sum(row["random_next"] for row in rows)
        sizes = Counter(len(row["pieces"]) for row in rows)
        assert {size: count for size, count in enumerate(said.histogram) if count} == sizes
    assert manifest.bytes == sum(record.size for record in manifest.files())
    assert {record.path: record.sha256 for record in manifest.files()}.items() <= tree(shards).items()
    assert (manifest.sources[0].name, manifest.corpus.documents) == ("text.txt", DOCUMENTS)


def test_the_table_of_documents_is_in_the_order_of_their_numbers(shards: Path) -> None:
    table = map_batches(shards / "documents.arrow").read_all().to_pylist()
    assert len(table) == DOCUMENTS
    offsets = [int(row["id"].partition(":")[2]) for row in table]
    assert offsets == sorted(offsets)
    assert {row["source"] for row in table} == {"text"}


@pytest.mark.slow
@pytest.mark.realdata
def test_a_stored_piece_takes_at_most_2_7_bytes(real_data: Path, tmp_path: Path) -> None:
    make(tmp_path / "out", "--docs", real_data / "wiki/AA", "--vocab", real_data / "vocab.txt", "--duplicates", "1")
    shutil.rmtree(tmp_path / "out" / KEPT)
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert size <= 2.7 * sum(figures.pieces for figures in Manifest.read(tmp_path / "out").figures)
