"""From what the user gave as --docs to the files that are read, and their division into pieces of work."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data_prep.errors import UserError
from data_prep.readers import READERS, demo
from data_prep.readers.base import COMPRESSED, Span, read_head

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


def find_files(arguments: list[str], format: str | None) -> list[SourceFile]:
    """All files that the arguments name, in an order that only depends on their names."""
    if format is not None and format not in READERS:
        raise UserError(f"--format {format}: unknown; there is: {', '.join(READERS)}")
    files = [file for argument in arguments for file in _files_of(argument, format)]
    places = [os.path.realpath(file.path) for file in files]
    counts = Counter(places)
    twice = [file.path for file, place in zip(files, places, strict=True) if counts[place] > 1]
    if twice:
        number = sum(1 for count in counts.values() if count > 1)
        raise UserError(f"--docs: {twice[0]} is named twice ({number} such files); each text counts once")
    return files


def source_name(argument: str) -> str:
    """The name of a source: given as NAME=PATH, or that of the folder or file."""
    label, path = _split_label(argument)
    return (
        label or Path(os.path.abspath(path)).name.partition(".")[0].translate({ord(c): None for c in "*?[]"}) or "text"
    )


def _split_label(argument: str) -> tuple[str, str]:
    label, equals, path = argument.partition("=")
    if equals and label and os.sep not in label and not os.path.exists(argument):
        return label, path
    return "", argument


def _files_of(argument: str, format: str | None) -> list[SourceFile]:
    name, (_, path) = source_name(argument), _split_label(argument)
    if path == demo.NAME and not os.path.exists(path):
        return [
            SourceFile(name, str(file), "/".join(file.parts[-3:]), file.stat().st_size, demo.NAME)
            for file in demo.files()
        ]
    sizes = {file: _size(file) for file in _expand(path)}
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
