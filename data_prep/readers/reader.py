"""What all readers work with: spans of files, their settings, documents, and what may be wrong with a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data_prep.common.errors import UserError, quote
from data_prep.settings import Errors

NOT_UTF8 = "is it Latin-1? iconv -f latin1 -t utf-8 OLD > NEW; --errors replace reads on with U+FFFD"
LEAVES_OUT = "--errors skip leaves it out and lists it"
Row = TypeVar("Row")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def unpacked_name(path: Path) -> str:
    """Removes .gz and the like from the name of a file."""
    return path.stem if path.suffix in COMPRESSED else path.name


@dataclass(frozen=True)
class Document:
    """A text with its name: the unit that readers produce and that everything after them keeps whole."""

    id: str
    title: str
    passages: list[str]
    """The paragraphs in their order, or the sentences where the format has one on every line."""

    @property
    def size(self) -> int:
        """Counts the characters of the text."""
        return sum(map(len, self.passages))


def group_rows(
    rows: Iterable[Row], measure: Callable[[Row], int], most: int, count: float = math.inf
) -> Iterator[list[Row]]:
    """Groups rows that follow each other; a group ends with the one by which it measures `most`, or has this count."""
    group: list[Row] = []
    size = 0
    for row in rows:
        group.append(row)
        size += measure(row)
        if size >= most or len(group) >= count:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass(frozen=True)
class Span:
    """A part of a file that one worker reads: the records that begin in it, to their ends."""

    path: str
    start: int
    end: int

    def name_place(self, offset: int) -> str:
        """Names a place in the file, for messages."""
        if not self.path.endswith(COMPRESSED):
            return f"{self.path}: byte {offset:,}"
        streams = f" in the streams from byte {self.start:,} on" if self.start else ""
        return f"{self.path}: byte {offset:,} of the uncompressed text{streams}"


class UnreadableError(UserError):
    """An error for what cannot be read of a file of a source, which --errors skip lists instead of stopping for it."""

    def __init__(self, what: str, cure: str = LEAVES_OUT) -> None:
        super().__init__(what, cure)  # as it is made anew from, when it comes from a worker
        self.what = what
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.what}\n{self.cure}"


@dataclass
class Problems:
    """Treats faults of the input as --errors says: it stops the run, repairs a text, or leaves it out and lists it."""

    policy: Errors
    num_replaced: int = 0
    skipped: list[str] = field(default_factory=list)
    """Faults of documents and files that were left out; each begins with the path of a file."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of the files in the manifest (source and name), by their paths."""
    no_text: Counter[str] = field(default_factory=Counter)
    """Numbers of pages, lines and files that are no text by the rules of their format, by what they are."""

    def decode(self, data: bytes, span: Span, offset: int) -> str | None:
        """Turns UTF-8 into text; returns None where the document is to be left out."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            bad = data[error.start : error.start + 4].hex(" ")
            what = f"{span.name_place(offset + error.start)}: not UTF-8 ({bad})"
            return self._repair(data.decode(errors="replace"), what, NOT_UTF8)

    def clean(self, text: str, where: object) -> str | None:
        """Frees a text of lone surrogates, which JSON can spell and no file can hold; None leaves the document out."""
        try:
            text.encode()
            return text
        except UnicodeEncodeError as error:
            what = f"{where}: half a surrogate pair (U+{ord(text[error.start]):04X})"
            return self._repair(text.encode(errors="replace").decode(), what, "--errors replace writes '?'")

    def _repair(self, repaired: str, what: str, cure: str) -> str | None:
        """Takes the repaired text where that is wanted; otherwise treats it as a document that cannot be read."""
        if self.policy == "replace":
            self.num_replaced += 1
            return repaired
        self.leave_document_out(what, cure)
        return None

    def leave_document_out(self, what: str, cure: str = "") -> None:
        """Stops the run for a document that cannot be read, or leaves it out and lists it."""
        if self.policy != "skip":
            raise UserError(f"{what}\n{cure + '; ' if cure else ''}--errors skip leaves the document out and lists it")
        self.skipped.append(what)

    def leave_file_out(self, error: UnreadableError) -> None:
        """Stops the run for a file that cannot be read any further, or lists it; once for all its spans here."""
        if self.policy != "skip":
            raise error
        if error.what not in self.skipped:
            self.skipped.append(error.what)


def replace_path(fault: str, names: Mapping[str, str]) -> str:
    """Replaces the path in a fault by the name that the file has in the manifest."""
    at = fault.find(": ")
    while at > 0 and fault[:at] not in names:
        at = fault.find(": ", at + 1)
    return names[fault[:at]] + fault[at:] if at > 0 else fault


@dataclass(frozen=True)
class Options:
    """The settings that readers depend on."""

    problems: Problems
    text_field: str = "text"
    source: str = "NAME"
    """The name of the source, which messages about the field use."""
    limit: int = 1 << 62
    """For a sample: bytes after which a file that is one document may be cut."""

    def explain_missing_text(self, where: object, fields: Mapping[str, object]) -> UnreadableError:
        """Makes the error for a record without a text in its field; it suggests the field with the longest text."""
        sizes = {name: len(value) for name, value in fields.items() if isinstance(value, str | bytes)}
        likely = max(sizes, key=sizes.__getitem__, default="FIELD")
        fault = "the field {!r} holds no text" if self.text_field in fields else "no text in a field {!r}"
        what = f"{where}: {fault.format(self.text_field)}; there is: {', '.join(fields) or 'none'}"
        return UnreadableError(what, f"--text-field {quote(f'{self.source}={likely}')} names the field with the text")
