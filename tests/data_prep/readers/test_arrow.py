"""Arrow files as `save_to_disk` of Hugging Face's datasets writes them, and as they get damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from support.reading import detected, passages, read, write

from data_prep.common.errors import UserError
from data_prep.readers import READERS
from data_prep.readers.reader import Document
from data_prep.readers.sources import find_files

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
    assert len(READERS["arrow"].spans(path, 1)) == num_spans
    assert read(path, "arrow")[0] == [Document(str(number), "", [text]) for number, text in enumerate(TEXTS)]
    with pytest.raises(UserError, match="no column 'body'; there is: id, text"):
        read(path, "arrow", text_field="body")


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("cut", [1, 8, 500])
def test_a_part_of_a_file_is_told(tmp_path: Path, kind: Kind, cut: int) -> None:
    path = arrow(tmp_path / "x.arrow", kind)
    with pytest.raises(UserError, match="not whole"):
        detected(write(path, path.read_bytes()[:-cut]))


def test_damage_within_a_file_is_told(tmp_path: Path) -> None:
    path = arrow(tmp_path / "x.arrow", "stream")
    content = bytearray(path.read_bytes())
    second = content.index(b"\xff\xff\xff\xff", content.index(b"Text 19")) + 4
    content[second : second + 4] = b"\x7f\xff\xff\x7f"
    with pytest.raises(UserError, match="row group 0: damaged"):
        read(write(path, bytes(content)), "arrow")
    documents, problems = read(path, "arrow", "skip")
    assert len(documents) == 20
    assert len(problems.skipped) == 1


def test_a_saved_dataset_is_a_source(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        arrow(tmp_path / "saved" / split / "data-00000-of-00001.arrow", "stream")
        for name in ("state.json", "dataset_info.json"):
            write(tmp_path / "saved" / split / name, "{\n}\n")
    write(tmp_path / "saved" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    found = find_files([str(tmp_path / "saved")])
    assert [(Path(file.path).parent.name, file.format) for file in found] == [("test", "arrow"), ("train", "arrow")]
    assert passages(Path(found[0].path), "arrow") == [[text] for text in TEXTS]
