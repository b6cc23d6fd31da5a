"""The figures with which shard.py ends, so that a user sees at once what the text has become, and what was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from data_prep.settings import LARGEST_SHARE, num_held_out

MOST_LOST = 0.005
"""The share of the text that over-long sentences may lose without a warning."""
FEWEST_EXAMPLES = 100
"""How many examples of a length validation needs, about, for scores that say something."""


def figures_table(manifest: dict[str, Any]) -> Table:
    """Lays out the figures of a manifest: the corpus, a line for every set of shards, and the bytes they take."""
    corpus, sets, settings = manifest["corpus"], manifest["sets"], manifest["settings"]
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("documents", f"{corpus['documents']:,}")
    table.add_row("  held out", f"{corpus['validation_documents']:,}", held_out(manifest))
    if "copies" in corpus:
        table.add_row("  copies", f"{corpus['copies']:,}", "left out, as an earlier document has their text")
    if "over_share" in corpus:
        shares = ", ".join(f"{name} at most {percent(share)}" for name, share in settings["max_share"].items())
        table.add_row("  over share", f"{corpus['over_share']:,}", f"left out: {shares}")
    if corpus["skipped"] or corpus["empty"] or corpus["replaced"]:
        faults = (
            f"{len(corpus['skipped']):,} unreadable, {corpus['empty']:,} without text; "
            f"bad characters replaced in {corpus['replaced']:,}"
        )
        table.add_row("  left out", f"{len(corpus['skipped']) + corpus['empty']:,}", faults)
    pieces_each = corpus["pieces"] / max(corpus["sentences"], 1)
    table.add_row("sentences", f"{corpus['sentences']:,}", f"{pieces_each:.1f} pieces each")
    unknown = 100 * corpus["unknown"] / max(corpus["pieces"], 1)
    table.add_row("pieces", f"{corpus['pieces']:,}", f"{unknown:.3f}% of them [UNK]")
    for figures in sets:
        table.add_row(*_set_row(figures))
    for length, use in _use_of_text(manifest).items():
        own, lost = (100 * use[name] / use["text"] for name in ("own", "lost_parted"))
        table.add_row(
            f"{length} text",
            f"{own:.1f}%",
            f"is in A or a true B; truncation took {100 - own:.1f}%, "
            f"{lost:.2f}% of over-long sentences ({use['parted']:,} parted)",
        )
    stored, size = sum(figures["pieces"] for figures in sets), manifest["bytes"]
    table.add_row("bytes", f"{size:,}", f"{size / max(stored, 1):.2f} for each of {stored:,} pieces stored")
    return table


def vocabulary_line(asked: int, given: str | None, extend: int, vocabulary: dict[str, Any]) -> str:
    """Says of a manifest's vocabulary how many pieces it has, and how many were asked for or where they come from.

    `extend` is how many words were to be added to those of `given`.
    """
    size, base = vocabulary["size"], vocabulary.get("base_size", vocabulary["size"])
    if given is not None:
        case = "with case and accents" if vocabulary["cased"] else "in lower case"
        fewer = f" of {extend:,} words asked for" if size - base < extend else ""
        return f"vocabulary: {base:,} pieces of {given}, {case}" + (f"; {size - base:,}{fewer} added" if extend else "")
    fewer = "" if size >= asked else "; the text is too small for more"
    return f"vocabulary: {size:,} pieces of {asked:,} asked for{fewer}"


def held_out(manifest: dict[str, Any]) -> str:
    """Says which share of the text is held out for validation, and what was asked for."""
    corpus, asked = manifest["corpus"], manifest["settings"]["validation"]
    if not corpus["validation_documents"]:
        return "nothing for validation" + (" (--validation 0)" if not asked else "")
    examples = ", ".join(f"{count:,} of length {length}" for length, count in _validation_examples(manifest).items())
    share = f"{percent(_validation_share(manifest))} of the text ({percent(asked)} asked for)"
    what = "passages for validation, out of all documents" if "passages" in corpus else "for validation"
    return f"{what}, {share}; examples: {examples}"


def percent(share: float) -> str:
    """Spells a share in percent, with two digits at least."""
    return f"{100 * share:.2g}%" if share < 0.095 else f"{100 * share:.0f}%"


def warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """Says what a user should know of the text and of validation before training on it, and what to do."""
    for length, use in _use_of_text(manifest).items():
        if use["lost_parted"] > MOST_LOST * use["text"]:
            lost = percent(use["lost_parted"] / use["text"])
            yield (
                f"over-long sentences lose {lost} of the text at length {length}: they have no full stop for more than "
                "an example has room for, and are parted before words; where the text lacks line breaks at the ends of "
                "sentences, these help"
            )
    yield from _validation_warnings(manifest)


def _use_of_text(manifest: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Looks up what became of the pieces of the text, by the lengths of examples; earlier versions did not count it."""
    return {
        figures["length"]: figures
        for figures in manifest["sets"]
        if not figures["validation"] and not figures["duplicate"] and figures.get("text")
    }


