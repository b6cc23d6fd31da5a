"""Downloads that go on where they stopped, and whose result is checked.

NAME.part grows while the download goes on, and NAME.part.json says of what it is the beginning; when it is whole and
has its checksum it takes its name.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError
from urllib.parse import quote

from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import BLOCK, read_json, write_json
from data_prep.common.progress import StepProgress, duration

AGENT = "cloze-fetch/0.1"
LONGEST_PAUSE = 60.0  # seconds
LONG_CHECK = 1 << 30  # bytes from which a user wonders what the silence is
ALGORITHMS = {40: "sha1", 64: "sha256"}  # by the length of the checksum
OFFLINE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all commands have."""

    out: Path | None = None
    """Folder for the files (default: data/raw/<name>)."""
    retries: int = 5
    """Attempts in a row that may fail without any progress."""
    wait: float = 1.0
    """Seconds before another attempt; doubles each time."""
    timeout: float = 60.0
    """Seconds without a byte after which a connection counts as lost."""

    @property
    def elsewhere(self) -> str:
        """What to do if this server cannot be reached and another can."""
        return "name a mirror with --mirror"


@dataclass(frozen=True)
class Item:
    """A file to fetch."""

    url: str
    path: Path
    checksum: str = ""
    """SHA-1 or SHA-256 in hex, where somebody says it"""
    hint: str = "check the address"
    """what a user can do when the server refuses"""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def algorithm(self) -> str:
        return ALGORITHMS[len(self.checksum)]


@dataclass(frozen=True)
class Beginning:
    """Of which file NAME.part is the beginning; kept beside it, in NAME.part.json."""

    url: str
    validator: str
    """ETag or date, by which the server knows the file again"""
    size: int | None
    """of the whole file, where the server said it"""
    checksum: str


