"""Makes the parts of a manifest: the settings and sources of a run, and the figures of its text; compares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError
from data_prep.origins import Faults, Origins, sum_filtered
from data_prep.pipeline.choosing import Chosen
from data_prep.readers.filters import add_up, describe_words
from data_prep.readers.reader import Problems, replace_path
from data_prep.readers.sources import SourceFile
from data_prep.seals import UNUSED, name_language
from data_prep.settings import Fact, Settings, list_by, spell_flag
from data_prep.shards import CorpusFigures, Ingredients, RecordedSettings, SourceRecord, VocabularyFigures
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import DocumentsRecord, spell_value

COUNTED = ("documents", "empty", "sentences", "pieces", "unknown", "text_bytes", "copies", "near_copies", "over_share")
"""Counts that are added up over the files of token documents."""


def describe(settings: Settings, files: list[SourceFile], given: Vocabulary | None) -> Ingredients:
    """Makes the plan of a run: its settings and its sources."""
    recorded = settings.record_values() | {"without_words": describe_words(settings.without_words)}
    return Ingredients(
        settings=RecordedSettings(**recorded),
        sources=[SourceRecord(file.source, file.name, file.size, file.format, file.content) for file in files],
        given_vocabulary=given.sha256 if given else None,
    )


def describe_with_origins(plan: Ingredients, origins: Origins, out: Path) -> Ingredients:
    """Adds the settings and sources of other folders to a plan, as if it had read their text itself."""
    alone = len(origins.folders) == 1 and not plan.sources  # the text of that folder then made the shards
    theirs = origins.read_settings()
    if plan.sources:
        theirs = {name: theirs[name] for name in list_by(Fact.CUTS) if name in theirs}
    for name in () if alone else list_by(Fact.BY_SOURCE):
        said = plan.settings.as_json()[name] if plan.sources else None
        ours = said if isinstance(said, dict) else {"": said} if said is not None else {}
        named = {source: one for source, one in origins.read_by_source(name).items() if one != ours.get("")} | ours
        theirs[name] = named if named.keys() - {""} else named.get("")
    changed: dict[str, Any] = {
        "settings": plan.settings.model_copy(update=theirs),
        "sources": [*(file for origin in origins.folders for file in origin.sources), *plan.sources],
        "origins": [origin.record(out) for origin in origins.folders],
    }
    if alone:
        changed["given_vocabulary"] = origins.manifests[0].given_vocabulary
    return plan.model_copy(update=changed)


def describe_vocabulary(vocabulary: Vocabulary, given: Vocabulary | None) -> VocabularyFigures:
    """Makes the record of a vocabulary; `base_size` is there if a given vocabulary was extended."""
    extended = {"base_size": len(given)} if given and len(given) < len(vocabulary) else {}
    return VocabularyFigures(size=len(vocabulary), sha256=vocabulary.sha256, cased=vocabulary.cased, **extended)


def collect_faults(documents: Iterable[DocumentsRecord], left_out: Problems) -> Faults:
    """Lists what could not be read, files first, without paths of this machine; counts replaced and filtered."""
    files = [replace_path(fault, left_out.names) for fault in left_out.skipped]
    skipped = [*files, *(fault for record in documents for fault in record.left_out)]
    filtered = {name: total.number for name, total in add_up(documents).items()}
    empty = sum(record.empty for record in documents)
    return Faults(skipped, sum(record.replaced for record in documents), filtered or None, empty)


def sum_corpus(chosen: Chosen, faults: Iterable[Faults], lost: list[str]) -> CorpusFigures:
    """Adds up the figures of the corpus; `lost` names damaged files of documents of other folders."""
    by_source: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for record in chosen.once:
        counts = {name: getattr(record, name) for name in COUNTED}
        if record.books is not None:  # passages for validation are cut out of the documents
            counts |= {"documents": record.books, "passages": record.documents}
        totals.update({name: count for name, count in counts.items() if count is not None})
        by_source[record.source] += counts["documents"]
    if chosen.parts is not chosen.once:
        totals["weighed"] = sum(record.documents for record in chosen.parts)
    faults = list(faults)
    totals["empty"] += sum(one.empty for one in faults)
    if lost:
        totals["lost"] = len(lost)
    counted: dict[str, Any] = {**totals}
    if any(one.filtered is not None for one in faults):
        counted["filtered"] = sum_filtered(faults)
    return CorpusFigures(
        **counted,
        validation_documents=chosen.num_held_out,
        documents_by_source=by_source,
        skipped=[*(fault for one in faults for fault in one.skipped), *lost],
        replaced=sum(one.replaced for one in faults),
    )


@dataclass(frozen=True)
class Changes:
    """Compares the settings and sources that a folder was begun with to those of now."""

    before: Ingredients
    now: Ingredients

    def refuse(self, folder: Path) -> None:
        """Raises UserError if a setting or source of the folder differs."""
        changes, names = self.list_settings(), self.list_sources()
        if names is not None:
            changes.append(f"  --docs: {len(names)} files differ" + (f", such as {names[0]}" if names else ""))
        if changes:
            raise UserError(
                f"{folder} was made with other settings:\n" + "\n".join(changes) + "\n"
                "give the same settings to continue, another --out, or remove the folder"
            )

    def list_settings(self) -> list[str]:
        """Lists the settings that differ."""
        theirs, ours = ({**UNUSED, **plan.settings.as_json()} for plan in (self.before, self.now))
        changes = [
            f"  {spell_flag(name)} was {spell_value(theirs.get(name))}, now {spell_value(ours[name])}"
            for name, value in name_language(ours).items()
            if name_language(theirs).get(name) != value
        ]
        if self.before.given_vocabulary != self.now.given_vocabulary:
            changes.append("  --vocab: another vocabulary")
        if [origin.key for origin in self.before.origins] != [origin.key for origin in self.now.origins]:
            changes.append("  --from: other documents")
        return changes

    def list_sources(self) -> list[str] | None:
        """Names the files that were added, removed or changed; None if nothing differs, an empty list if only the order
        does."""
        if self.before.sources == self.now.sources:
            return None
        return sorted({file.name for file in {*self.before.sources} ^ {*self.now.sources}})

    def list_missing(self) -> list[str]:
        """Names the files that are gone."""
        old, new = ({(file.source, file.name) for file in plan.sources} for plan in (self.before, self.now))
        return sorted(name for _, name in old - new)
