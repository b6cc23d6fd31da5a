"""From what the user gave as --docs to the files that are read, and their division into pieces of work."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data_prep.common.errors import UserError
from data_prep.readers import READERS, demo
from data_prep.readers.cutting import COMPRESSED, Span, read_head

LABEL = re.compile(r"\w[\w.+-]*")  # of a source, as in LABEL=PATH
FEWEST_BUNDLES, SMALLEST_BUNDLE, LARGEST_BUNDLE = 64, 1 << 20, 16 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    source: str
    """the name of the source that it belongs to"""
    path: str
    name: str
    """as the manifest has it: without what is particular to this machine"""
    size: int
    format: str


@dataclass(frozen=True)
class Bundle:
    """What one task reads: parts of files of one source and format, some megabytes together."""

    name: str
    source: str
    format: str
    spans: tuple[Span, ...]
    weight: int
    """bytes on the disk"""
    part_bytes: int
    """text that goes into one file of documents"""


def find_files(arguments: list[str], format: str | None, out: Path | None = None) -> list[SourceFile]:
    """All files that the arguments name, in an order that only depends on their names; none of the output folder."""
    if format is not None and format not in READERS:
        raise UserError(f"--format {format}: unknown; there is: {', '.join(READERS)}")
    files = [file for name, paths in group_sources(arguments) for file in _files_of(name, paths, format, out)]
    places = [os.path.realpath(file.path) for file in files]
    counts = Counter(places)
    twice = [file.path for file, place in zip(files, places, strict=True) if counts[place] > 1]
    if twice:
        number = sum(1 for count in counts.values() if count > 1)
        raise UserError(f"--docs: {twice[0]} is named twice ({number} such files); each text counts once")
    return files


def group_sources(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """The sources by name, each with its paths.

    Files of one folder that stand next to each other are one source: a shell spells out its globs.
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
    """The name of a folder, of a file without its suffixes, or of the folder that a glob begins with."""
    while glob.has_magic(path) and not os.path.exists(path):
        path = os.path.dirname(path)
    name = os.path.basename(os.path.abspath(path))
    if os.path.isfile(path):
        suffix = Path(name).suffix
        name = Path(name.removesuffix(suffix) if suffix in COMPRESSED else name).stem
    return name or "text"


def _split_label(argument: str) -> tuple[str, str]:
    label, _, path = argument.partition("=")
    if path and LABEL.fullmatch(label) and not os.path.exists(argument):
        return label, path
    return "", argument


def _files_of(name: str, arguments: list[str], format: str | None, out: Path | None) -> list[SourceFile]:
    path = arguments[0]
    if path == demo.NAME and not os.path.exists(path):
        return [
            SourceFile(name, str(file), "/".join(file.parts[-3:]), file.stat().st_size, demo.NAME)
            for file in demo.files()
        ]
    expanded = sorted({file for each in arguments for file in _expand(each)}, key=lambda file: file.parts)
    if out is not None:
        expanded = [file for file in expanded if out.resolve() not in file.resolve().parents]
    sizes = {file: _size(file) for file in expanded}
    paths = [file for file, size in sizes.items() if size]
    if not paths:
        raise UserError(f"--docs {path}: no file with anything in it")
    root = path if os.path.isdir(path) else os.path.commonpath([file.parent for file in paths])
    formats = {file: format or _detect(file) for file in paths}
    unknown = [file for file, found in formats.items() if found is None]
    if unknown:
        raise UserError(
            f"--docs {path}: the format of {len(unknown)} of {len(paths)} files is not known, such as {unknown[0]}\n"
            f"name the files to read with a glob, or say what they are with --format ({', '.join(READERS)})"
        )
    if len(kinds := Counter(str(found) for found in formats.values())) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        odd = next(file for file in paths if formats[file] == kinds.most_common()[-1][0])
        raise UserError(
            f"--docs {path}: files of different formats: {found} (such as {odd})\n"
            "give each format its own --docs with a glob, or say what all are with --format"
        )
    return [
        SourceFile(name, str(file), Path(os.path.relpath(file, root)).as_posix(), sizes[file], str(formats[file]))
        for file in paths
    ]


def _expand(path: str) -> list[Path]:
    """The files that a path or glob stands for; hidden ones (and those beginning with _) are left out in folders."""
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.isdir(path):
        found = [Path(path)]
    else:
        found = [Path(each) for each in glob.glob(path, recursive=True)]
        if not found:
            raise UserError(f"--docs {path}: no such file or folder" + (" (no match)" if glob.has_magic(path) else ""))
    files: set[Path] = set()
    for each in found:
        files.update(_walk(each) if each.is_dir() else [each])
    if not files:
        raise UserError(f"--docs {path}: an empty folder")
    return sorted(files, key=lambda file: file.parts)


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder; one that is linked to from several places, or from within itself, is gone into once."""
    seen = set()
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        place = os.path.realpath(parent)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(each for each in folders if not each.startswith((".", "_")))
        yield from (Path(parent, each) for each in names if not each.startswith((".", "_")))


def _size(file: Path) -> int:
    """The size of a file that can be there and whose name can be written down."""
    try:
        str(file).encode()
        return file.stat().st_size
    except UnicodeEncodeError:
        raise UserError(f"--docs: the name of {os.fsencode(file)!r} is not UTF-8; rename it") from None
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    broken = " (a link to nothing)" if error.filename is not None and os.path.islink(error.filename) else ""
    raise UserError(f"--docs: {error.filename}: cannot be read: {error.strerror}{broken}") from error


def _detect(path: Path) -> str | None:
    """The format of a file, from its name and its first bytes."""
    head = read_head(path)
    name = path.name.lower().removesuffix(path.suffix if path.suffix in COMPRESSED else "")
    return next((reader.name for reader in READERS.values() if reader.detect(name, head)), None)


def make_bundles(files: list[SourceFile]) -> list[Bundle]:
    """Divides the files into tasks: small files together, large ones in parts where their format allows it.

    Depends on the files alone, never on the number of workers.
    """
    total = sum(file.size for file in files)
    bundle_bytes = min(max(total // FEWEST_BUNDLES, SMALLEST_BUNDLE), LARGEST_BUNDLE)
    bundles: list[Bundle] = []
    spans: list[Span] = []
    weight = 0

    def close(file: SourceFile) -> None:
        nonlocal spans, weight
        if spans:
            bundles.append(Bundle(f"{len(bundles):06}", file.source, file.format, tuple(spans), weight, bundle_bytes))
        spans, weight = [], 0

    last: SourceFile | None = None
    for file in files:
        if last and (last.source, last.format) != (file.source, file.format):
            close(last)
        parts = READERS[file.format].spans(Path(file.path), bundle_bytes)
        for span in parts:
            spans.append(span)
            weight += file.size * (span.end - span.start) // parts[-1].end  # a span may count something else than bytes
            if weight >= bundle_bytes:
                close(file)
        last = file
    if last:
        close(last)
    return bundles
