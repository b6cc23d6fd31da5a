"""The table of figures that shard.py prints at its end, and its warnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from data_prep.seals import FILTERED_REPORT
from data_prep.settings import LARGEST_SHARE, Fact, list_by, spell_flag
from data_prep.shards import NEAR_REPORT, Manifest, SetFigures, VocabularyFigures

MOST_LOST = 0.005
"""The share of the text that over-long sentences may lose without a warning."""
MOST_UNKNOWN = 0.01
"""The share of the characters from which words that became [UNK] are warned of."""
FEWEST_EXAMPLES = 100
"""How many examples of a length validation needs, about, for scores that say something."""


def make_figures_table(manifest: Manifest) -> Table:
    """Lays out the figures of a manifest: the corpus, and a line for every set of shards."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in (*_corpus_rows(manifest), *map(_set_row, manifest.figures)):
        table.add_row(*map(escape, row))
    for use in find_use_of_text(manifest):
        own, lost = (100 * count / use.text for count in (use.own, use.lost_parted))
        table.add_row(
            f"{use.length} text",
            f"{own:.1f}%",
            f"of the text is in an A or in the B that follows it; {100 - own:.1f}% was cut off, "
            f"{lost:.2f}% from over-long sentences ({use.parted:,} split)",
        )
    return table


