"""Finds the files that --docs names, and divides them into tasks."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data_prep.common.errors import UserError, quote
from data_prep.readers import READERS, demo
from data_prep.readers.books import SUFFIXES
from data_prep.readers.cutting import HEAD, Look, look
from data_prep.readers.foreign import HTML, NOT_WHOLE, OVER_LINES, WEB_PAGE, Foreign, not_text, unknown_text
from data_prep.readers.jsonlines import goes_over_lines
from data_prep.readers.listing import list_files
from data_prep.readers.parquet import is_whole
from data_prep.readers.reader import Problems, Span, UnreadableError, unpacked_name

TEXTS = ("sentences", "text")
"""Formats that differ only in how a text looks, so that one may be taken for the other."""
BY_CONTENT, BY_NAME, AS_SAID = "by content", "by name", "as --format says"
AS_OTHERS = "as most here, though with what looks like a sentence a line"
NO_NAME = b"\x00"  # the beginning of a file that only its name can make a text


class Found(NamedTuple):
    """The format of a file."""

    format: str
    """The name of the reader that reads the file."""
    how: str
    """How the format was found: `BY_CONTENT`, `BY_NAME`, `AS_SAID` or `AS_OTHERS`."""


ROW_GROUPS = ("parquet", "arrow")
"""Formats that are no text, and are opened to see whether they are whole."""


def find_format(path: Path, seen: Look, said: str | None, keeps_whole_part: bool = False) -> Found | Foreign:
    """Finds the format of a file, unless the user names it; returns a Foreign where it cannot be read.

    A source that is said to be plain text may have JSON lines and the like beside it: nobody wants those read as text.
    A file whose head is damaged is read where the user wants what is whole of it, if there is anything.
    """
    head = seen.head
    if seen.is_damaged and not (head and keeps_whole_part):
        return Foreign(f"truncated or damaged {path.suffix}, or not compressed at all", "fetch or pack it anew")
    kind = _format_of(path, head, said)
    is_broken = isinstance(kind, Found) and kind.format in ROW_GROUPS and not is_whole(str(path))
    return NOT_WHOLE if is_broken else kind


def _format_of(path: Path, head: bytes, said: str | None) -> Found | Foreign:
    """Finds the format of a file by its name and first bytes, unless the user names it."""
    name = unpacked_name(path).lower()
    reader = next((reader for reader in READERS.values() if reader.detect(name, head)), None)
    is_record = reader is not None and reader.name not in TEXTS and not name.endswith(SUFFIXES)
    if said is not None and not (said in TEXTS and is_record):
        return (not_text(head) if said not in ROW_GROUPS else None) or Found(said, AS_SAID)
    if (reader is None or reader.name in (*TEXTS, "csv")) and (foreign := not_text(head)):
        return foreign
    if (reader is None or reader.name in TEXTS) and HTML.match(head):  # its tags and scripts are no text
        return WEB_PAGE
    if reader is None:
        return unknown_text(name, head)
    if reader.name == "jsonl" and goes_over_lines(head):
        return OVER_LINES
    return Found(reader.name, BY_NAME if reader.detect(name, NO_NAME) else BY_CONTENT)


LABEL = re.compile(r"\w[\w.+-]*")  # the name of a source, as in LABEL=PATH
MOST_NAMED = 5  # kinds of files that a message names
LANDMARKS = 8  # one in so many files ends a task that is half full, wherever the tasks before it end
FEWEST_BUNDLES, SMALLEST_BUNDLE, LARGEST_BUNDLE = 24, 1 << 20, 16 << 20  # how many, and their sizes in bytes


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    source: str
    """The name of the source that the file belongs to."""
    path: str
    name: str
    """The name of the file in the manifest, without what is particular to this machine."""
    size: int
    """The size of the file in bytes."""
    format: str
    """The name of the reader that reads the file."""
    how: str = BY_CONTENT
    """How the format was found."""
    content: str = ""
    """Key of the content (`look`): a change of the content changes it, also where the size stays."""
    place: tuple[int, int] = (0, 0)
    """Where the file system has the file, however it is named: its device and its number there."""
    written: int = 0
    """When the file was last written to, in nanoseconds."""


@dataclass(frozen=True)
class Bundle:
    """The input of one task: spans of files of one source and format, some megabytes together."""

    name: str
    """A hash of the spans and contents: another run gives the same text the same name."""
    source: str
    format: str
    spans: tuple[Span, ...]
    weight: int
    """How many bytes the spans take on the disk."""
    part_bytes: int
    """How much text goes into one file of documents, in bytes."""
    called: tuple[tuple[str, str], ...] = ()
    """The paths of the files, and their names in the manifest."""


def find_files(
    arguments: list[str],
    formats: Mapping[str, str] | None = None,
    out: Path | None = None,
    problems: Problems | None = None,
) -> list[SourceFile]:
    """Finds all files that the arguments name, in an order of their names alone; none of the output folder.

    `formats` has what the user says of the formats, by source, with "" for all others. A file of no format is an error,
    or one of the problems where the user wants such files left out.
    """
    formats, groups = formats or {}, group_sources(arguments)
    check_names("--format", formats, [name for name, _ in groups])
    problems = problems or Problems("fail")
    found = [_find_source(name, paths, formats.get(name, formats.get("")), out, problems) for name, paths in groups]
    alike = _find_alike([file for group in found for file in group])
    files = [
        replace(file, format="text", how=AS_OTHERS) if file in alike else file
        for group in found
        for file in sorted(group, key=lambda file: list(READERS).index("text" if file in alike else file.format))
    ]
    return _take_once(files, problems)


def _identify(file: SourceFile) -> tuple[object, ...]:
    """Returns what all names of a file have in common: its place, size and content."""
    return (*file.place, file.size, file.content)


def _take_once(files: list[SourceFile], problems: Problems) -> list[SourceFile]:
    """Returns each file once. Other names of a file are a UserError, or left out where the user wants that."""
    first: dict[tuple[object, ...], SourceFile] = {}
    for file in files:  # a file system may give a number twice
        first.setdefault(_identify(file), file)
    again = [(file, other) for file in files if (other := first[_identify(file)]) is not file]
    if again and problems.policy != "skip":
        file, other = again[0]
        fault = "is named twice" if file.path == other.path else f"is {other.path} by another name"
        cure = "each text counts once; --errors skip leaves the other names out"
        raise UserError(f"--docs: {file.path} {fault} ({len(again):,} in all); {cure}")
    problems.names |= {file.path: f"{file.source}/{file.name}" for file, _ in again}
    problems.skipped += [f"{file.path}: another name of {other.source}/{other.name}" for file, other in again]
    return list(first.values())


def check_names(flag: str, values: Mapping[str, object], sources: list[str]) -> None:
    """Raises UserError where a flag such as --text-field NAME=FIELD names a source that is not there."""
    for name, value in values.items():
        if name and name not in sources:
            raise UserError(
                f"{flag} {name}={value}: there is no source {name}, only {', '.join(dict.fromkeys(sources))}\n"
                "a source has the name of its folder or file, or one that you give it: --docs NAME=PATH"
            )


def group_sources(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """Groups the arguments into sources, which have a name and paths.

    Files of one folder that stand next to each other are one source, since a shell spells out its globs.
    """
    groups: list[tuple[str, list[str]]] = []
    last = None
    for argument in arguments:
        label, path = _split_label(argument)
        parent = os.path.dirname(os.path.abspath(path)) if not label and os.path.isfile(path) else None
        if parent is not None and parent == last:
            groups[-1] = (os.path.basename(parent) or "text", [*groups[-1][1], path])
        else:
            groups.append((label or _name_source(path), [path]))
        last = parent
    return groups


def _name_source(path: str) -> str:
    """Names a source after a folder, a file without its suffixes, or the folder that a glob begins with."""
    while glob.has_magic(path) and not os.path.exists(path):
        path = os.path.dirname(path)
    place = Path(os.path.abspath(path))
    return (Path(unpacked_name(place)).stem if os.path.isfile(place) else place.name) or "text"


def _split_label(argument: str) -> tuple[str, str]:
    """Parts an argument into the name that the user gives the source, which may be none, and the path."""
    label, _, path = argument.partition("=")
    if path and LABEL.fullmatch(label) and not os.path.exists(argument):
        return label, path
    return "", argument


def _find_source(
    name: str, arguments: list[str], format: str | None, out: Path | None, problems: Problems
) -> list[SourceFile]:
    """Finds the files that some arguments name as one source; empty files are left out.

    Every file is opened once, and nothing of what it holds is kept. Where one has no format it raises UserError, or
    leaves the file out.
    """
    path, skips = arguments[0], problems.policy == "skip"
    if path == demo.NAME and not os.path.exists(path):
        return [_demo_file(name, str(file)) for file in demo.files()]
    listing = list_files(arguments, out, problems)
    places = [*listing.files, *listing.foreign, *listing.unreadable]
    if not places:
        raise UserError(f"--docs {path}: no file with anything in it")
    names = _name_files(path, places)
    problems.names |= {place: f"{name}/{names[place]}" for place in places}
    problems.skipped += [error.what for error in listing.unreadable.values()]
    found, foreign = [], dict(listing.foreign)
    for file, status in listing.files.items():
        try:
            seen = look(file, status.st_size)
        except UnreadableError as error:
            problems.lose(error)
            continue
        if not seen.head.strip() and len(seen.head) < HEAD and not seen.is_damaged:  # nothing but line ends
            continue
        kind = find_format(Path(file), seen, format, skips)
        if isinstance(kind, Foreign):
            foreign[file] = kind
        else:
            found.append(_source_file(name, file, names[file], status, kind, seen.content))
    if foreign and (not skips or not found):
        raise UserError(_foreign_message(name, path, foreign, found))
    if not found:
        why = f"that can be read; such as {problems.skipped[-1]}" if problems.skipped else "with anything in it"
        raise UserError(f"--docs {path}: no file {why}")
    problems.skipped += [f"{file}: {kind.what}" for file, kind in foreign.items()]
    return found


def _demo_file(source: str, path: str) -> SourceFile:
    """Describes a file of the corpus that every machine has."""
    status, name = os.stat(path), "/".join(Path(path).parts[-3:])
    return _source_file(source, path, name, status, Found(demo.NAME, BY_CONTENT), look(path, status.st_size).content)


def _source_file(source: str, path: str, name: str, status: os.stat_result, kind: Found, content: str) -> SourceFile:
    """Makes the description of a file."""
    place, written = (status.st_dev, status.st_ino), status.st_mtime_ns
    return SourceFile(source, path, name, status.st_size, kind.format, kind.how, content, place, written)


def find_changed(files: Iterable[SourceFile]) -> list[str]:
    """Lists the paths of files that were written to, replaced or removed since they were found."""

    def is_as_found(file: SourceFile) -> bool:
        try:
            status = os.stat(file.path)
        except OSError:
            return False
        now = (status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))
        return now == (file.size, file.written, file.place)

    return [file.path for file in files if not is_as_found(file)]


def _name_files(path: str, files: list[str]) -> dict[str, str]:
    """Names files as the manifest does: from the folder that was given, or that they have in common."""
    places = {file: os.path.abspath(file) for file in files}
    root = path if os.path.isdir(path) else os.path.commonpath([os.path.dirname(place) for place in places.values()])
    base = os.path.join(os.path.abspath(root), "")
    return {
        file: place[len(base) :] if place.startswith(base) else Path(os.path.relpath(file, root)).as_posix()
        for file, place in places.items()
    }


def _find_alike(files: list[SourceFile]) -> set[SourceFile]:
    """Finds the texts that look like sentences but are to be read as most of their source, which are paragraphs.

    Raises UserError where half of the texts of a source look like that, or more, but not all.
    """
    alike: set[SourceFile] = set()
    sources: defaultdict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        sources[file.source].append(file)
    for name, own in sources.items():
        sentences, paragraphs = ([file for file in own if file.format == format] for format in TEXTS)
        if len(sentences) < len(paragraphs):
            alike.update(sentences)
        elif paragraphs:
            number = len(sentences) + len(paragraphs)
            flags = [quote(f"{name}={format}") for format in ("text", "sentences")]
            raise UserError(
                f"{name}: {len(sentences):,} of {number:,} files seem to have one sentence a line (such as "
                f"{sentences[0].path}), the others paragraphs (such as {paragraphs[0].path})\n"
                f"say how to read all of them: --format {flags[0]} or --format {flags[1]}"
            )
    return alike


def _foreign_message(name: str, path: str, foreign: Mapping[str, Foreign], found: list[SourceFile]) -> str:
    """Describes files that cannot be read, and cures: for one of each kind, then for all."""
    kinds: defaultdict[Foreign, list[str]] = defaultdict(list)
    for file, kind in foreign.items():
        kinds[kind].append(file)
    lines = [f"--docs {path}: {len(foreign)} of {len(foreign) + len(found)} files cannot be read"]
    for kind, files in list(kinds.items())[:MOST_NAMED]:
        lines.append(f"  {files[0]}: {kind.what}" + (f" ({len(files)} such files)" if len(files) > 1 else ""))
        lines += [f"    {kind.cure_for(Path(files[0]))}"] if kind.cure else []
    lines += [f"  and {len(kinds) - MOST_NAMED} other kinds of files"] if len(kinds) > MOST_NAMED else []
    if found:
        lines.append("--errors skip leaves out what cannot be read, and lists it")
    lines += _suggest_globs(path, [Path(file.path) for file in found], [Path(file) for file in foreign])
    if any(kind.is_text for kind in kinds) and all(file.format == "text" for file in found):
        lines.append(f"or --format {quote(f'{name}=text')} reads all of {name} as plain text")
    return "\n".join(lines)


def _suggest_globs(path: str, wanted: list[Path], others: list[Path]) -> list[str]:
    """Spells the globs that name the wanted files of a folder, where their suffixes tell them from the others."""
    ours, theirs = ({"".join(file.suffixes[-2:]) for file in files} for files in (wanted, others))
    if not os.path.isdir(path) or not ours or "" in ours or ours & theirs:
        return []
    deep = "**/" if any(file.parent != Path(path) for file in wanted) else ""
    globs = [quote(f"{glob.escape(str(Path(path)))}/{deep}*{suffix}") for suffix in sorted(ours)]
    return [f"or name what to read: --docs {' '.join(globs)}"]


def make_bundles(files: list[SourceFile]) -> list[Bundle]:
    """Divides the files into tasks: small files together, large ones in parts where their format allows it.

    The division depends on the files alone, never on the number of workers, and so do all bytes that come of it. A file
    that changes or is added changes few tasks: after some files more, the division is as it was without it.
    """
    total = sum(file.size for file in files)
    bundle_bytes = 1 << (min(max(total // FEWEST_BUNDLES, SMALLEST_BUNDLE), LARGEST_BUNDLE).bit_length() - 1)
    bundles: list[Bundle] = []
    names: Counter[str] = Counter()
    spans: list[tuple[SourceFile, Span]] = []
    weight = 0

    def close() -> None:
        nonlocal spans, weight
        if spans:
            name = _name_of_spans(spans, bundle_bytes)
            names[name] += 1
            first, own = spans[0][0], tuple(span for _, span in spans)
            called = tuple(dict.fromkeys((file.path, f"{file.source}/{file.name}") for file, _ in spans))
            again = f"-{names[name]}" if names[name] > 1 else ""  # another source has the same files
            bundles.append(Bundle(name + again, first.source, first.format, own, weight, bundle_bytes, called))
        spans, weight = [], 0

    for file in files:
        if spans and (spans[0][0].source, spans[0][0].format) != (file.source, file.format):
            close()
        parts = READERS[file.format].spans(Path(file.path), bundle_bytes)
        for span in parts:
            spans.append((file, span))
            weight += file.size * (span.end - span.start) // parts[-1].end  # a span may count something else than bytes
            if weight >= bundle_bytes:
                close()
        if 2 * weight >= bundle_bytes and zlib.crc32(file.name.encode()) % LANDMARKS == 0:
            close()
    close()
    return bundles


def _name_of_spans(spans: list[tuple[SourceFile, Span]], part_bytes: int) -> str:
    """Names a task after what it reads."""
    first = spans[0][0]
    contents = [(file.name, file.content, span.start, span.end) for file, span in spans]
    return hashlib.sha256(repr((first.source, first.format, part_bytes, contents)).encode()).hexdigest()[:16]
