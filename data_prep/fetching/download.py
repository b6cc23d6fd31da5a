"""Downloads that go on where they stopped, and whose result is checked.

NAME.part grows during the download, and NAME.part.json describes the whole file. When NAME.part is whole and has the
right checksum, it is renamed to NAME.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from http.client import HTTPResponse
from pathlib import Path

from data_prep.common.errors import UserError, describe_failure
from data_prep.common.files import checksum, read_json, write_json
from data_prep.common.languages import RULES
from data_prep.common.progress import StepProgress
from data_prep.fetching.client import ChangedError, Client, read_blocks, read_length

LONG_CHECK = 1 << 30  # bytes from which a user wonders what the silence is
ALGORITHMS = {40: "sha1", 64: "sha256"}  # by the length of the checksum


@dataclass(frozen=True)
class Item:
    """A file to fetch, and where it goes."""

    url: str
    path: Path
    checksum: str = ""
    """The SHA-1 or SHA-256 of the content in hex; empty if it is not known."""
    hint: str = "check the address"
    """What a user can do when the server refuses."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the request, such as a token of the user."""
    said: str = ""
    """The source of the checksum, if it is not the server; shown when the checksum is wrong."""

    @property
    def algorithm(self) -> str:
        """Names the algorithm of the checksum."""
        return ALGORITHMS[len(self.checksum)]


@dataclass(frozen=True)
class Beginning:
    """The content of NAME.part.json: which file NAME.part is the beginning of."""

    url: str
    validator: str
    """The ETag or date by which the server knows the file again."""
    size: int | None
    """The size of the whole file in bytes, where the server gave it."""
    checksum: str
    """The checksum that the whole file must have; empty if it is not known."""


