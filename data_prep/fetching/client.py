"""Commands that fetch: their common options, and requests that are repeated while another attempt may help."""

from __future__ import annotations

import errno
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit

import tyro
from rich.console import Console

from data_prep.common.errors import Checks, UserError
from data_prep.common.files import BLOCK
from data_prep.common.progress import duration
from data_prep.common.terminal import open_console

AGENT = "cloze-fetch/1.0"
LONGEST_PAUSE = 60.0  # seconds
OFFLINE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """What a user can set for every command of fetch.py."""

    out: Path | None = None
    """Folder for the files (default: data/raw/<name>)."""
    retries: int = 5
    """Attempts in a row that may fail without any progress."""
    wait: float = 1.0
    """Seconds before another attempt; doubles each time."""
    timeout: float = 60.0
    """Seconds without a byte after which a connection counts as lost."""

    elsewhere: ClassVar[str] = "name a mirror with --mirror"
    """What a user can do if this server cannot be reached and another can."""

    def checks(self) -> Checks:
        """Checks the options of all commands; a command adds those of its own."""
        yield self.retries >= 0, f"--retries {self.retries}: at least 0"
        yield 0 <= self.wait < 3600, f"--wait {self.wait}: seconds, from 0"
        yield 0 < self.timeout < 86400, f"--timeout {self.timeout}: seconds, more than 0"

    def fetch(self, client: Client) -> str:
        """Fetches the files; returns the command line that a user will want next."""
        raise NotImplementedError


class CutOffError(Exception):
    """An answer that ended too early; another attempt may go on from there."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class ChangedError(CutOffError):
    """The partial download no longer matches the file on the server, so that another attempt begins anew."""


class Client:
    """Sends requests to servers, and repeats them as often and after such pauses as the options say."""

    def __init__(self, console: Console, options: FetchOptions) -> None:
        self.console, self._options = console, options
        self.cure = f"check the network (and what https_proxy says, if there is a proxy), or {options.elsewhere}"
        self._reached = False  # once a server was reached, a lost network is waited for

    def retry(self, name: str, attempt: Callable[[], T], position: Callable[[], int] = lambda: 0) -> T:
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
                if failures > self._options.retries:
                    raise UserError(
                        f"{name}: {error}; gave up after {failures} attempts without progress\n"
                        f"{self.cure}; the same command continues"
                    ) from None
                pause = max(min(self._options.wait * 2 ** max(failures - 1, 0), LONGEST_PAUSE), error.pause)
                self.console.print(f"{name}: {error}; again in {duration(pause)}")
                time.sleep(pause)

    def open(self, url: str, hint: str, headers: Mapping[str, str]) -> HTTPResponse:
        """Opens an address; raises CutOffError where another attempt may help and UserError where not.

        `hint` tells the user what to do when the server refuses.
        """
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
        """Decides by the status of an answer whether another attempt may help."""
        said = f"the server says {error.code} {error.reason}"
        if error.code == 416:
            return ChangedError("the server's file is shorter than what is here")
        if error.code in (408, 429) or error.code >= 500:
            asked = error.headers.get("Retry-After", "")
            return CutOffError(said, min(float(asked), 5 * LONGEST_PAUSE) if asked.isdecimal() else 0)
        return UserError(f"{url}: {said}\n{hint}")

    def _judge_failure(self, reason: object, url: str) -> Exception:
        """Decides by the reason of a failure whether another attempt may help: a server must have been reached once."""
        if isinstance(reason, ssl.SSLCertVerificationError):
            return UserError(f"{url}: its certificate is not trusted: {reason}\n{self.cure}")
        lost = isinstance(reason, socket.gaierror | ConnectionRefusedError) or getattr(reason, "errno", 0) in OFFLINE
        if lost and not self._reached:
            return UserError(f"{url}: cannot be reached: {reason}\n{self.cure}")
        return CutOffError(str(reason) or type(reason).__name__)

    def read_text(self, url: str, hint: str) -> str:
        """Reads a small file of text as a whole."""

        def attempt() -> str:
            with self.open(url, hint, {}) as response:
                return b"".join(read_blocks(response, read_length(response))).decode(errors="replace")

        return self.retry(url, attempt)


def read_length(response: HTTPResponse) -> int | None:
    """Reads the Content-Length of an answer; None where it has none."""
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def read_blocks(response: HTTPResponse, length: int | None) -> Iterator[bytes]:
    """Yields the content as it comes; raises CutOffError if it ends before its length."""
    received = 0
    while length is None or received < length:
        try:
            block = response.read1(BLOCK if length is None else min(BLOCK, length - received))
        except (OSError, HTTPException) as error:
            raise CutOffError(f"connection lost ({error or type(error).__name__})") from None
        if not block:
            if length is None:
                return
            raise CutOffError("connection closed by the server")
        received += len(block)
        yield block


def is_address(url: str) -> bool:
    """Tells whether a client could open this address."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.netloc.isascii() and parts.port != 0
    except ValueError:
        return False


def run_entry(kinds: Mapping[str, type[FetchOptions]], arguments: list[str]) -> int:
    """Runs the command of the command line, one of these kinds.

    Returns the exit code: 0 done, 2 an error that the user can cure, 130 interrupted.
    """
    console = open_console(markup=False, soft_wrap=True)
    errors = open_console(stderr=True, markup=False, soft_wrap=True)
    try:
        command: FetchOptions = tyro.extras.subcommand_cli_from_dict(dict(kinds), args=arguments, prog="fetch.py")
        if faults := [message for holds, message in command.checks() if not holds]:  # all at once
            raise UserError("\n".join(faults))
        console.print(f"next:\n    {command.fetch(Client(console, command))}")
    except (UserError, PermissionError) as error:
        errors.print(f"error: {error}", style="red" if errors.is_terminal else "")
        return 2
    except KeyboardInterrupt:
        errors.print("\ninterrupted; the same command continues where it stopped")
        return 130
    return 0