def _corpus_rows(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Spells the figures of the corpus for the columns of the table."""
    corpus = manifest.corpus
    yield "documents", f"{corpus.documents:,}"
    if manifest.figures:
        yield "  held out", f"{corpus.validation_documents:,}", describe_held_out(manifest)
    for reason in list_reasons(manifest):
        name = spell_flag(reason.name) if reason.name in list_by(Fact.FILTERS) else reason.name
        yield f"  {name}", f"{reason.count:,}", reason.meaning
    if corpus.weighed is not None:
        weights = ", ".join(f"{name} {weight:g} times" for name, weight in manifest.settings.weight.items())
        yield "  weighed", f"{corpus.weighed:,}", f"rows of documents once they are repeated: {weights}"
    for what, count in sorted(corpus.no_text.items()):
        yield "  no text", f"{count:,}", what
    unreadable = len(corpus.unreadable)
    if again := len(corpus.skipped) - unreadable:
        yield "  named again", f"{again:,}", "other names of files that were read, left out"
    if unreadable or corpus.empty or corpus.replaced:
        places = f"{unreadable:,} unreadable places, each a document or more, up to a whole file; " * bool(unreadable)
        faults = f"{places}{corpus.empty:,} documents without text; bad characters replaced in {corpus.replaced:,}"
        yield "  left out", f"{unreadable + corpus.empty:,}{'+' * bool(unreadable)}", faults
    yield "sentences", f"{corpus.sentences:,}", f"{corpus.pieces / max(corpus.sentences, 1):.1f} pieces each"
    yield "pieces", f"{corpus.pieces:,}", describe_unknown(manifest)


@dataclass(frozen=True)
class Reason:
    """A reason for which documents were left out."""

    name: str
    count: int
    """Documents."""
    meaning: str


def list_reasons(manifest: Manifest) -> Iterator[Reason]:
    """Goes through the reasons for which documents with text were left out, in the order in which it was done."""
    corpus = manifest.corpus
    see = f"; see {FILTERED_REPORT}" if any(file.path == FILTERED_REPORT for file in manifest.tables) else ""
    filtered = corpus.filtered or {}
    for name in filter(filtered.__contains__, list_by(Fact.FILTERS)):
        yield Reason(name, filtered[name], f"left out while the text was read{see}")
    if corpus.copies is not None:
        yield Reason("copies", corpus.copies, "left out, as an earlier document has their text")
    if corpus.near_copies is not None:
        share = format_percent(manifest.settings.near_copies or 1)
        meaning = f"left out: {share} in common with an earlier one; see {NEAR_REPORT}"
        yield Reason("near copies", corpus.near_copies, meaning)
    if corpus.over_share is not None:
        limits = manifest.settings.max_share.items()
        spelled = ", ".join(f"{name} at most {format_percent(share)}" for name, share in limits)
        yield Reason("over share", corpus.over_share, f"left out, drawn at random: {spelled}")


def _set_row(figures: SetFigures) -> tuple[str, ...]:
    """Spells the figures of one set of shards for the columns of the table."""
    examples = max(figures.examples, 1)
    kind = "validation" if figures.validation else f"duplicate {figures.duplicate}"
    fill = 100 * figures.pieces / (examples * figures.length)
    random_next = 100 * figures.random_next / examples
    split = "/".join(f"{100 * count / max(figures.masked, 1):.1f}" for count in figures.split)
    quality = f"examples, {fill:.1f}% full, {random_next:.1f}% random next, masked {split}"
    return f"{figures.length} {kind}", f"{figures.examples:,}", quality


def describe_vocabulary_size(asked: int, given: str | None, extend: int, vocabulary: VocabularyFigures) -> str:
    """Describes the size of a vocabulary beside the size asked for, or its origin.

    `extend`: the number of words to add to those of `given`.
    """
    size, base = vocabulary.size, vocabulary.base_size or vocabulary.size
    if given is not None:
        case = "with case and accents" if vocabulary.cased else "in lower case"
        fewer = f" of {extend:,} words asked for" if size - base < extend else ""
        return f"vocabulary: {base:,} pieces of {given}, {case}" + (f"; {size - base:,}{fewer} added" if extend else "")
    fewer = "" if size >= asked else "; the text is too small for more"
    return f"vocabulary: {size:,} pieces of {asked:,} asked for{fewer}"


def describe_held_out(manifest: Manifest) -> str:
    """Describes the share of the text that is held out for validation, and the share asked for."""
    corpus, asked = manifest.corpus, manifest.settings.validation
    if not corpus.validation_documents:
        return "nothing for validation" + (" (--validation 0)" if not asked else "")
    examples = _counts_of_lengths(_validation_examples(manifest))
    share = f"{format_percent(_validation_share(manifest))} of the text ({format_percent(asked)} asked for)"
    what = "for validation" if corpus.passages is None else "passages for validation, out of all documents"
    leak = "; near copies of it may be in training (--near-copies 0.8 prevents that)"
    return f"{what}, {share}; examples: {examples}" + leak * (corpus.near_copies is None)


def format_percent(share: float) -> str:
    """Spells a share in percent, with two digits at least."""
    return f"{100 * share:.2g}%" if share < 0.095 else f"{100 * share:.0f}%"


def find_warnings(manifest: Manifest) -> Iterator[str]:
    """Yields warnings about the text and about validation, with what to do."""
    if find_unknown_share(manifest) >= MOST_UNKNOWN:
        cure = "take another --vocab, or --tokenizer bytelevel"
        yield f"{describe_unknown(manifest)}: the vocabulary cannot spell these words; {cure}"
    for use in find_use_of_text(manifest):
        if use.lost_parted > MOST_LOST * use.text:
            lost = format_percent(use.lost_parted / use.text)
            yield (
                f"sentences longer than an example lose {lost} of the text at length {use.length}; "
                "line breaks at the ends of sentences help"
            )
    if manifest.figures:
        yield from _validation_warnings(manifest)


def find_unknown_share(manifest: Manifest) -> float:
    """Computes the share of the text that became [UNK]: of its characters, or of its pieces in older manifests."""
    corpus = manifest.corpus
    if corpus.characters:
        return corpus.unknown_characters / corpus.characters
    return corpus.unknown / max(corpus.pieces, 1)


def describe_unknown(manifest: Manifest) -> str:
    """Describes how much of the text became [UNK]."""
    counted = "characters are in words that became" if manifest.corpus.characters else "pieces are"
    return f"{100 * find_unknown_share(manifest):.3f}% of the {counted} [UNK]"


def find_use_of_text(manifest: Manifest) -> list[SetFigures]:
    """Returns the first set of every length, which has the figures of the text used."""
    return [one for one in manifest.figures if not one.validation and not one.duplicate and one.text]


def _validation_warnings(manifest: Manifest) -> Iterator[str]:
    """Yields warnings if validation is too small for a score."""
    if not manifest.corpus.validation_documents:
        if manifest.settings.validation:
            yield (
                "nothing is held out for validation: the only document is short, or all long ones have copies; "
                "use more text or --drop-copies, or give --validation 0 to accept this"
            )
        return
    share = _validation_share(manifest)
    few = {length: count for length, count in _validation_examples(manifest).items() if count < FEWEST_EXAMPLES}
    if few:
        enough = share * 2 * FEWEST_EXAMPLES / max(1, min(few.values()))
        cure = f"use a new folder with --validation {enough:.1g}" if enough <= LARGEST_SHARE else "more text helps"
        yield f"validation has few examples, so its scores will be rough: {_counts_of_lengths(few)}; {cure}"


def _validation_examples(manifest: Manifest) -> dict[int, int]:
    """Counts the examples for validation, by their length."""
    return {figures.length: figures.examples for figures in manifest.figures if figures.validation}


def _counts_of_lengths(examples: dict[int, int]) -> str:
    """Spells numbers of examples by their lengths."""
    return ", ".join(f"{count:,} of length {length}" for length, count in examples.items())


def _validation_share(manifest: Manifest) -> float:
    """Computes the share of the text that is held out, from the pieces of the examples of the first length."""
    length = manifest.figures[0].length
    first = [figures for figures in manifest.figures if figures.length == length and not figures.duplicate]
    held_out = sum(figures.pieces for figures in first if figures.validation)
    return held_out / max(1, sum(figures.pieces for figures in first))
