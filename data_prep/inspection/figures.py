"""The table of figures with which shard.py ends, so that a user sees at once what the text has become."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def figures_table(manifest: dict[str, Any]) -> Table:
    """Lays out the figures of a manifest: the corpus, a line for every set of shards, and the bytes they take."""
    corpus, sets = manifest["corpus"], manifest["sets"]
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    held_out = f"{corpus['validation_documents']:,} held out for validation"
    table.add_row("documents", f"{corpus['documents']:,}", held_out)
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
    stored, size = sum(figures["pieces"] for figures in sets), manifest["bytes"]
    table.add_row("bytes", f"{size:,}", f"{size / max(stored, 1):.2f} for each of {stored:,} pieces stored")
    return table


def _set_row(figures: dict[str, Any]) -> tuple[str, str, str]:
    """Spells the figures of one set of shards for the columns of the table."""
    examples = max(figures["examples"], 1)
    kind = "validation" if figures["validation"] else f"duplicate {figures['duplicate']}"
    fill = 100 * figures["pieces"] / (examples * figures["length"])
    random_next = 100 * figures["random_next"] / examples
    split = "/".join(f"{100 * count / max(figures['masked'], 1):.1f}" for count in figures["split"])
    quality = f"examples, {fill:.1f}% full, {random_next:.1f}% random next, masked {split}"
    return f"{figures['length']} {kind}", f"{figures['examples']:,}", quality
