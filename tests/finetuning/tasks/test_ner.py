"""NER: every kind of file and fault, windows in which every word is tagged once, with context around it, and scores by
entity."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refusal
from support.tasks import CUTTER, encode, spell

from finetuning.files.tag_files import Fields
from finetuning.inputs import Ragged
from finetuning.settings import FineTuning, Tags
from finetuning.tasks.ner import SplitWords, TaggedWords, Tagging, open_ner, open_tags, to_iob2
from finetuning.tasks.task import Setup, Task

SETUP = Setup(CUTTER, FineTuning())
ORIGINAL = """\
-DOCSTART- -X- -X- O

EU NNP B-NP I-ORG
rejects VBZ B-VP O
German JJ B-NP I-MISC
call NN I-NP O

Bonn NNP B-NP I-LOC
Berlin NNP I-NP B-LOC
. . O O

-DOCSTART- -X- O O

Blackburn NNP B-NP I-PER
"""
"""As eng.train is: IOB1, where B- only parts an entity from another of its type."""
WORDS = "EU rejects German call Bonn Berlin . Blackburn".split()
TAGS = "B-ORG O B-MISC O B-LOC B-LOC O B-PER".split()


def write_ner(folder: Path, train: str = ORIGINAL, dev: str = ORIGINAL, **others: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in {"train.txt": train, "dev.txt": dev, **others}.items():
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    return folder


def opened(folder: Path, length: int = 128, document_context: bool = False) -> Tagging:
    task = open_ner(folder, Setup(CUTTER, FineTuning(length=length, tags=Tags(document_context=document_context))))
    assert isinstance(task, Tagging)
    return task


def tags_of(task: Task, items: Any) -> list[str]:
    return [task.head.labels[number] for number in encode(items).labels.values]


def logits(task: Task, tags: Sequence[str]) -> Ragged:
    """Outputs that say these tags, as if of one item."""
    numbers = [task.head.labels.index(tag) for tag in tags]
    return Ragged(np.eye(len(task.head.labels), dtype=np.float32)[numbers], np.array([len(tags)]))


def keep_two_columns(text: str) -> str:
    return "".join(f"{line.split(' ')[0]} {line.split(' ')[-1]}" for line in text.splitlines(True))


CHANGES: dict[str, Callable[[str], str]] = {
    "none": str,
    "BOM": lambda text: "\ufeff" + text,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "tabs": lambda text: text.replace(" ", "\t"),
    "blank lines": lambda text: text.replace("\n\n", "\n \t\n\n"),
    "no last end": lambda text: text.removesuffix("\n"),
    "two blanks": lambda text: text.replace(" ", "  "),
    "two columns": keep_two_columns,
}


@pytest.mark.parametrize("change", CHANGES)
def test_columns_in_all_their_forms_are_read_as_iob2(tmp_path: Path, change: str) -> None:
    task = opened(write_ner(tmp_path, train=CHANGES[change](ORIGINAL)))
    types = ("LOC", "MISC", "ORG", "PER")
    train: Any = task.train
    assert task.head.labels == ("O", *(f"{mark}-{name}" for name in types for mark in "BI"))
    assert (train.words.texts, train.words.document_ends.tolist()) == (WORDS, [7, 8])
    assert (tags_of(task, train), len(train)) == (TAGS, 3)


def test_iob2_stays_and_its_faults_are_mended(tmp_path: Path) -> None:
    """Marks of last and only words become IOB2."""
    task = opened(write_ner(tmp_path, "A B-PER\nb I-PER\n\nC B-LOC\n", dev="A B-PER\n\nc O\nb I-PER\n"))
    assert tags_of(task, task.train) == ["B-PER", "I-PER", "B-LOC"]
    assert tags_of(task, task.dev["dev"]) == ["B-PER", "O", "B-PER"]
    found = to_iob2("S-A B-A I-A E-A U-B B-B L-B O I-B I-A I-A B-A O I-A".split())
    assert found == "B-A B-A I-A I-A B-B B-B I-B O B-B B-A I-A B-A O B-A".split() == to_iob2(found)


FAULTS_OF_COLUMNS = [
    ("", "train.txt: the file is empty"),
    ("-DOCSTART- -X- O O\n\n", "train.txt: no sentence"),
    ("a NN B-NP O\nb NN O\n", "train.txt:2: 3 columns; the first word has 4"),
    ("a\tO\nb\t\n", "train.txt:2: 1 columns; the first word has 2"),
    ("a\n\nb\n", "train.txt:1: one column alone"),
    ("a B-PER\nb PER\n", "train.txt:2: tag 'PER'; there should be O, or B-"),
    ("a O\nM\udcfcnchen B-LOC\n", "train.txt:2: not UTF-8"),
    ("a B-PER\n", "dev.txt:3: tag 'B-ORG' is not in the training split"),
]


@pytest.mark.parametrize(("train", "message"), FAULTS_OF_COLUMNS)
def test_faults_of_columns_name_the_line(tmp_path: Path, train: str, message: str) -> None:
    assert message in refusal(opened, write_ner(tmp_path, train))


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    (write_ner(tmp_path) / "dev.txt").unlink()
    assert "the dev split is missing: neither valid.txt nor dev.txt nor eng.testa" in refusal(opened, tmp_path)


def test_the_test_split_is_scored_where_it_is_tagged_and_dev_decides(tmp_path: Path) -> None:
    task = opened(write_ner(tmp_path, **{"eng.testb": ORIGINAL}))
    assert (list(task.dev), list(task.test)) == (["dev", "test"], [])
    task = opened(write_ner(tmp_path, **{"eng.testb": "EU\nrejects\n"}))
    assert (list(task.dev), list(task.test)) == (["dev"], ["test"])
    task.write_predictions("test", logits(task, ["B-ORG", "O"]), tmp_path)
    assert (tmp_path / "predictions_test.txt").read_text() == "EU B-ORG\nrejects O\n\n"


CLASSES = {"names": "O B-LOC B-MISC B-ORG B-PER I-LOC I-MISC I-ORG I-PER".split(), "_type": "ClassLabel"}
ROWS = [WORDS[:4], WORDS[4:7], WORDS[7:]]


def open_parquet(folder: Path, tags: list[list[Any]], feature: Any = None) -> Tagging:
    table = pa.table({"id": list("012"), "tokens": ROWS, "pos_tags": [[0]] * 3, "ner_tags": tags})
    if feature:
        info = {"info": {"features": {"tokens": {"feature": {"dtype": "string"}}, "ner_tags": feature}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
    for name in ("train", "validation"):
        pq.write_table(table, folder / f"{name}-00000-of-00001.parquet")
    return opened(folder)


HUB_TAGS: list[tuple[list[list[Any]], Any]] = [
    ([[3, 0, 2, 0], [1, 1, 0], [4]], {"feature": CLASSES, "_type": "Sequence"}),
    ([[3, 0, 2, 0], [1, 1, 0], [4]], {"feature": CLASSES, "_type": "List"}),
    ([[3, 0, 2, 0], [1, 1, 0], [4]], [CLASSES]),
    ([[3, 0, 7, 0], [5, 5, 0], [1]], None),
    ([TAGS[:4], TAGS[4:7], TAGS[7:]], None),
]


@pytest.mark.parametrize(("tags", "feature"), HUB_TAGS)
def test_parquet_of_the_hub_says_what_its_numbers_mean_or_has_its_order(
    tmp_path: Path, tags: list[list[Any]], feature: Any
) -> None:
    task = open_parquet(tmp_path, tags, feature)
    assert tags_of(task, task.train) == TAGS


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_without_documents_says_so_where_they_matter(tmp_path: Path) -> None:
    task = opened(write_ner(tmp_path, "a B-X\n", dev="a B-X\n"), document_context=True)
    assert [note.split(" no -DOC")[0] for note in task.notes[1:]] == [f"{tmp_path}/train.txt:", f"{tmp_path}/dev.txt:"]
    assert not opened(write_ner(tmp_path), document_context=True).notes[1:]


def test_own_tags_from_json_lines_are_scored_word_by_word(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"text": ["a", "b"], "pos": ["DET", "NOUN"]}, {"text": ["b"], "pos": ["X"]})
    task = open_tags("pos", {"train": [path], "dev": [path]}, SETUP, Fields("text", ("pos",)))
    assert (task.head.labels, task.metric) == (("DET", "NOUN", "X"), "accuracy")
    assert task.score("dev", logits(task, ["DET", "X", "X"])) == {"accuracy": pytest.approx(2 / 3)}


def test_blanks_within_tags_part_no_columns_of_predictions(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"tokens": ["a", "b"], "tags": ["B-Work of Art", "I-Work of Art"]})
    task = open_tags("own", {"train": [path], "dev": [path]}, SETUP, Fields())
    task.write_predictions("dev", logits(task, ["B-Work of Art", "O"]), tmp_path)
    assert (tmp_path / "predictions_dev.txt").read_text() == "a B-Work_of_Art B-Work_of_Art\nb I-Work_of_Art O\n\n"


FAULTS_OF_ROWS: list[tuple[Any, str]] = [
    ({"tokens": ["a"], "tags": ["O", "O"]}, "there should be a list of 1 tags"),
    ({"tokens": "a b", "tags": ["O", "O"]}, "'tokens' should be a list of words"),
    ({"tokens": [], "tags": []}, "'tokens' should be a list of words"),
    ({"words": ["a"], "tags": ["O"]}, "'tokens' should be a list of words"),
    ({"tokens": ["a"]}, "no field ner_tags or tags"),
    ({"tokens": ["a"], "tags": [None]}, "tag None"),
    (["a"], "a JSON list"),
]


@pytest.mark.parametrize(("row", "message"), FAULTS_OF_ROWS)
def test_faults_of_rows_name_the_line(tmp_path: Path, row: Any, message: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"tokens": ["a"], "tags": ["B-X"]}, row)
    assert f"{path}:2: {message}" in refusal(open_tags, "own", {"train": [path], "dev": [path]}, SETUP, Fields())


def test_a_number_that_names_no_tag_is_refused(tmp_path: Path) -> None:
    said = refusal(open_parquet, tmp_path, [[3, 0, 7, 0], [5, 9, 0], [1]])
    assert "row 2: tag 9; there should be a text or a number below 9" in said


TAG = st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"])


def list_entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Begin, end and type of each entity, in a pass over the words, as conlleval.pl reads them."""
    found, begin, before = set(), 0, "O"
    for place, tag in enumerate([*tags, "O"]):
        if before != "O" and (tag[0] in "BO" or before[2:] != tag[2:]):
            found.add((begin, place, before[2:]))
            before = "O"
        if before == "O":
            begin = place
        before = tag
    return found