class Download:
    """The download of one file: NAME.part grows to the full size, is checked, and is renamed to NAME."""

    def __init__(self, client: Client, item: Item) -> None:
        self._client, self._item = client, item
        self._part = item.path.with_name(item.path.name + ".part")
        self._record = item.path.with_name(item.path.name + ".part.json")

    def run(self) -> None:
        """Fetches what is missing of the file; does nothing where it is there and right."""
        path, there = self._item.path, self._item.path.exists()
        try:
            if there:
                self._check(path)
            else:
                self._client.console.print(f"{self._item.url} -> {path}")
                path.parent.mkdir(parents=True, exist_ok=True)
                self._client.retry(path.name, self._receive, self._position)
                self._check(self._part)
                self._part.replace(path)
            self._record.unlink(missing_ok=True)
        except OSError as error:  # a fault of the disk: those of the network are CutOffError
            raise UserError(
                f"{error.filename or self._part}: {describe_failure(error)}\n"
                "make room or choose another folder with --out; the same command continues"
            ) from error
        verdict = f", its {self._item.algorithm} is right" if self._item.checksum else ""
        self._client.console.print(f"{path}: {'already there' if there else 'complete'}{verdict}")

    def _position(self) -> int:
        """Counts the bytes of NAME.part."""
        return self._part.stat().st_size if self._part.exists() else 0

    def _receive(self) -> None:
        """Makes one attempt; returns when the whole file is there."""
        known, offset = self._beginning(), self._position()
        if known is None:
            offset = 0
        elif known.size == offset:
            return
        headers = dict(self._item.headers)
        if known and offset:
            headers["Range"] = f"bytes={offset}-"
            if known.url == self._item.url:
                headers["If-Range"] = known.validator
        try:
            with self._client.open(self._item.url, self._item.hint, headers) as response:
                resumed = known if offset and response.status == 206 else None
                size = self._check_rest(response, resumed, offset) if resumed else self._start_anew(response)
                self._store(response, offset if resumed else 0, size)
        except ChangedError:
            self._part.unlink(missing_ok=True)
            raise

    def _beginning(self) -> Beginning | None:
        """Reads which file NAME.part begins; None unless the server or a checksum can tell whether it still fits."""
        try:
            known = Beginning(**read_json(self._record))
        except (OSError, UserError, TypeError):
            return None
        same_place = known.url == self._item.url and known.validator != ""
        same_content = known.checksum != "" and known.checksum == self._item.checksum and known.size is not None
        return known if same_place or same_content else None

    def _check_rest(self, response: HTTPResponse, known: Beginning, offset: int) -> int | None:
        """Returns the size of the whole file; raises ChangedError unless the answer is the rest of this file."""
        match = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        size = int(match[2]) if match and match[2] != "*" else known.size
        other = known.url == self._item.url and read_validator(response) not in ("", known.validator)
        if other or not match or int(match[1]) != offset or size != (known.size or size):
            raise ChangedError("the file on the server has changed; starting anew")
        return size

    def _start_anew(self, response: HTTPResponse) -> int | None:
        """Drops the partial download, as the answer begins at the first byte; returns the size of the whole file."""
        size = read_length(response)
        if lost := self._position():
            self._client.console.print(f"{lost / 1e6:,.1f} MB are of no use: the server begins at the first byte")
        self._part.unlink(missing_ok=True)  # before its record changes
        write_json(self._record, asdict(Beginning(self._item.url, read_validator(response), size, self._item.checksum)))
        return size

    def _store(self, response: HTTPResponse, offset: int, size: int | None) -> None:
        """Appends the answer to NAME.part; refuses at once what the disk has no room for."""
        rest, free = (size or 0) - offset, shutil.disk_usage(self._part.parent).free
        if rest > free:
            raise OSError(errno.ENOSPC, f"needs {rest / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB left")
        progress = StepProgress(self._client.console, "fetch", "B", size or 0, offset)
        with self._part.open("ab", buffering=0) as file, progress.show() if size else nullcontext():
            for block in read_blocks(response, None if size is None else size - offset):
                view = memoryview(block)
                while view:
                    view = view[file.write(view) :]
                if size:
                    progress.advance(len(block), 0)
            os.fsync(file.fileno())

    def _check(self, path: Path) -> None:
        """Puts the file aside as NAME.bad and raises UserError unless it has its checksum."""
        expected = self._item.checksum
        if not expected or (found := self._checksum(path)) == expected:
            return
        bad, number = path.with_name(f"{self._item.path.name}.bad"), 2
        while bad.exists():
            bad, number = path.with_name(f"{self._item.path.name}.bad{number}"), number + 1
        path.replace(bad)
        self._record.unlink(missing_ok=True)
        said = f" ({self._item.said})" if self._item.said else ""
        raise UserError(
            f"{self._item.path}: its {self._item.algorithm} is {found}, it should be {expected}{said}\n"
            f"it is now {bad}, to look at or to delete; the same command fetches it anew from {self._item.url}"
        )

    def _checksum(self, path: Path) -> str:
        """Computes the checksum of a file by the algorithm of the one that it must have."""
        if path.stat().st_size > LONG_CHECK:
            self._client.console.print(f"{path}: reading it again for its {self._item.algorithm}")
        return checksum(path, self._item.algorithm)


def read_validator(response: HTTPResponse) -> str:
    """Reads the strong ETag, or the date, by which the server knows this very content again."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


def fetch_text(client: Client, folder: Path, items: Sequence[Item], language: str = "") -> str:
    """Fetches files into a folder; returns the command that makes shards of them, and of no others that are there."""
    for item in items:
        Download(client, item).run()
    ours = {item.path for item in items}
    others = [path for path in folder.rglob("*") if path.is_file() and path not in ours]
    visible = [path for path in others if not re.search(r"(^|/)[._]", str(path.relative_to(folder)))]
    docs = [f"{folder.absolute().name}={item.path}" for item in items] if visible else [str(folder)]
    code = "en" if language == "simple" else language
    options = ["--language", code] if code in RULES else []
    return shlex.join(["python", "data_prep/shard.py", "--docs", *docs, *options])
