"""Files that appear whole or not at all, and the records by which damage to them is found.

Storage that is gone for a while, such as a file system that its server mounts anew, is waited for.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import AfterValidator, Field

from data_prep.common.errors import DamageError, UserError, describe_failure

BLOCK = 1 << 20
LARGEST_JSON = 1 << 29
"""Bytes of the largest file that is read as JSON at once: a manifest of a million texts has a fourth of them."""
STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
NUMBERS = re.compile(r"\[\n[\s\d.,e-]+\]")  # a list of numbers, which JSON would spread over a line for each

Result = TypeVar("Result")
VARIABLE = "CLOZE_STORAGE_SECONDS"
"""The variable with the seconds that storage is waited for; a job sets it once it has seen the files."""
SECONDS, PAUSE = 300.0, 1.0
GONE = {errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENODEV}
"""What file systems say whose server, or disk, is gone."""
Amount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A count in a record, as pydantic checks it where one is read."""


def is_inside(path: str) -> bool:
    """Tells whether a path, relative to a folder, names a file in it, as far as its parts say."""
    return not ("\0" in path or {"", ".", ".."} & {*path.split("/")})


def require_inside(path: str) -> str:
    """Returns a path that names a file in the folder of its record; ValueError for another."""
    if not is_inside(path):
        raise ValueError("not a path in the folder")
    return path


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was finished, so that a later change to it is noticed."""

    path: Annotated[str, AfterValidator(require_inside)]
    """Where the file is, relative to the output folder."""
    size: Amount
    """The size of the file in bytes."""
    rows: Amount
    """How many rows or entries the file has, 0 where it is no table."""
    sha256: str
    """The checksum of the content."""

    @classmethod
    def from_file(cls, folder: Path, path: str, rows: int = 0) -> FileRecord:
        """Makes the record of a file that is finished."""
        return cls(path, (folder / path).stat().st_size, rows, sha256(folder / path))

    def find(self, folder: Path) -> Path:
        """Finds the file, of which nothing is read; DamageError unless it is in the folder and has its size.

        A path or a link that leads out of the folder is not followed: nobody who wrote the record made it.
        """
        path = folder / self.path
        try:
            inside = is_inside(self.path) and path.resolve().is_relative_to(folder.resolve())
            there = inside and path.is_file()
            size = path.stat().st_size if there else 0
        except (OSError, ValueError, RuntimeError) as error:  # such as names that are too long, and links in a circle
            raise DamageError(f"{path}: cannot be read: {error}") from error
        if not inside:
            raise DamageError(f"{path}: leads out of {folder}")
        if not there:
            raise DamageError(f"{path}: missing; its record says {self.size:,} bytes")
        if size != self.size:
            raise DamageError(f"{path}: {size:,} bytes, its record says {self.size:,}")
        return path

    def check(self, folder: Path) -> None:
        """Raises DamageError unless the file is in the folder, with the bytes that it was finished with."""
        path = self.find(folder)
        with readable(path, DamageError):
            found = sha256(path)
        if found != self.sha256:
            raise DamageError(
                f"{path}: its SHA-256 is not that of its record: the content changed after it was written"
            )

    def as_json(self) -> dict[str, Any]:
        """Gives the record the form that manifests and records of tasks have it in."""
        return asdict(self)


def sha256(path: Path) -> str:
    """Computes the checksum of the content of a file."""
    return checksum(path, "sha256")


def checksum(path: Path, algorithm: str) -> str:
    """Computes the checksum of the content of a file by an algorithm of hashlib, safe or not."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def refuse_link(path: str, flags: int) -> int:
    """Opens a file, as the `opener` of `open`; fails on a symbolic link, which another user may have planted."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def open_at_once(path: str, flags: int) -> int:
    """Opens a file, as the `opener` of `open`, and does not wait if the path is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its name `path` only when it is complete and on the disk.

    So an interruption leaves the file that was there before, or none, but no half of one. A pipe or a device has no
    name to take, and is written as it comes.
    """
    if is_stream(path):
        opened = _descriptor(path)  # written on from where the shell and others stand in it
        with path.open("ab") if opened is None else open(os.dup(opened), "wb") as file:
            yield file
        return
    if path.is_dir():
        raise UserError(f"{path}: a folder; name a file")
    unfinished = unfinished_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "w+b", opener=refuse_link) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException as error:
        with suppress(OSError):  # it may never have been there
            unfinished.unlink()
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be written: {describe_failure(error)}") from error
        raise


@contextmanager
def writable(place: Path | str, cure: str = "") -> Iterator[None]:
    """Turns an OSError into a UserError, which names what cannot be written and ends with the cure."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {describe_failure(error)}{cure}") from error


