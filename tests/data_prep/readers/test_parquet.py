"""Parquet and Arrow files as data sets are published in them, and as they get damaged."""

from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import assert_refusal
from support.reading import detected, passages, read, write

from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Document
from data_prep.readers.sources import find_files


def parquet(path: Path, rows: int = 100, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_parquet_as_wikipedia_is_published(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["A\n\nFirst. Second.\nThird &amp; last.", None, "", "Wörter"]
    text = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts).cast(kind)
    ids, titles, urls = ["1", "2", "3", None], ["A", "B", None, "D"], ["u"] * 4
    path = parquet(tmp_path / "train-00000-of-00041.parquet", id=ids, url=urls, title=titles, text=text, rows=3)
    assert detected(path) == "parquet"
    assert len(list_readers()["parquet"].spans(path, 1)) == 2
    first, last = Document("1", "A", ["First. Second.", "Third & last."]), Document(f"{path.name}:1:0", "D", ["Wörter"])
    assert read(path, "parquet")[0] == [first, Document("2", "B", []), Document("3", "", []), last]


def test_parquet_as_bookcorpus_is_published(tmp_path: Path) -> None:
    rows = [f"he said number {n} , and went away ." for n in range(2500)]
    documents, _ = read(parquet(tmp_path / "x.parquet", text=rows, rows=1500), "parquet")
    assert [document.passages for document in documents] == [rows[:1000], rows[1000:1500], rows[1500:]]
    assert [document.id for document in documents] == [f"x.parquet:{place}" for place in ("0:0", "0:1000", "1:0")]


def test_parquet_with_ids_and_titles_of_any_type(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", id=[1, 2], title=[1.5, None], text=["One.\nTwo.", "Three."])
    assert read(path, "parquet")[0] == [Document("1", "1.5", ["One.", "Two."]), Document("2", "", ["Three."])]
    path = parquet(tmp_path / "y.parquet", id=["a"], text=["x"])
    assert read(path, "parquet", text_field="id")[0] == [Document("a", "", ["a"])]


def test_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    bad = pa.array([b"good.", b"caf\xe9", b"fine."]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, bad.buffers())
    path = parquet(tmp_path / "x.parquet", text=text, id=["a", "b", "c"])
    assert_refusal(r"x.parquet: row group 0, row 1: byte 3: not UTF-8 \(e9\)\nis it Latin-1\? ", read, path, "parquet")
    assert passages(path, "parquet", errors="replace") == [["good."], ["caf\ufffd"], ["fine."]]
    documents, problems = read(path, "parquet", "skip")
    assert [document.id for document in documents] == ["a", "c"]
    assert problems.skipped == [f"{path}: row group 0, row 1: byte 3: not UTF-8 (e9)"]


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", body=["x"], id=[1], tags=[["a"]])
    cure = "\n--text-field NAME=body names the field with the text"
    assert_refusal(rf"x.parquet: no text in a field 'text'; there is: body, id, tags{cure}", read, path, "parquet")
    assert_refusal(rf"x.parquet: the field 'id' holds no text; .*{cure}", read, path, "parquet", text_field="id")
    assert_refusal("the field 'tags' holds no text", read, path, "parquet", text_field="tags")


def test_damaged_parquet(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "x.parquet", text=[f"text {n} " * 50 for n in range(999)], id=range(999)).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:7], b"PAR1 and no more"):
        path = write(tmp_path / "cut.parquet", content)
        assert_refusal(r"cut.parquet: a Parquet or Arrow file that is not whole\n    fetch or", detected, path)
        assert_refusal(r"cut.parquet: not a whole file: ", read, path, "parquet")
    path = write(tmp_path / "bad.parquet", whole[:4] + bytes(3000) + whole[3004:])
    assert_refusal(r"bad.parquet: row group 0: damaged: ", read, path, "parquet")
    assert_refusal(r"text.txt: not a whole file: ", read, write(tmp_path / "text.txt", "No Parquet."), "parquet")


def test_parquet_with_texts_alone_or_without_rows(tmp_path: Path) -> None:
    for texts in (["Text 1 has two sentences. They are short.", "One line.\nAnother."] * 5, []):
        path = parquet(tmp_path / "x.parquet", text=pa.array(texts, pa.string()))
        assert len(read(path, "parquet")[0]) == len(texts)


Kind = Literal["stream", "file"]
TEXTS = [f"Text {number} has two sentences. They are short." for number in range(50)]


def arrow(path: Path, kind: Kind) -> Path:
    table = pa.table({"id": [str(number) for number in range(len(TEXTS))], "text": TEXTS})
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return path


@pytest.mark.parametrize(("kind", "num_spans"), [("stream", 1), ("file", 3)])
def test_arrow_files_are_read(tmp_path: Path, kind: Kind, num_spans: int) -> None:
    path = arrow(tmp_path / "data-00000-of-00001.arrow", kind)
    assert detected(path) == "arrow"
    assert len(list_readers()["arrow"].spans(path, 1)) == num_spans
    assert read(path, "arrow")[0] == [Document(str(number), "", [text]) for number, text in enumerate(TEXTS)]
    assert_refusal("no text in a field 'body'; there is: id, text", read, path, "arrow", text_field="body")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_part_of_a_file_is_told(tmp_path: Path, kind: Kind) -> None:
    whole = arrow(tmp_path / "x.arrow", kind).read_bytes()
    for cut in (1, 8, 500):
        assert_refusal("not whole", detected, write(tmp_path / "x.arrow", whole[:-cut]))


def test_damage_within_a_file_is_told(tmp_path: Path) -> None:
    path = arrow(tmp_path / "x.arrow", "stream")
    content = bytearray(path.read_bytes())
    second = content.index(b"\xff\xff\xff\xff", content.index(b"Text 19")) + 4
    content[second : second + 4] = b"\x7f\xff\xff\x7f"
    assert_refusal("row group 0: damaged", read, write(path, bytes(content)), "arrow")
    documents, problems = read(path, "arrow", "skip")
    assert (len(documents), len(problems.skipped)) == (20, 1)


def test_a_saved_dataset_is_a_source(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        arrow(tmp_path / split / "data-00000-of-00001.arrow", "stream")
        for name in ("state.json", "dataset_info.json"):
            write(tmp_path / split / name, "{\n}\n")
    write(tmp_path / "dataset_dict.json", '{"splits": ["train", "test"]}')
    found = find_files([str(tmp_path)])
    assert [(Path(file.path).parent.name, file.format) for file in found] == [("test", "arrow"), ("train", "arrow")]
    assert passages(Path(found[0].path), "arrow") == [[text] for text in TEXTS]