class Interrupted(Exception):
    """It ended too early; another attempt may go on from there."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Changed(Interrupted):
    """What we have is no beginning of what the server has."""


class Client:
    """Asks servers, and asks again."""

    def __init__(self, console: Console, options: Options) -> None:
        self.console, self._options = console, options
        self.cure = f"check the network (and what https_proxy says, if there is a proxy), or {options.elsewhere}"
        self._reached = False  # once a server was reached, a network that is lost is waited for

    def patiently(self, name: str, attempt: Callable[[], T], position: Callable[[], int] = lambda: 0) -> T:
        """Repeats the attempt while it is interrupted, until too many in a row got no further than any before them."""
        failures, furthest = 0, position()
        while True:
            try:
                return attempt()
            except Interrupted as error:
                failures = 0 if position() > furthest else failures + 1
                furthest = max(furthest, position())
                if failures > self._options.retries:
                    raise UserError(
                        f"{name}: {error}; gave up after {failures} attempts without progress\n"
                        f"{self.cure}; the same command continues"
                    ) from None
                pause = max(min(self._options.wait * 2 ** max(failures - 1, 0), LONGEST_PAUSE), error.pause)
                self.console.print(f"{name}: {error}; again in {duration(pause)}")
                time.sleep(pause)

    def open(self, url: str, hint: str, headers: Mapping[str, str]) -> HTTPResponse:
        """The answer of the server; raises Interrupted where another attempt may help and UserError where not."""
        request = urllib.request.Request(quote(url, safe="%/:=&?~#+!$,;'@()*[]"), headers={"User-Agent": AGENT})
        for name, value in headers.items():
            request.add_unredirected_header(name, value) if name == "Authorization" else request.add_header(name, value)
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=self._options.timeout)
        except HTTPError as error:
            self._reached = True
            with error:
                raise self._judge_answer(error, url, hint) from None
        except (OSError, HTTPException, UnicodeError) as error:
            raise self._judge_failure(getattr(error, "reason", error), url) from None
        self._reached = True
        return response

    def _judge_answer(self, error: HTTPError, url: str, hint: str) -> Exception:
        said = f"the server says {error.code} {error.reason}"
        if error.code == 416:
            return Changed("the server's file is shorter than what is here")
        if error.code in (408, 429) or error.code >= 500:
            asked = error.headers.get("Retry-After", "")
            return Interrupted(said, min(float(asked), 5 * LONGEST_PAUSE) if asked.isdecimal() else 0)
        return UserError(f"{url}: {said}\n{hint}")

    def _judge_failure(self, reason: object, url: str) -> Exception:
        if isinstance(reason, ssl.SSLCertVerificationError):
            return UserError(f"{url}: its certificate is not trusted: {reason}\n{self.cure}")
        lost = isinstance(reason, socket.gaierror | ConnectionRefusedError) or getattr(reason, "errno", 0) in OFFLINE
        if lost and not self._reached:
            return UserError(f"{url}: cannot be reached: {reason}\n{self.cure}")
        return Interrupted(str(reason) or type(reason).__name__)

    def read_text(self, url: str, hint: str) -> str:
        """A small file."""

        def attempt() -> str:
            with self.open(url, hint, {}) as response:
                return b"".join(blocks(response, content_length(response))).decode(errors="replace")

        return self.patiently(url, attempt)


def content_length(response: HTTPResponse) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def blocks(response: HTTPResponse, length: int | None) -> Iterator[bytes]:
    """The content as it comes; raises Interrupted if it ends before its length."""
    received = 0
    while length is None or received < length:
        try:
            block = response.read1(BLOCK if length is None else min(BLOCK, length - received))
        except (OSError, HTTPException) as error:
            raise Interrupted(f"connection lost ({error or type(error).__name__})") from None
        if not block:
            if length is None:
                return
            raise Interrupted("connection closed by the server")
        received += len(block)
        yield block


class Download:
    """One file: NAME.part grows to the size that the server says, is checked, and takes its name."""

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
                self._client.patiently(path.name, self._receive, self._position)
                self._check(self._part)
                self._part.replace(path)
            self._record.unlink(missing_ok=True)
        except OSError as error:  # of the disk: those of the network are Interrupted
            raise UserError(
                f"{error.filename or self._part}: {error.strerror or error}\n"
                "make room or choose another folder with --out; the same command continues"
            ) from error
        verdict = f", its {self._item.algorithm} is right" if self._item.checksum else ""
        self._client.console.print(f"{path}: {'already there' if there else 'complete'}{verdict}")

    def _position(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _receive(self) -> None:
        """One attempt: returns when the whole file is there."""
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
        except Changed:
            self._part.unlink(missing_ok=True)
            raise

    def _beginning(self) -> Beginning | None:
        """What is known of NAME.part, if that is enough to go on: the server can tell, or the checksum will."""
        try:
            known = Beginning(**read_json(self._record))
        except (OSError, UserError, TypeError):
            return None
        same_place = known.url == self._item.url and known.validator != ""
        same_content = known.checksum != "" and known.checksum == self._item.checksum and known.size is not None
        return known if same_place or same_content else None

    def _check_rest(self, response: HTTPResponse, known: Beginning, offset: int) -> int | None:
        """The size of the whole file; raises Changed if this is not the rest of what we have."""
        match = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        size = int(match[2]) if match and match[2] != "*" else known.size
        other = known.url == self._item.url and validator(response) not in ("", known.validator)
        if other or not match or int(match[1]) != offset or size != (known.size or size):
            raise Changed("the file on the server has changed; starting anew")
        return size

    def _start_anew(self, response: HTTPResponse) -> int | None:
        size = content_length(response)
        if lost := self._position():
            self._client.console.print(f"{lost / 1e6:,.1f} MB are of no use: the server begins at the first byte")
        self._part.unlink(missing_ok=True)  # before its record changes
        write_json(self._record, asdict(Beginning(self._item.url, validator(response), size, self._item.checksum)))
        return size

    def _store(self, response: HTTPResponse, offset: int, size: int | None) -> None:
        rest, free = (size or 0) - offset, shutil.disk_usage(self._part.parent).free
        if rest > free:
            raise OSError(errno.ENOSPC, f"needs {rest / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB left")
        progress = StepProgress(self._client.console, "fetch", "B", size or 0, offset)
        with self._part.open("ab", buffering=0) as file, progress.shown() if size else nullcontext():
            for block in blocks(response, None if size is None else size - offset):
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
        raise UserError(
            f"{self._item.path}: its {self._item.algorithm} is {found}, it should be {expected}\n"
            f"it is now {bad}, to look at or to delete; the same command fetches it anew from {self._item.url}"
        )

    def _checksum(self, path: Path) -> str:
        if path.stat().st_size > LONG_CHECK:
            self._client.console.print(f"{path}: reading it again for its {self._item.algorithm}")
        digest = hashlib.new(self._item.algorithm, usedforsecurity=False)
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest()


def validator(response: HTTPResponse) -> str:
    """By what the server knows this very content again: a strong ETag, or a date."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")
