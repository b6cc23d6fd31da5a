"""Output that nobody reads any more is dropped: a closed pipe or terminal ends no work."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from contextlib import suppress
from typing import Any

GONE = "nobody reads {} any more: what would be written there is dropped, and the work goes on"

notes: list[str] = []
"""What became of this process's streams, a sentence for each that has lost its reader."""


def drop_unread() -> None:
    """Lets this process's output and errors lose their readers. Call it before anything keeps one of the streams."""
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _reopen(_Stream(stream.fileno(), title), stream))


def _reopen(raw: _Stream, stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Makes a stream of text with the settings of the old one that writes through `raw`."""
    stream.flush()
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    how: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, **how)


class _Stream(io.FileIO):
    """A stream whose reader may go away: what is written from then on is dropped."""

    def __init__(self, number: int, title: str) -> None:
        super().__init__(number, "wb", closefd=False)
        self._title = title

    def write(self, content: Any) -> int:
        """Writes as much as there is room for; what has no reader counts as written."""
        try:
            return super().write(content)
        except OSError as error:
            if not self._is_unread(error):
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())  # what is started from here writes there too
        os.close(null)
        notes.append(GONE.format(self._title))
        if self.fileno() != 2:
            with suppress(OSError, ValueError):
                print(f"warning: {notes[-1]}", file=sys.stderr, flush=True)
        return len(memoryview(content).cast("B"))

    def _is_unread(self, error: OSError) -> bool:
        """Whether it is for want of a reader that this cannot be written: EIO is a closed terminal, or a bad disk."""
        if error.errno == errno.EIO:
            return not stat.S_ISREG(os.fstat(self.fileno()).st_mode)
        return error.errno == errno.EPIPE
