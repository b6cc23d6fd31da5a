"""What a command is going to write takes the place of nothing by mistake.

What exists is renewed where the same command made it of the same sources, which a record beside it says
(`.NAME.made.json`, with checksums: what somebody has changed since then is theirs), or replaced where the user gives
--replace. What the command reads stays in any case, by whatever name or link it is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, is_stream, read_json, write_json

RECORD = ".{}.made.json"


@contextmanager
def making(places: Sequence[Path], command: str, sources: Sequence[Path], replace: bool = False) -> Iterator[None]:
    """Around the writing of files or folders that lie side by side: refuses beforehand to replace what is not ours to
    replace, and remembers afterwards what was made of which sources."""
    first = places[0]
    record, around = first.with_name(RECORD.format(first.name)), first.parent.resolve()
    made = {"command": command, "sources": [os.path.relpath(source.resolve(), around) for source in sources]}
    taken = [place for place in places if os.path.lexists(place) and not is_stream(place)]
    refuse_inputs(taken, sources)
    if not _renews(record, made, taken):
        for place in taken:
            if within := [source for source in sources if place.is_file() and _is_same(place.parent, source)]:
                raise UserError(f"--out {place}: belongs to what is read, {within[0]}; name another --out")
            if not replace and _holds_something(place):
                raise UserError(
                    f"--out {place}: exists, and was not made by {command} of the same source, or was changed since; "
                    "name another --out, or replace it on purpose with --replace"
                )
    yield
    known = all(source.is_file() or source.is_dir() for source in sources)  # nobody can name what came through a pipe
    if known and not any(map(is_stream, places)):
        write_json(record, {**made, "files": _files(places)})


def refuse_inputs(places: Sequence[Path], sources: Sequence[Path]) -> None:
    """Raises UserError where something that is read would be written, however links call it."""
    for place in places:
        for source in sources:
            if _is_same(place, source):
                raise UserError(f"--out {place}: is what is read, {source}; name another --out")


def _is_same(place: Path, source: Path) -> bool:
    return place.exists() and source.exists() and place.samefile(source)


def _holds_something(place: Path) -> bool:
    if place.is_dir():
        return any(place.iterdir())
    return not place.is_file() or place.stat().st_size > 0


def _renews(record: Path, made: dict[str, Any], taken: Sequence[Path]) -> bool:
    """Whether all that is there is what this command has made of these sources."""
    try:
        known = read_json(record)
        same = all(known[name] == value for name, value in made.items())
        return same and all(file in known["files"] for file in _files(taken))
    except (OSError, UserError, KeyError, TypeError):
        return False


def _files(places: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of all files at these places."""
    found = []
    for place in places:
        files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
        found += [FileRecord.of(place.parent, str(path.relative_to(place.parent))).as_json() for path in files]
    return found
