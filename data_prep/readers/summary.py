"""Says what was found to read, before anything is read: a line for every source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from data_prep.common.languages import language_label
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.sources import SourceFile
from data_prep.settings import Settings

MOST_SOURCES = 20  # more of them share a line
MOST_LISTED = 10  # files left out that are named; the manifest names all


def source_lines(files: Sequence[SourceFile], settings: Settings) -> Iterator[str]:
    """Spells for each source how many files of which formats it has, how those were found, and its language.

    Of many sources the first have a line, the others one together.
    """
    sources: defaultdict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        sources[file.source].append(file)
    for name, own in list(sources.items())[:MOST_SOURCES]:
        kinds, text_field = Counter((file.format, file.how) for file in own), settings.text_field_of(name)
        field = f", text in {text_field!r}"
        formats = ", ".join(
            (f"{count:,} " if len(kinds) > 1 else "")
            + f"{format} ({how}{field if list_readers()[format].has_fields else ''})"
            for (format, how), count in kinds.items()
        )
        first = {file.format: file.path for file in reversed(own)}
        more = (list_readers()[format].describe(path, text_field) for format, path in first.items())
        formats += "".join(dict.fromkeys(more))
        unsplit = all(list_readers()[file.format].has_sentences for file in own)
        sentences = "a sentence a line" if unsplit else language_label(settings.language_of(name))
        size = _size(sum(file.size for file in own))
        yield f"{name}: {len(own):,} file{'s' * (len(own) > 1)}, {size}: {formats}; {sentences}"
    if others := list(sources.values())[MOST_SOURCES:]:
        size = _size(sum(file.size for own in others for file in own))
        yield f"and {len(others):,} more sources: {sum(map(len, others)):,} files, {size}"


def left_out_lines(skipped: Sequence[str]) -> Iterator[str]:
    """Names what --errors skip left out, the first of it where it is much."""
    yield from (f"left out: {fault}" for fault in skipped[:MOST_LISTED])
    if len(skipped) > MOST_LISTED:
        yield f"left out: {len(skipped) - MOST_LISTED:,} more, which manifest.json lists"


def _size(number: int) -> str:
    """Spells a number of bytes in a unit that fits it."""
    return f"{number:,} bytes" if number < 10_000 else f"{number / 1e6:,.2f} MB"