@settings(max_examples=50)
@given(st.lists(st.tuples(TAG, TAG), min_size=1, max_size=16), st.sets(st.integers(1, 15)))
def test_scores_are_those_of_conlleval(tmp_path_factory: pytest.TempPathFactory, pairs: Any, cuts: set[int]) -> None:
    """Of sentences cut anywhere; predictions may have any faults of order."""
    gold, guess = to_iob2([tag for tag, _ in pairs]), [tag for _, tag in pairs]
    cuts = {cut for cut in cuts if cut < len(pairs)}
    dev = "".join("\n" * (number in cuts) + f"a {tag}\n" for number, tag in enumerate(gold))
    task = opened(write_ner(tmp_path_factory.mktemp("ner"), "a B-A\na B-B\n\n", dev))
    places = [0, *sorted(cuts), len(pairs)]
    pairs = [(list_entities(gold[a:b]), list_entities(guess[a:b])) for a, b in itertools.pairwise(places)]
    right, true, found = (sum(map(len, each)) for each in zip(*((g & s, g, s) for g, s in pairs), strict=True))
    scores = task.score("dev", logits(task, guess))
    assert scores["precision"] == pytest.approx(right / found if found else 0)
    assert scores["recall"] == pytest.approx(right / true if true else 0)
    assert scores["f1"] == pytest.approx(2 * right / (found + true) if right else 0)


