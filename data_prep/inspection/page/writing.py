"""Makes a page of a finished folder, for readers: what text it has, what was left out, how it was cut and masked.

The page is not part of the folder: the manifest does not list it. It depends on the folder alone, so it is the same
whenever and wherever it is made. Of a large corpus it shows a sample; all other counts are the manifest's.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import dropwhile, islice
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np

from data_prep.arrow_files import name_damage
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import replacing
from data_prep.inspection import lookup
from data_prep.inspection.figures import (
    describe_held_out,
    describe_unknown,
    find_warnings,
    format_percent,
    list_reasons,
)
from data_prep.origins import find_origins_of_folder, load_own_vocabulary
from data_prep.seals import require_seal
from data_prep.settings import spell_flag
from data_prep.shards import MANIFEST, REPORT, KeptFile, Manifest, SetFigures
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import spell_value

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "count": "{:,}".format,
    "percent": format_percent,
    "megabytes": lambda size: f"{size / 1e6:,.1f} MB",
}
MOST_SETS = 24
"""Sets of examples that have a row of their own."""
MOST_ROWS = 20
"""Rows of a table of what was left out that are shown."""
SHOWN = 10
"""Examples that are shown."""
MOST_FILES = 64
"""Files of documents that are read, each of at most 16 MB of text or one document."""
MOST_BARS = 32

MOST_DOCUMENTS = 2_000_000
"""Rows of the table of documents that are read at most; in a larger one nothing is looked up."""


def write_page(folder: Path) -> Path:
    """Writes the page of a folder into it; returns where it is."""
    page, place = make_page(folder), folder / REPORT
    with replacing(place) as file:
        file.write(page.encode())
    return place


def make_page(folder: Path) -> str:
    """Makes the page of a finished folder; raises UserError where it is none, DamageError where it is damaged."""
    manifest = Manifest.read(folder)
    require_seal(folder / MANIFEST)
    vocabulary = load_own_vocabulary(folder, manifest)
    kept, masks = find_kept(folder), read_masks(folder, manifest, vocabulary)
    reasons = list(list_reasons(manifest))
    return TEMPLATES.get_template("report.html").render(
        manifest=manifest,
        corpus=manifest.corpus,
        settings=list(spell_settings(manifest)),
        warnings=list(find_warnings(manifest)),
        sources=count_by_source(manifest, (record for _, record in kept)),
        files=len(kept),
        lengths=measure_lengths(kept, len(vocabulary)),
        sets=[(figures, make_bars(figures)) for figures in manifest.figures[:MOST_SETS]],
        reasons=reasons,
        before=manifest.corpus.documents + sum(reason.count for reason in reasons),
        held_out=describe_held_out(manifest) if manifest.figures and manifest.corpus.validation_documents else "",
        tables=read_tables(folder, manifest),
        masks=masks,
        unknown=describe_unknown(manifest),
    )


def spell_settings(manifest: Manifest) -> Iterator[str]:
    """Spells as flags the recorded settings that have a value."""
    for name, value in manifest.settings.as_json().items():
        if value or (value == 0 and value is not False):
            yield f"{spell_flag(name)} {'' if value is True else spell_value(value)}".rstrip()


def count_by_source(manifest: Manifest, kept: Iterable[KeptFile]) -> list[tuple[str, Counter[str]]]:
    """Counts the files of every source, the documents, pieces and bytes that were read, and the documents left."""
    rows = defaultdict[str, Counter[str]](Counter)
    for file in manifest.sources:
        rows[file.source]["files"] += 1
    for record in kept:
        rows[record.source].update(read=record.rows, pieces=record.pieces, bytes=record.text_bytes)
    for name, number in manifest.corpus.documents_by_source.items():
        rows[name]["left"] = number
    return list(rows.items())


def find_kept(folder: Path) -> list[tuple[Path, KeptFile]]:
    """Lists the files of documents in pieces in the order of the corpus, each with the folder that has it.

    There are none where they were not kept or are gone.
    """
    try:
        origins = list(find_origins_of_folder(folder, str(folder)))
    except DamageError:
        raise
    except UserError:
        origins = []
    return [(origin.folder, record) for origin in origins for record in origin.manifest.kept]


class Bar(NamedTuple):
    """A bar of a histogram: how many documents or examples have from `first` to `last` pieces."""

    first: int
    last: int
    number: int


def make_doubling_bars(sizes: Array) -> list[Bar]:
    """Counts sizes, from 1 on, in ranges each of which is twice as wide as the one before: 1, 2 to 3, 4 to 7, …"""
    counts = np.bincount(np.frexp(sizes)[1] - 1).tolist()
    bars = (Bar(2**exponent, 2 ** (exponent + 1) - 1, count) for exponent, count in enumerate(counts))
    return list(dropwhile(lambda bar: not bar.number, bars))


def make_even_bars(counts: Sequence[int]) -> list[Bar]:
    """Adds up the counts of every size, from 0 on, in some ranges of the same width."""
    last = len(counts) - 1
    width = max(1, -(-last // MOST_BARS))
    ranges = ((start, min(start + width - 1, last)) for start in range(1, last + 1, width))
    return [Bar(start, end, sum(counts[start : end + 1])) for start, end in ranges]


class DocumentLengths(NamedTuple):
    """How many pieces documents have."""

    files: int
    """Files whose documents were counted."""
    documents: int
    bars: list[Bar]
    quantiles: list[int]
    """The pieces of the shortest, what 5%, 50% and 95% have at most, and those of the longest."""
    mean: int


def measure_lengths(kept: list[tuple[Path, KeptFile]], vocabulary_size: int) -> DocumentLengths | None:
    """Counts the pieces of documents, in files from all over the corpus where they are many; None without documents."""
    sample = kept[:: max(1, -(-len(kept) // MOST_FILES))]
    if not sample:
        return None
    sizes = np.concatenate([read_sizes(folder, record, vocabulary_size) for folder, record in sample])
    quantiles = np.quantile(sizes, (0, 0.05, 0.5, 0.95, 1), method="inverted_cdf").astype(int).tolist()
    return DocumentLengths(len(sample), len(sizes), make_doubling_bars(sizes), quantiles, round(float(sizes.mean())))


def read_sizes(folder: Path, record: KeptFile, vocabulary_size: int) -> Array:
    """Reads the numbers of pieces of the documents of a file; raises DamageError where it is damaged."""
    path = record.find(folder)
    with name_damage(path, "damaged"):
        documents = lookup.read_kept(path, record.rows, vocabulary_size)["sentences"]
        ends = np.asarray(documents.values.offsets)[np.asarray(documents.offsets)[1:]]
        sizes: Array = np.diff(ends, prepend=0)
        if (sizes < 1).any():
            raise DamageError(f"{path}: has a document without pieces")
        return sizes


def make_bars(figures: SetFigures) -> list[Bar]:
    """Makes the histogram of a set; raises DamageError where the manifest has too few counts, or too many."""
    if len(figures.histogram) != figures.length + 1:
        raise DamageError(f"{MANIFEST}: the histogram of {figures.set.folder} has {len(figures.histogram)} counts")
    return make_even_bars(figures.histogram)


def read_tables(folder: Path, manifest: Manifest) -> dict[str, list[list[str]]]:
    """Reads the head and the first rows of every CSV file among the tables of a folder."""
    tables = {}
    for record in manifest.tables:
        if record.path.endswith(".csv"):
            path = record.find(folder)
            try:
                with path.open(encoding="utf-8", errors="replace", newline="") as file:
                    tables[record.path] = list(islice(csv.reader(file), MOST_ROWS + 1))
            except (csv.Error, OSError) as error:
                raise DamageError(f"{path}: cannot be read: {error}") from error
    return tables


class Masks(NamedTuple):
    """The first examples of a set."""

    set: str
    examples: list[tuple[str, list[lookup.MarkedPiece]]]
    """What each of them is, and its pieces."""


def read_masks(folder: Path, manifest: Manifest, vocabulary: Vocabulary) -> Masks:
    """Reads the first examples of the first set; none where a folder has no examples."""
    training = [figures for figures in manifest.figures if not figures.validation and figures.examples]
    if not training:
        return Masks("", [])
    figures = min(training, key=lambda one: one.set)
    record = next(record for record in figures.shards if record.rows)
    batch = lookup.read_examples(record.find(folder), manifest, figures.length, record.rows)
    numbers = np.asarray(batch["document"])[:SHOWN].tolist()
    rows = lookup.read_document_rows(folder, numbers) if manifest.num_documents <= MOST_DOCUMENTS else {}
    shown = []
    for index in range(min(SHOWN, record.rows)):
        example = lookup.read_example(batch, index, figures.length, folder / record.path)
        place = f"{folder / record.path}: example {index} has"
        lookup.require_known([*example.pieces, *example.labels.values()], vocabulary, place)
        example = replace(example, source=lookup.name_document(rows.get(example.document, {})))
        heading = lookup.describe_example(index, example)
        shown.append((heading, list(lookup.mark_pieces(example, vocabulary))))
    return Masks(figures.set.folder, shown)
