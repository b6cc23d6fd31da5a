"""Finds the files that are meant by --docs, and divides them into pieces of work."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from data_prep.common.errors import UserError
from data_prep.readers import READERS, demo
from data_prep.readers.detection import AS_OTHERS, BY_CONTENT, TEXTS, Found, find_format
from data_prep.readers.foreign import Foreign
from data_prep.readers.reader import COMPRESSED, Problems, Span

LABEL = re.compile(r"\w[\w.+-]*")  # the name of a source, as in LABEL=PATH
MOST_NAMED = 5  # kinds of files that a message names
LANDMARKS = 8  # one in so many files ends a task that is half full, wherever the tasks before it end
FEWEST_BUNDLES, SMALLEST_BUNDLE, LARGEST_BUNDLE = 64, 1 << 20, 16 << 20  # how many, and their sizes in bytes


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


@dataclass(frozen=True)
class Bundle:
    """What one task reads: spans of files of one source and format, some megabytes together."""

    name: str
    """Stands for what is read, with the contents of the files: the same text has it in another run too."""
    source: str
    format: str
    spans: tuple[Span, ...]
    weight: int
    """How many bytes the spans take on the disk."""
    part_bytes: int
    """How much text goes into one file of documents, in bytes."""


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
    found = [_files_of(name, paths, formats.get(name, formats.get("")), out, problems) for name, paths in groups]
    alike = _alike([file for group in found for file in group])
    files = [
        replace(file, format="text", how=AS_OTHERS) if file in alike else file
        for group in found
        for file in sorted(group, key=lambda file: list(READERS).index("text" if file in alike else file.format))
    ]
    places = [os.path.realpath(file.path) for file in files]
    counts = Counter(places)
    twice = [file.path for file, place in zip(files, places, strict=True) if counts[place] > 1]
    if twice:
        number = sum(1 for count in counts.values() if count > 1)
        raise UserError(f"--docs: {twice[0]} is named twice ({number} such files); each text counts once")
    return files


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
            groups.append((label or _name_of(path), [path]))
        last = parent
    return groups


def _name_of(path: str) -> str:
    """Names a source after a folder, a file without its suffixes, or the folder that a glob begins with."""
    while glob.has_magic(path) and not os.path.exists(path):
        path = os.path.dirname(path)
    name = os.path.basename(os.path.abspath(path))
    if os.path.isfile(path):
        suffix = Path(name).suffix
        name = Path(name.removesuffix(suffix) if suffix in COMPRESSED else name).stem
    return name or "text"


def _split_label(argument: str) -> tuple[str, str]:
    """Parts an argument into the name that the user gives the source, which may be none, and the path."""
    label, _, path = argument.partition("=")
    if path and LABEL.fullmatch(label) and not os.path.exists(argument):
        return label, path
    return "", argument


def _files_of(
    name: str, arguments: list[str], format: str | None, out: Path | None, problems: Problems
) -> list[SourceFile]:
    """Finds the files that some arguments name as one source; empty files are left out."""
    path = arguments[0]
    if path == demo.NAME and not os.path.exists(path):
        return [
            SourceFile(name, str(file), "/".join(file.parts[-3:]), file.stat().st_size, demo.NAME)
            for file in demo.files()
        ]
    expanded = sorted({file for argument in arguments for file in _expand(argument)}, key=lambda file: file.parts)
    if out is not None:
        expanded = [file for file in expanded if out.resolve() not in file.resolve().parents]
    sizes = {file: size for file in expanded if (size := _size(file))}
    if not sizes:
        raise UserError(f"--docs {path}: no file with anything in it")
    root = path if os.path.isdir(path) else os.path.commonpath([file.parent.absolute() for file in sizes])
    names = {file: Path(os.path.relpath(file, root)).as_posix() for file in sizes}
    problems.names |= {str(file): f"{name}/{names[file]}" for file in sizes}
    found = _find_formats(name, path, list(sizes), format, problems)
    return [
        SourceFile(name, str(file), names[file], sizes[file], kind.format, kind.how) for file, kind in found.items()
    ]


def _find_formats(name: str, path: str, files: list[Path], format: str | None, problems: Problems) -> dict[Path, Found]:
    """Finds the formats of the files of one source; raises UserError, or leaves files out, where one is of none."""
    kinds = {file: find_format(file, format) for file in files}
    found = {file: kind for file, kind in kinds.items() if isinstance(kind, Found)}
    foreign = {file: kind for file, kind in kinds.items() if isinstance(kind, Foreign)}
    if foreign and (problems.policy != "skip" or not found):
        raise UserError(_foreign_message(name, path, foreign, found))
    problems.skipped += [f"{file}: {kind.what}" for file, kind in foreign.items()]
    return found


def _alike(files: list[SourceFile]) -> set[SourceFile]:
    """Finds the texts that look like sentences but are to be read as most of their source, which are paragraphs.

    Raises UserError where half of the texts of a source look like that, or more, but not all.
    """
    alike: set[SourceFile] = set()
    texts: defaultdict[str, dict[str, list[SourceFile]]] = defaultdict(lambda: {name: [] for name in TEXTS})
    for file in files:
        if file.format in TEXTS:
            texts[file.source][file.format].append(file)
    for name, kinds in texts.items():
        sentences, paragraphs = kinds["sentences"], kinds["text"]
        if len(sentences) < len(paragraphs):
            alike.update(sentences)
        elif paragraphs:
            number = len(sentences) + len(paragraphs)
            flags = [shlex.quote(f"{name}={format}") for format in ("text", "sentences")]
            raise UserError(
                f"{name}: {len(sentences):,} of {number:,} files seem to have one sentence a line (such as "
                f"{sentences[0].path}), the others paragraphs (such as {paragraphs[0].path})\n"
                f"say how to read all of them: --format {flags[0]} or --format {flags[1]}"
            )
    return alike


def _foreign_message(name: str, path: str, foreign: Mapping[Path, Foreign], found: Mapping[Path, Found]) -> str:
    """Says which files cannot be read, what they are, and what helps: for one of each kind, then for all."""
    examples: dict[Foreign, Path] = {}
    for file, kind in foreign.items():
        examples.setdefault(kind, file)
    counts = Counter(foreign.values())
    lines = [f"--docs {path}: {len(foreign)} of {len(foreign) + len(found)} files cannot be read"]
    for kind, file in list(examples.items())[:MOST_NAMED]:
        lines.append(f"  {file}: {kind.what}" + (f" ({counts[kind]} such files)" if counts[kind] > 1 else ""))
        lines += [f"    {kind.cure_for(file)}"] if kind.cure else []
    lines += [f"  and {len(examples) - MOST_NAMED} other kinds of files"] if len(examples) > MOST_NAMED else []
    if found:
        lines.append("--errors skip leaves out what cannot be read, and lists it")
    lines += _by_globs(path, list(found), list(foreign))
    if any(kind.is_text for kind in foreign.values()) and all(kind.format == "text" for kind in found.values()):
        lines.append(f"or --format {shlex.quote(f'{name}=text')} reads all of {name} as plain text")
    return "\n".join(lines)


def _by_globs(path: str, wanted: list[Path], others: list[Path]) -> list[str]:
    """Spells the globs that name the wanted files of a folder, where their suffixes tell them from the others."""
    ours, theirs = ({"".join(file.suffixes[-2:]) for file in files} for files in (wanted, others))
    if not os.path.isdir(path) or not ours or "" in ours or ours & theirs:
        return []
    deep = "**/" if any(file.parent != Path(path) for file in wanted) else ""
    folder = glob.escape(str(Path(path)))
    return [
        "or name what to read: --docs " + " ".join(shlex.quote(f"{folder}/{deep}*{suffix}") for suffix in sorted(ours))
    ]


def _expand(path: str) -> list[Path]:
    """Lists the files that a path or glob stands for; leaves out hidden ones in folders, and those with a _ first."""
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.isdir(path):
        found = [Path(path)]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True)]
        if not found:
            raise UserError(f"--docs {path}: no such file or folder" + (" (no match)" if glob.has_magic(path) else ""))
    files: set[Path] = set()
    for place in found:
        files.update(_walk(place) if place.is_dir() else [place])
    if not files:
        raise UserError(f"--docs {path}: an empty folder")
    return sorted(files, key=lambda file: file.parts)


def _walk(folder: Path) -> Iterator[Path]:
    """Finds all files below a folder; goes only once into a folder that links lead to from several places."""
    seen = set()
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        place = os.path.realpath(parent)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        yield from (Path(parent, name) for name in names if not name.startswith((".", "_")))


def _size(file: Path) -> int:
    """Looks up the size of a file; refuses one that is not there, or whose name cannot be written down."""
    try:
        str(file).encode()
        return file.stat().st_size
    except UnicodeEncodeError:
        raise UserError(f"--docs: the name of {os.fsencode(file)!r} is not UTF-8; rename it") from None
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    """Says which file or folder cannot be read."""
    broken = " (a link to nothing)" if error.filename is not None and os.path.islink(error.filename) else ""
    raise UserError(f"--docs: {error.filename}: cannot be read: {error.strerror}{broken}") from error


def make_bundles(files: list[SourceFile]) -> list[Bundle]:
    """Divides the files into tasks: small files together, large ones in parts where their format allows it.

    The division depends on the files alone, never on the number of workers, and so do all bytes that come of it. A file
    that changes or is added changes few tasks: after some files more, the division is as it was without it.
    """
    total = sum(file.size for file in files)
    bundle_bytes = 1 << (min(max(total // FEWEST_BUNDLES, SMALLEST_BUNDLE), LARGEST_BUNDLE).bit_length() - 1)
    bundles: list[Bundle] = []
    spans: list[tuple[SourceFile, Span]] = []
    weight = 0

    def close() -> None:
        nonlocal spans, weight
        if spans:
            bundles.append(_bundle(spans, weight, bundle_bytes))
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


def _bundle(spans: list[tuple[SourceFile, Span]], weight: int, part_bytes: int) -> Bundle:
    """Makes a task of spans of files."""
    first = spans[0][0]
    contents = [(file.name, file.content, span.start, span.end) for file, span in spans]
    name = hashlib.sha256(repr((first.source, first.format, part_bytes, contents)).encode()).hexdigest()[:16]
    return Bundle(name, first.source, first.format, tuple(span for _, span in spans), weight, part_bytes)
