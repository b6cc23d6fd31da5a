"""Keeps a command from replacing files by mistake.

What exists is renewed where the same command made it of the same sources, which a record beside it says
(`.NAME.made.json`, with checksums: what somebody has changed since then is theirs), or replaced where the user gives
--replace. What the command reads stays in any case, by whatever name or link it is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError, find_obstacle
from data_prep.common.files import FileRecord, is_stream, read_json, replaced_name, unfinished_name, write_json

RECORD = ".{}.made.json"
Files = list[dict[str, Any]]
"""Files with their sizes and checksums, by their paths beside the record."""


@contextmanager
def making(places: Sequence[Path], command: str, sources: Sequence[Path], replace: bool = False) -> Iterator[None]:
    """Guards the writing of files or folders that lie side by side: refuses beforehand to replace what is not ours to
    replace, and remembers afterwards what was made of which sources."""
    places = [place if is_stream(place) else _named(place) for place in places]
    taken = [place for place in places if os.path.lexists(place) and not is_stream(place)]
    refuse_inputs([place for place in places if not is_stream(place)], sources)
    record = places[0].with_name(RECORD.format(places[0].name))
    around = record.parent.resolve()
    made = {"command": command, "sources": [os.path.relpath(source.resolve(), around) for source in sources]}
    ours = _renewed(record, made, taken)
    if ours is None and not replace:
        _refuse_taken(taken, command)
    nameable = all(source.is_file() or source.is_dir() for source in sources)  # nobody can name what came by a pipe
    if not nameable or any(map(is_stream, places)):
        yield
        return
    free = [place for place in places if place not in taken]
    files, was_there = ours or [], record.parent.exists()
    _remember(record, {**made, "begun": [place.name for place in free], "files": files})
    try:
        yield
        files = _files(places)
    except BaseException:
        files += _files(free)
        raise
    finally:
        _remember(record, {**made, "files": files})
        if not files and not was_there:
            with suppress(OSError):
                record.parent.rmdir()


def refuse_inputs(places: Sequence[Path], sources: Sequence[Path], flag: str = "--out") -> None:
    """Raises UserError where something that is read would be written, however links call it."""
    for place in places:
        for source in sources:
            if any(_is_same(name, source) for name in (place, unfinished_name(place), replaced_name(place))):
                raise UserError(f"{flag} {place}: is what is read, {source}; name another {flag}")
            if place.is_file() and _is_same(place.parent, source):
                raise UserError(f"{flag} {place}: belongs to what is read, {source}; name another {flag}")


def _named(place: Path) -> Path:
    """The path of a place with its name at the end, also for the folder that the user is in."""
    named = Path(os.path.abspath(place))
    if not named.name:
        raise UserError(f"--out {place}: the root of all folders; name another --out")
    if obstacle := find_obstacle(named.parent):
        raise UserError(f"--out {place}: cannot be written: {obstacle}")
    return named


def _is_same(place: Path, source: Path) -> bool:
    return place.exists() and source.exists() and place.samefile(source)


def _refuse_taken(taken: Sequence[Path], command: str) -> None:
    """Raises UserError for the first place that holds something."""
    for place in taken:
        holds = any(place.iterdir()) if place.is_dir() else not place.is_file() or place.stat().st_size > 0
        if holds:
            raise UserError(
                f"--out {place}: exists, and was not made by {command} of the same source, or was changed since; "
                "name another --out, or replace it on purpose with --replace"
            )


def _renewed(record: Path, made: dict[str, Any], taken: Sequence[Path]) -> Files | None:
    """The files that are there, where this command has made all of them of these sources; else None.

    The record has their checksums; of a command that was killed before, the names that were free when it began.
    """
    with suppress(OSError, UserError, KeyError, TypeError):
        content = read_json(record)
        if all(content[name] == value for name, value in made.items()):
            files, begun = _files(taken), content.get("begun", [])
            same = all(file in content["files"] or Path(file["path"]).parts[0] in begun for file in files)
            return files if same and all(place.exists() for place in taken) else None
    return None


def _remember(record: Path, content: dict[str, Any]) -> None:
    """Writes the record, or none where nothing is made; where it cannot be written, nothing is renewed unasked."""
    with suppress(UserError, OSError):
        if content["files"] or content.get("begun"):
            write_json(record, content)
        else:
            record.unlink(missing_ok=True)


def _files(places: Sequence[Path]) -> Files:
    """The records of all files at these places."""
    found = []
    for place in places:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        paths = [str(path.relative_to(place.parent)) for path in files if path.is_file()]
        found += [FileRecord.from_file(place.parent, path).as_json() for path in paths]
    return found
