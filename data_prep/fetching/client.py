"""Commands that fetch: their common options, and downloads that go on where they stopped and whose result is checked.

NAME.part grows during a download, and NAME.part.json describes the whole file. When NAME.part is whole and has the
right checksum, it is renamed to NAME.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit

from rich.console import Console

from data_prep.common.errors import Checks, UserError, describe_failure
from data_prep.common.files import BLOCK, checksum, read_json, write_json
from data_prep.common.flags import read_subcommand
from data_prep.common.progress import StepProgress, duration
from data_prep.common.sections import Removed
from data_prep.common.terminal import open_console, run_curable

AGENT = "cloze-fetch/1.0"
RETRIES = 5  # attempts in a row that may fail without any progress
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before another attempt; they double each time
TIMEOUT = 60.0  # seconds without a byte after which a connection counts as lost
CLOSED = "connection closed by the server"
CURE = "check the network (and what https_proxy says, if there is a proxy)"
LOST = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
OFFLINE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """What a user can set for every command of fetch.py."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "retries": Removed(5, "the same command continues where it stopped"),
        "wait": Removed(1, f"pauses double up to {LONGEST_PAUSE:g} seconds"),
        "timeout": Removed(60, "the same command continues where it stopped"),
        "mirror": Removed(None, "HF_ENDPOINT names another hub; fetch.py url fetches files of any server"),
    }
    out: Path | None = None
    """Folder for the files (default: data/raw/<name>)."""

    def checks(self) -> Checks:
        """Checks the options of a command."""
        return iter(())

    def fetch(self, client: Client) -> str:
        """Fetches the files; returns the command line that a user will want next."""
        raise NotImplementedError


def run_entry(kinds: Mapping[str, type[FetchOptions]], arguments: list[str], page: str) -> int:
    """Runs the command of the command line, one of these kinds; its help names a page of docs/.

    Returns the exit code: 0 done, 2 an error that the user can cure, 130 interrupted.
    """

    def run() -> None:
        command = read_subcommand(kinds, arguments, "fetch.py", page)
        if faults := [message for holds, message in command.checks() if not holds]:  # all at once
            raise UserError("\n".join(faults))
        console = open_console(markup=False, soft_wrap=True)
        console.print(f"next:\n    {command.fetch(Client(console))}")

    code = run_curable(run)
    if code == 130:
        print("\ninterrupted; the same command continues where it stopped", file=sys.stderr)
    return code


def is_address(url: str) -> bool:
    """Tells whether a client could open this address."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.netloc.isascii() and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True)
class Item:
    """A file to fetch, and where it goes."""

    url: str
    path: Path
    checksum: str = ""
    """The SHA-1 or SHA-256 of the content in hex; empty if it is not known."""
    hint: str = "check the address"
    """What a user can do when the server refuses."""
    token: str = ""
    """A token of the user, which no server but this one may see."""

    @property
    def part(self) -> Path:
        """Names the file that grows while the item is fetched."""
        return self.path.with_name(f"{self.path.name}.part")

    @property
    def record(self) -> Path:
        """Names the file that describes the whole one meanwhile."""
        return self.path.with_name(f"{self.path.name}.part.json")

    @property
    def algorithm(self) -> str:
        """Names the algorithm of the checksum."""
        return "sha1" if len(self.checksum) == 40 else "sha256"


class CutOffError(Exception):
    """An answer that ended too early; another attempt may go on from there."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class ChangedError(CutOffError):
    """The partial download no longer matches the file on the server, so that another attempt begins anew."""