@contextmanager
def readable(place: Path | str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turns an OSError into an error of this kind, which names what cannot be read."""
    try:
        yield
    except OSError as error:
        raise kind(f"{place}: cannot be read: {error.strerror or error}") from error


def unfinished_name(path: Path) -> Path:
    """The name that a file or folder has beside its own until it is complete: a hidden one, which no user gives."""
    return path.with_name(f".{path.name}.tmp")


def replaced_name(path: Path) -> Path:
    """The name that a folder keeps beside its own until another has taken its place."""
    return path.with_name(f".{path.name}.old")


def absence(path: Path, what: str = "file") -> str:
    """Says why something that is asked for is not found: that it is not there is only one of the reasons."""
    try:
        path.stat()
    except PermissionError as error:
        return f"permission denied: {error.filename} may not be looked up by this user"
    except OSError as error:
        return f"no such {what}" if error.errno in (errno.ENOENT, errno.ENOTDIR) else f"{error.strerror}"
    return f"not a {what}"


def is_stream(path: Path) -> bool:
    """Tells a pipe, a device or an open descriptor, such as /dev/stdout, from a file or a folder."""
    opened = path.parent.resolve().parts[:2] == ("/", "proc") or _descriptor(path) is not None
    return opened or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def _descriptor(path: Path) -> int | None:
    """The number of this process's open descriptor that a path stands for, such as /dev/stdout."""
    if str(path) in STREAMS:
        return STREAMS[str(path)]
    ours = path.name.isdigit() and path.parent.resolve() == Path("/proc/self/fd").resolve()
    return int(path.name) if ours else None


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    with replacing(path) as file:
        file.write(json_bytes(content))


def write_csv(folder: Path, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> FileRecord:
    """Writes a table as CSV, whole or not at all; returns its record."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((columns, *rows))
    with replacing(folder / name) as file:
        file.write(text.getvalue().encode())
    return FileRecord.from_file(folder, name)


def json_bytes(content: Any) -> bytes:
    """Spells JSON in one form only, so that equal contents have equal hashes."""
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
    return (NUMBERS.sub(lambda match: " ".join(match[0].split()), text) + "\n").encode()


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises DamageError where it is not whole, FileNotFoundError where it is missing."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_JSON:
            raise DamageError(f"{path}: {found.st_size:,} bytes, or no file: not what Cloze writes")
        content = path.read_bytes()
        if content and not content.strip(b"\0"):
            raise DamageError(f"{path}: contains only zeros, as after a crash of the machine or a fault of its disk")
        return json.loads(content)
    except (FileNotFoundError, DamageError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamageError(f"{path}: cannot be read: {error}") from error
    except MemoryError as error:
        raise DamageError(f"{path}: {found.st_size:,} bytes, more than memory has room for") from error


def read_table(path: Path) -> dict[str, Any]:
    """Reads a JSON file of names with values; raises UserError where it is anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a table of names and values")
    return content


def patience(usual: float) -> float:
    """The seconds for which storage is waited for: those of the job, or as many as are usual without one."""
    given = os.environ.get(VARIABLE)
    if given and not re.fullmatch(r"\d{1,6}(\.\d+)?", given, re.ASCII):
        raise UserError(f"{VARIABLE}={given}: give seconds")
    return float(given or usual)


def wait_for_storage(work: Callable[[], Result], there: Path, usual: float = SECONDS) -> Result:
    """Repeats work on files for minutes while their storage is gone; after that its error counts.

    It is gone where a file system says so, or where the path `there`, which was seen before, is not to be seen.
    """
    seconds, begin, told = patience(usual), time.monotonic(), False
    while True:
        try:
            return work()
        except Exception as error:
            missing = not os.path.exists(there)  # Path.exists would raise what storage says that is gone
            if time.monotonic() - begin >= seconds or not (missing or tells_of_gone_storage(error)):
                raise
        if not told:
            told = True
            text = f"warning: {there}: gone, or cannot be reached; waiting up to {seconds:.0f} s for it"
            print(text, file=sys.stderr, flush=True)
        time.sleep(PAUSE)


def tells_of_gone_storage(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is what file systems say whose server, or disk, is gone."""
    while error is not None:
        within = re.search(r"os error (\d+)", str(error))  # as safetensors says it
        if (error.errno if isinstance(error, OSError) else int(within[1]) if within else None) in GONE:
            return True
        error = error.__cause__
    return False
