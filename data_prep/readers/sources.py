"""Finds the files that --docs names, says what was found, and divides them into tasks."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.common.errors import UserError, quote
from data_prep.common.languages import language_label
from data_prep.readers.cutting import HEAD, Ends, read_ends
from data_prep.readers.foreign import Foreign, describe_unknown, not_text
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.listing import list_files
from data_prep.readers.reader import Problems, Span, UnreadableError, unpacked_name
from data_prep.settings import Settings
from data_prep.shards import ANOTHER_NAME


def find_format(path: Path, ends: Ends, said: str | None, keeps_whole_part: bool = False) -> str | Foreign:
    """Finds the name of the format of a file, unless the user says it; returns a Foreign where it cannot be read.

    A file whose head is damaged is read where the user wants what is whole of it, if there is anything. A source that
    is said to be plain text may have JSON lines and the like beside it: nobody wants those read as text.
    """
    head, readers = ends.head, list_readers()
    if ends.is_damaged and not (head and keeps_whole_part):
        return Foreign(f"truncated or damaged {path.suffix}, or not compressed at all", "fetch or pack it anew")
    name = unpacked_name(path).lower()
    format = next((one for one, reader in readers.items() if reader.recognises(name, head)), None)
    is_record = format is not None and not readers[format].is_plain
    is_named_text = any(reader.is_plain and name.endswith(reader.suffixes) for reader in readers.values())
    is_said = said is not None and not (readers[said].is_plain and is_record and not is_named_text)
    format = said if is_said else format
    if format is None:
        return not_text(head) or describe_unknown(head)
    reader = readers[format]
    is_told_by_content = is_record and not is_said and not name.endswith(reader.suffixes)
    if not (reader.is_binary or is_told_by_content) and (foreign := not_text(head)):
        return foreign
    return (None if is_said and not reader.is_binary else reader.find_fault(path, head)) or format


LABEL = re.compile(r"\w[\w.+-]*")  # the name of a source, as in LABEL=PATH
MOST_LISTED = 10  # files left out that are named; the manifest names all
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
    """The name of the format of the file."""
    content: str = ""
    """Key of the content (`read_ends`): a change of the content changes it, also where the size stays."""
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
    formats, groups, readers = formats or {}, group_sources(arguments), list_readers()
    check_names("--format", formats, [name for name, _ in groups])
    for name, said in formats.items():
        if said not in readers:
            raise UserError(f"--format {f'{name}=' if name else ''}{said}: there is {', '.join(readers)}")
    problems = problems or Problems("fail")
    found = (_find_source(name, paths, formats.get(name, formats.get("")), out, problems) for name, paths in groups)
    order = list(readers)
    return _take_once([file for own in found for file in sorted(own, key=lambda f: order.index(f.format))], problems)


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
    problems.skipped += [f"{file.path}: {ANOTHER_NAME} {other.source}/{other.name}" for file, other in again]
    return list(first.values())


def check_names(flag: str, values: Mapping[str, object], sources: list[str]) -> None:
    """Raises UserError where a flag such as --text-field NAME=FIELD names a source that is not there."""
    for name, value in values.items():
        if name and name not in sources:
            cure = "a source has the name of its folder or file, or one that you give it: --docs NAME=PATH"
            known = ", ".join(dict.fromkeys(sources))
            raise UserError(f"{flag} {name}={value}: there is no source {name}, only {known}\n{cure}")


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
    corpus = list_readers().get(path)
    if corpus and corpus.list_files and not os.path.exists(path):
        return [
            _describe_file(name, str(file), "/".join(file.parts[-3:]), file.stat(), path, None)
            for file in corpus.list_files()
        ]
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
            ends = read_ends(file, status.st_size)
        except UnreadableError as error:
            problems.leave_file_out(error)
            continue
        if not ends.head.strip() and len(ends.head) < HEAD and not ends.is_damaged:  # nothing but line ends
            continue
        kind = find_format(Path(file), ends, format, skips)
        if isinstance(kind, Foreign):
            foreign[file] = kind
        else:
            found.append(_describe_file(name, file, names[file], status, kind, ends.content))
    if foreign and (not skips or not found):
        raise UserError(_foreign_message(name, path, foreign, found))
    if not found:
        why = f"that can be read; such as {problems.skipped[-1]}" if problems.skipped else "with anything in it"
        raise UserError(f"--docs {path}: no file {why}")
    problems.skipped += [f"{file}: {kind.what}" for file, kind in foreign.items()]
    return found


def _describe_file(
    source: str, path: str, name: str, status: os.stat_result, format: str, content: str | None
) -> SourceFile:
    """Makes the description of a file; reads its ends for the key of its content where that is not given."""
    content = content or read_ends(path, status.st_size).content
    place = (status.st_dev, status.st_ino)
    return SourceFile(source, path, name, status.st_size, format, content, place, status.st_mtime_ns)


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
    folders = [os.path.dirname(os.path.abspath(file)) for file in files]
    root = path if os.path.isdir(path) else os.path.commonpath(folders)
    return {file: os.path.relpath(file, root) for file in files}


def _foreign_message(name: str, path: str, foreign: Mapping[str, Foreign], found: list[SourceFile]) -> str:
    """Describes files that cannot be read, and cures: for one of each kind, then for all."""
    kinds: defaultdict[Foreign, list[str]] = defaultdict(list)
    for file, kind in foreign.items():
        kinds[kind].append(file)
    lines = [f"--docs {path}: {len(foreign)} of {len(foreign) + len(found)} files cannot be read"]
    for kind, files in kinds.items():
        lines.append(f"  {files[0]}: {kind.what}" + (f" ({len(files)} such files)" if len(files) > 1 else ""))
        lines += [f"    {kind.cure_for(Path(files[0]))}"] if kind.cure else []
    if found:
        lines.append("--errors skip leaves out what cannot be read, and lists it")
    readers = [list_readers()[file.format] for file in found]
    if any(kind.is_text for kind in kinds) and all(one.is_plain and not one.has_sentences for one in readers):
        lines.append(f"or --format {quote(f'{name}=text')} reads all of {name} as plain text")
    return "\n".join(lines)


def describe_sources(files: Sequence[SourceFile], settings: Settings) -> Iterator[str]:
    """Spells for each source how many files of which formats it has, and its language, before anything is read."""
    sources, readers = defaultdict[str, list[SourceFile]](list), list_readers()
    for file in files:
        sources[file.source].append(file)
    for name, own in sources.items():
        kinds, text_field = Counter(file.format for file in own), settings.text_field_of(name)
        formats = ", ".join(
            (f"{count:,} " if len(kinds) > 1 else "")
            + format
            + f" (text in {text_field!r})" * readers[format].has_fields
            for format, count in kinds.items()
        )
        first = {file.format: file.path for file in reversed(own)}
        more = dict.fromkeys(readers[format].describe(path, text_field) for format, path in first.items())
        unsplit = all(readers[file.format].has_sentences for file in own)
        sentences = "a sentence a line" if unsplit else language_label(settings.language_of(name))
        size = sum(file.size for file in own) / 1e6
        yield f"{name}: {len(own):,} file{'s' * (len(own) > 1)}, {size:,.2f} MB: {formats}{''.join(more)}; {sentences}"


def list_left_out(skipped: Sequence[str]) -> Iterator[str]:
    """Names what --errors skip left out, the first of it where it is much."""
    yield from (f"left out: {fault}" for fault in skipped[:MOST_LISTED])
    if len(skipped) > MOST_LISTED:
        yield f"left out: {len(skipped) - MOST_LISTED:,} more, which manifest.json lists"


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
        parts = list_readers()[file.format].spans(Path(file.path), bundle_bytes)
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
