"""What a reader declares, and the readers that there are: each file of this folder with a `READER`.

A format has the name of its file. Whoever looks for files, reads them or describes them asks the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from data_prep.common.sections import declared_in
from data_prep.readers.foreign import Foreign
from data_prep.readers.reader import Document, Options, Span, UnreadableError


@dataclass(frozen=True)
class Reader:
    """A format: how to recognise it, how to divide its files among workers, how to read them."""

    documents: Callable[[Span, Options], Iterator[Document]]
    """Yields the documents that begin in a span; raises UnreadableError at a damage, after all that comes before it."""
    spans: Callable[[Path, int], list[Span]]
    """Divides a file into spans of about the given number of bytes."""
    suffixes: tuple[str, ...] = ()
    """Ends of the names of files that are of this format, in small letters without .gz and the like."""
    first_bytes: tuple[bytes, ...] = ()
    """What files of this format begin with, without a byte-order mark."""
    detect: Callable[[str, bytes], bool] = lambda name, head: False
    """Recognises other files of this format by both, where it takes more than to compare."""
    order: int = 0
    """Formats are tried on a file in this order, and the files of a source are read in it. One that takes files of
    others comes after those."""
    is_plain: bool = False
    """Whether a file is plain text, which no more than its look tells from another plain text, or from no text."""
    is_binary: bool = False
    """Whether a file is no text."""
    has_fields: bool = False
    """Whether the text of a record is in one of several fields, which --text-field names."""
    has_sentences: bool = False
    """Whether the passages are sentences already."""
    find_fault: Callable[[Path, bytes], Foreign | None] = lambda path, head: None
    """Tells why a file that looks like this format cannot be read; the user may say that a text can be."""
    describe: Callable[[str, str], str] = lambda path, text_field: ""
    """Adds to the description of a source, of which this is the first file."""
    list_files: Callable[[], list[Path]] | None = None
    """Lists the files that `--docs` with the name of the format stands for, where it does."""

    def recognises(self, name: str, head: bytes) -> bool:
        """Whether a file of this name, in small letters without .gz and the like, and these first bytes is of it."""
        return name.endswith(self.suffixes) or head.startswith(self.first_bytes) or self.detect(name, head)

    def read(self, span: Span, options: Options) -> Iterator[Document]:
        """Yields the documents that begin in a span, up to a damage, which it adds to the problems."""
        try:
            yield from self.documents(span, options)
        except UnreadableError as error:
            options.problems.leave_file_out(error)


@cache
def list_readers() -> dict[str, Reader]:
    """Lists the readers by the names of their formats, in their order."""
    declared: dict[str, Reader] = declared_in(__file__, __package__ or "", "READER")
    return dict(sorted(declared.items(), key=lambda item: item[1].order))
