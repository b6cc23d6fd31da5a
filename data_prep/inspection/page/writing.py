"""Makes a page of a finished folder, for readers: what text it has, what was left out, how it was cut and masked.

The page is not part of the folder: the manifest does not list it. It depends on the folder alone, so it is the same
whenever and wherever it is made. Of a large corpus it shows a sample; all other counts are the manifest's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import is_stream, replacing
from data_prep.inspection.figures import find_use_of_text, find_warnings, format_percent, list_reasons
from data_prep.inspection.page import lengths, sources
from data_prep.inspection.page.lengths import find_kept
from data_prep.inspection.page.masks import read_masks
from data_prep.inspection.page.words import count_word_cuts
from data_prep.seals import require_seal
from data_prep.settings import Settings, spell_flag
from data_prep.shards import MANIFEST, REPORT, Manifest
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.work import spell_value

TEMPLATE = Path(__file__).with_name("report.html")
FIRST_LINES = "<!doctype html>\n<!-- made by show.py of a folder of shards -->"
"""The beginning of every page: only files that begin with it are replaced."""
MOST_NAMED = 5  # sources that the title names


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a folder, into it or into another file; returns where it is."""
    page = make_page(folder)
    place = out or folder / REPORT
    _refuse_taken(folder, place)
    try:
        with replacing(place) as file:
            file.write(page.encode())
    except UserError as error:
        raise UserError(f"{error}\nname a file elsewhere: --report-out FILE") from None
    return place


def make_page(folder: Path) -> str:
    """Makes the page of a finished folder; raises UserError where it is none, DamageError where it is damaged."""
    manifest = Manifest.read(folder)
    require_seal(folder / MANIFEST)
    vocabulary = load_vocabulary(folder, manifest.vocabulary.cased)
    if vocabulary.sha256 != manifest.vocabulary.sha256:
        raise DamageError(f"{folder / vocabulary.file}: not the vocabulary that its {MANIFEST} tells of: it was edited")
    kept, masks = find_kept(folder, manifest), read_masks(folder, manifest, vocabulary)
    return _rendered(
        manifest=manifest,
        corpus=manifest.corpus,
        title=make_title(manifest),
        vocabulary=describe_vocabulary(manifest),
        settings=list(list_unusual_settings(manifest)),
        warnings=list(find_warnings(manifest)),
        sources=sources.make_source_rows(manifest, (record for _, record in kept.files), masks.by_source),
        documents=lengths.measure_documents(kept),
        sets=[lengths.make_set_row(figures) for figures in manifest.figures[: lengths.MOST_SETS]],
        uses=find_use_of_text(manifest),
        reasons=sources.list_all_reasons(manifest),
        before=manifest.corpus.documents + sum(reason.count for reason in list_reasons(manifest)),
        held_out=sources.describe_validation(manifest) if manifest.figures else "",
        tables=sources.read_example_tables(folder, manifest),
        words=count_word_cuts(folder, kept, vocabulary),
        masks=masks,
    )


def _rendered(**parts: Any) -> str:
    """Puts the parts into the template; text is escaped wherever it stands."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"count": "{:,}".format, "percent": format_percent}
    environment.filters["megabytes"] = lambda size: f"{size / 1e6:,.1f} MB"
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(parts)


def _refuse_taken(folder: Path, place: Path) -> None:
    """Raises UserError where the page would replace something else, or stray among the files of the folder."""
    if is_stream(place):
        return
    if place.parent.resolve().is_relative_to(folder.resolve()) and place.resolve() != (folder / REPORT).resolve():
        raise UserError(f"--report-out {place}: lies in the folder of shards, whose page is {REPORT}")
    if place.is_file():
        with place.open("rb") as file:
            if not file.read(len(FIRST_LINES)) == FIRST_LINES.encode():
                raise UserError(f"{place}: exists, and is no page of show.py; name another file: --report-out FILE")


def make_title(manifest: Manifest) -> str:
    """Names a folder by its sources, which it has wherever it lies."""
    names = list(dict.fromkeys(file.source for file in manifest.sources))
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def describe_vocabulary(manifest: Manifest) -> str:
    """Spells the size of the vocabulary, its case and where it comes from."""
    vocabulary = manifest.vocabulary
    case = "with case and accents" if vocabulary.cased else "in lower case"
    source = f"of {manifest.vocabulary_source}" if manifest.vocabulary_source else "trained from this text"
    added = vocabulary.size - (vocabulary.base_size or vocabulary.size)
    return f"{vocabulary.size:,} pieces {case}, {source}" + (f", with {added:,} added" if added else "")


def list_unusual_settings(manifest: Manifest) -> Iterator[str]:
    """Spells as flags the recorded settings that are not those of a run without flags."""
    said = manifest.settings.as_json()
    given = {name: said[name] for name in ("lengths", "mask_rate") if name in said}  # on which others rest
    usual = Settings(**given).record_values() | {name: None for name in said if name not in Settings.model_fields}
    usual |= {"lengths": Settings().record_values()["lengths"], "mask_rate": Settings().mask_rate}
    for name, value in said.items():
        if value != usual.get(name) and (value or usual.get(name)):
            spelled = spell_value(value) if not isinstance(value, bool) else "" if value else "off"
            yield f"{spell_flag(name)} {spelled}".rstrip()