def _validation_warnings(manifest: dict[str, Any]) -> Iterator[str]:
    """Says where validation is too small to measure a model by, or takes too much of the text, and what to do."""
    corpus, asked = manifest["corpus"], manifest["settings"]["validation"]
    number, total = corpus["validation_documents"], corpus["documents"]
    if not number:
        if asked:
            cause = "there is one document, and a short one" if total == 1 else "all documents are copies of one"
            cure = "take more text, or give --validation 0 if that is meant"
            if "passages" in corpus:
                cause, cure = "every long document has a copy", "--drop-copies leaves the copies out"
            yield f"nothing is held out for validation: {cause}; {cure}"
        return
    share = _validation_share(manifest)
    few = {length: count for length, count in _validation_examples(manifest).items() if count < FEWEST_EXAMPLES}
    if few:
        counts = ", ".join(f"{count:,} of length {length}" for length, count in few.items())
        enough = share * 2 * FEWEST_EXAMPLES / max(1, min(few.values()))
        cure = f"--validation {enough:.1g} holds out enough" if enough <= LARGEST_SHARE else "more text helps"
        yield f"validation has few examples, so its scores will be rough: {counts}; {cure}"
    if share > LARGEST_SHARE:
        wanted = num_held_out(total, asked)
        if "passages" in corpus and asked <= LARGEST_SHARE:
            cause, cure = f"{number:,} passages of a short text are as much as that", "take more text"
        elif number > wanted and "passages" not in corpus:
            cause = f"{number:,} documents are held out where {wanted:,} would do, since copies of a text go together"
            cure = "leave the copies out of the text"
        elif asked > LARGEST_SHARE:
            cause, cure = f"--validation {asked:g} asks for it", "a smaller share leaves more to train on"
        else:
            cause = f"{number:,} of {total:,} documents {'is' if number == 1 else 'are'} as large as that"
            cure = "cut long documents into several, or take more text"
        yield f"validation takes {percent(share)} of the text from training: {cause}; {cure}"


def _validation_examples(manifest: dict[str, Any]) -> dict[int, int]:
    """Counts the examples for validation, by their length."""
    return {figures["length"]: figures["examples"] for figures in manifest["sets"] if figures["validation"]}


def _validation_share(manifest: dict[str, Any]) -> float:
    """Tells which share of the text is held out, by the pieces of the examples of the first length, masked once."""
    sets = manifest["sets"]
    first = [figures for figures in sets if figures["length"] == sets[0]["length"] and not figures["duplicate"]]
    held_out = sum(figures["pieces"] for figures in first if figures["validation"])
    return float(held_out / max(1, sum(figures["pieces"] for figures in first)))


def _set_row(figures: dict[str, Any]) -> tuple[str, str, str]:
    """Spells the figures of one set of shards for the columns of the table."""
    examples = max(figures["examples"], 1)
    kind = "validation" if figures["validation"] else f"duplicate {figures['duplicate']}"
    fill = 100 * figures["pieces"] / (examples * figures["length"])
    random_next = 100 * figures["random_next"] / examples
    split = "/".join(f"{100 * count / max(figures['masked'], 1):.1f}" for count in figures["split"])
    quality = f"examples, {fill:.1f}% full, {random_next:.1f}% random next, masked {split}"
    return f"{figures['length']} {kind}", f"{figures['examples']:,}", quality