def test_scores_by_hand(tmp_path: Path) -> None:
    """Of four entities two are found, with a third that is none: the type and both ends count."""
    task = opened(write_ner(tmp_path))
    guess = logits(task, "B-ORG O B-PER O B-LOC I-LOC O I-PER".split())
    scores = task.score("dev", guess)
    assert [scores[name] for name in ("precision", "recall", "accuracy")] == pytest.approx([2 / 4, 2 / 5, 5 / 8])
    assert [scores[f"f1_{name}"] for name in ("ORG", "LOC", "PER")] == pytest.approx([1, 0, 2 / 3])
    task.write_predictions("dev", guess, tmp_path)
    lines = (tmp_path / "predictions_dev.txt").read_text().split("\n")
    assert lines[4:7] == ["", "Bonn B-LOC B-LOC", "Berlin B-LOC I-LOC"]


# Words with tags as pieces


CUTS = st.lists(st.text("abcdef", min_size=1, max_size=9), min_size=1, max_size=40)


@settings(max_examples=50)
@given(CUTS, st.sets(st.integers(1, 39)), st.sets(st.integers(1, 39)), st.integers(3, 40), st.booleans())
def test_every_word_is_tagged_once(
    texts: list[str], cuts: set[int], documents: set[int], length: int, context: bool
) -> None:
    """Whatever the lengths of words, sentences, documents and windows; pieces are letters here, so they are known."""
    inner = {cut for cut in documents if cut < len(texts)}
    document_ends = np.array([*sorted(inner), len(texts)])
    sentence_ends = np.array([*sorted({*inner, *(cut for cut in cuts if cut < len(texts))}), len(texts)])
    items = TaggedWords(SplitWords(texts, sentence_ends, document_ends, np.arange(len(texts))), CUTTER, length, context)
    order = np.random.default_rng(0).permutation(len(items))
    encoded = encode(items, *order)
    assert sorted(encoded.labels.values.tolist()) == list(range(len(texts)))
    assert encoded.sequences.pieces.lengths.max() <= length
    ends = document_ends if context else sentence_ends
    for item, pieces in enumerate(spell(items, *order)):
        assert (pieces[0], pieces[-1]) == ("[CLS]", "[SEP]")
        places, numbers = encoded.words.row(item), encoded.labels.row(item)
        assert [pieces[place] for place in places] == [texts[number][0] for number in numbers]
        assert len({int(np.searchsorted(ends, number, "right")) for number in numbers}) == 1
        seen = "".join(piece.removeprefix("##") for piece in pieces[1:-1])
        bound = ends[np.searchsorted(ends, numbers[0], "right")]
        first = 0 if bound == ends[0] else ends[ends < bound][-1]
        assert seen in "".join(text[: length - 2] for text in texts[first:bound])


def test_context_is_as_long_on_both_sides() -> None:
    """But at the ends of a document, where all of it is on one side."""
    words = SplitWords(list("abcdefghi"), np.array([2, 4, 5, 7, 9]), np.array([9]))
    wanted = [["[CLS]", *text, "[SEP]"] for text in ("abcde", "bcdef", "cdefg", "efghi", "efghi")]
    assert spell(TaggedWords(words, CUTTER, 7, document_context=True)) == wanted


def test_a_word_without_pieces_is_unknown() -> None:
    words = SplitWords(["a", "\x07", "b"], np.array([3]), np.array([3]), np.arange(3))
    items = TaggedWords(words, CUTTER, 8, document_context=False)
    assert (spell(items), encode(items).words.values.tolist()) == ([["[CLS]", "a", "[UNK]", "b", "[SEP]"]], [1, 2, 3])