class Client:
    """Sends requests to servers, and repeats them while they get further."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._reached = False  # once a server was reached, a lost network is waited for

    def fetch(self, item: Item) -> None:
        """Fetches what is missing of a file; does nothing where it is there and right."""
        path, there = item.path, item.path.exists()
        try:
            if there:
                _check(item, path)
            else:
                self.console.print(f"{item.url} -> {path}")
                path.parent.mkdir(parents=True, exist_ok=True)
                self._retry(path.name, lambda: self._receive(item), lambda: _measure(item.part))
                _check(item, item.part)
                item.part.replace(path)
            item.record.unlink(missing_ok=True)
        except OSError as error:  # a fault of the disk: those of the network are CutOffError
            raise UserError(
                f"{error.filename or item.part}: {describe_failure(error)}\n"
                "make room or choose another folder with --out; the same command continues"
            ) from error
        verdict = f", its {item.algorithm} is right" if item.checksum else ""
        self.console.print(f"{path}: {'already there' if there else 'complete'}{verdict}")

    def read_text(self, url: str, hint: str) -> str:
        """Reads a small file of text as a whole."""

        def attempt() -> str:
            with self._open(Item(url, Path(), hint=hint), {}) as response:
                return b"".join(_read_blocks(response)).decode(errors="replace")

        return self._retry(url, attempt)

    def _retry(self, name: str, attempt: Callable[[], T], position: Callable[[], int] = lambda: 0) -> T:
        """Repeats an attempt while it is interrupted, until too many in a row got no further than any before them.

        `name` is the name of the file in messages, `position` the number of bytes that the attempts have fetched.
        """
        failures, furthest = 0, position()
        while True:
            try:
                return attempt()
            except CutOffError as error:
                failures = 0 if position() > furthest else failures + 1
                furthest = max(furthest, position())
                if failures > RETRIES:
                    raise UserError(
                        f"{name}: {error}; gave up after {failures} attempts without progress\n"
                        f"{CURE}; the same command continues"
                    ) from None
                pause = max(min(FIRST_PAUSE * 2 ** max(failures - 1, 0), LONGEST_PAUSE), error.pause)
                self.console.print(f"{name}: {error}; again in {duration(pause)}")
                time.sleep(pause)

    def _open(self, item: Item, headers: Mapping[str, str]) -> HTTPResponse:
        """Opens the address of a file; raises CutOffError where another attempt may help and UserError where not."""
        url = quote(item.url, safe="%/:=&?~#+!$,;'@()*[]")
        request = urllib.request.Request(url, headers={"User-Agent": AGENT, **headers})
        if item.token:
            request.add_unredirected_header("Authorization", f"Bearer {item.token}")
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        except (OSError, HTTPException, UnicodeError) as error:
            raise self._explain(error, item) from None
        self._reached = True
        return response

    def _explain(self, error: Exception, item: Item) -> Exception:
        """Makes the error to raise where an address does not open: CutOffError where another attempt may help."""
        if isinstance(error, HTTPError):
            error.close()
            self._reached, said = True, f"the server says {error.code} {error.reason}"
            if error.code == 416:
                return ChangedError("the server's file is shorter than what is here")
            if error.code in (408, 429) or error.code >= 500:
                asked = error.headers.get("Retry-After", "")
                return CutOffError(said, min(float(asked), 5 * LONGEST_PAUSE) if asked.isdecimal() else 0)
            return UserError(f"{item.url}: {said}\n{item.hint}")
        reason = getattr(error, "reason", error)
        lost = isinstance(reason, LOST) or getattr(reason, "errno", 0) in OFFLINE
        if lost and not self._reached:
            return UserError(f"{item.url}: cannot be reached: {reason}\n{CURE}")
        return CutOffError(str(reason) or type(reason).__name__)

    def _receive(self, item: Item) -> None:
        """Makes one attempt at a file; returns when all of it is in NAME.part."""
        known = _read_beginning(item)
        offset = _measure(item.part) if known else 0
        if known and known.size == offset:
            return
        headers = {}
        if known and offset:
            headers["Range"] = f"bytes={offset}-"
            if known.url == item.url:
                headers["If-Range"] = known.validator
        try:
            with self._open(item, headers) as response:
                if known and offset and response.status == 206:
                    _require_rest(response, item, known, offset)
                else:
                    known, offset = self._start_anew(response, item), 0
                self._store(response, item.part, offset)
        except ChangedError:
            item.part.unlink(missing_ok=True)
            raise
        if known.size not in (None, _measure(item.part)):
            raise CutOffError(CLOSED)

    def _start_anew(self, response: HTTPResponse, item: Item) -> _Beginning:
        """Drops the partial download, as the answer begins at the first byte; records which file begins there."""
        begun = _Beginning(item.url, _read_validator(response), response.length, item.checksum)
        item.part.unlink(missing_ok=True)  # before its record changes
        write_json(item.record, asdict(begun))
        return begun

    def _store(self, response: HTTPResponse, part: Path, offset: int) -> None:
        """Appends the answer to NAME.part; refuses at once what the disk has no room for."""
        rest, free = response.length or 0, shutil.disk_usage(part.parent).free
        if rest > free:
            raise OSError(errno.ENOSPC, f"needs {rest / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB left")
        progress = StepProgress(self.console, "fetch", "B", offset + rest, offset)
        with part.open("ab") as file, progress.show() if rest else nullcontext():
            for block in _read_blocks(response):
                file.write(block)
                file.flush()
                progress.advance(len(block))
            os.fsync(file.fileno())


def _read_validator(response: HTTPResponse) -> str:
    """Reads the strong ETag, or the date, by which the server knows this very content again."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


def _read_blocks(response: HTTPResponse) -> Iterator[bytes]:
    """Yields the content as it comes; raises CutOffError if it ends too early."""
    try:
        while block := response.read1(BLOCK):
            yield block
    except (OSError, HTTPException) as error:
        raise CutOffError(f"connection lost ({error or type(error).__name__})") from None
    if response.length:  # what is left of its Content-Length
        raise CutOffError(CLOSED)


@dataclass(frozen=True)
class _Beginning:
    """The content of NAME.part.json: which file NAME.part is the beginning of."""

    url: str
    validator: str
    """The ETag or date by which the server knows the file again."""
    size: int | None
    """The size of the whole file in bytes, where the server gave it."""
    checksum: str
    """The checksum that the whole file must have; empty if it is not known."""


def _check(item: Item, path: Path) -> None:
    """Puts the file aside as NAME.bad and raises UserError unless it has its checksum."""
    if not item.checksum or (found := checksum(path, item.algorithm)) == item.checksum:
        return
    bad = path.replace(item.path.with_name(f"{item.path.name}.bad"))
    item.record.unlink(missing_ok=True)
    raise UserError(
        f"{item.path}: its {item.algorithm} is {found}, it should be {item.checksum}\n"
        f"it is now {bad}, to look at or to delete; the same command fetches it anew from {item.url}"
    )


def _measure(part: Path) -> int:
    """Returns the bytes of NAME.part."""
    return part.stat().st_size if part.exists() else 0


def _read_beginning(item: Item) -> _Beginning | None:
    """Reads which file NAME.part begins; None unless the server or a checksum can tell whether it still fits."""
    try:
        known = _Beginning(**read_json(item.record))
    except (OSError, UserError, TypeError):
        return None
    same_place = known.url == item.url and known.validator != ""
    same_content = known.checksum != "" and known.checksum == item.checksum and known.size is not None
    return known if same_place or same_content else None


def _require_rest(response: HTTPResponse, item: Item, known: _Beginning, offset: int) -> None:
    """Raises ChangedError unless the answer is the rest of the file that is known."""
    match = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    other = known.url == item.url and _read_validator(response) not in ("", known.validator)
    if other or not match or int(match[1]) != offset or (known.size and match[2] not in ("*", str(known.size))):
        raise ChangedError("the file on the server has changed; starting anew")
