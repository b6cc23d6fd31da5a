"""A file is known by its size, its head and its tail: not by its name, nor by when it was written."""

from __future__ import annotations

import builtins
import gzip
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.reading import COMPRESS, write

from data_prep.common.errors import UserError
from data_prep.readers import identity
from data_prep.readers.identity import EDGE, look
from data_prep.readers.sources import find_files


def key(path: Path) -> str:
    return look(path, path.stat().st_size).content


def test_a_key_is_the_hash_of_size_head_and_tail(tmp_path: Path) -> None:
    for size in (0, 1, EDGE, EDGE + 1, 2 * EDGE, 3 * EDGE + 5):
        data = os.urandom(size)
        path = write(tmp_path / "x", data)
        tail = data[max(EDGE, size - EDGE) :]
        assert key(path) == hashlib.sha256(b"%d " % size + data[:EDGE] + tail).hexdigest()[:16]
        assert look(str(path), size + 1).content != key(path)


def test_a_file_that_is_copied_or_touched_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "x", os.urandom(300_000))
    shutil.copy(path, tmp_path / "y")
    os.utime(tmp_path / "y", (1, 1))
    assert key(path) == key(tmp_path / "y")


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_the_key_that_goes_with_a_file(tmp_path: Path, suffix: str) -> None:
    data = b'{"text": "%s"}\n' % os.urandom(100_000).hex().encode()
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b"\xef\xbb\xbf" + data))
    (file,) = find_files([str(path)])
    status = path.stat()
    assert (file.content, file.size) == (key(path), status.st_size)
    seen = look(path, status.st_size)
    assert (seen.head, seen.content, seen.is_damaged) == (data[:16384], file.content, False)


def test_a_file_is_opened_once_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.txt", "A text. Of two sentences.\n")
        write(tmp_path / f"{number}.txt.gz", gzip.compress(os.urandom(99_999).hex().encode()))
    opened: list[str] = []

    def counting(path: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(str(path))
        return builtins.open(path, *arguments, **options)

    monkeypatch.setattr(identity, "open", counting, raising=False)
    monkeypatch.setattr(Path, "open", lambda path, *_: pytest.fail(f"{path} is opened otherwise"))
    assert len(find_files([str(tmp_path)])) == 6
    assert sorted(opened) == sorted(str(path) for path in tmp_path.iterdir())


def test_a_head_that_is_damaged(tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(5000).hex().encode())
    path = write(tmp_path / "x.gz", data[:-2000])
    seen = look(path, path.stat().st_size)
    assert seen.is_damaged
    assert 1000 < len(seen.head) < 10_000
    assert look(write(path, data[:5]), 5).head == b""


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none: cannot be read: No such file or directory\n--errors skip leaves"):
        look(tmp_path / "none", 9)
    (tmp_path / "x.gz").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"x.gz: cannot be read: Input/output error"):
        look(tmp_path / "x.gz", 9)
