"""Checks of the items of a task before training: counts, repetitions, empty and long texts, in a few lines.

It takes a second or two for files of any size: texts are compared by their hashes, and long splits are sampled for
lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from finetuning.tasks.task import PieceLengths, Seen, Task

SAMPLE, SAMPLE_CHARACTERS = 20_000, 4_000_000
"""Items and characters of a split that are measured: about a second."""
NAMED = 12
"""The number of classes up to which each is listed."""
QUOTED = 40
"""Characters of a quoted text."""
FEW = 2
"""With fewer items per class on average, the labels are probably not classes."""


def check_items(task: Task, trains: bool = True) -> Iterator[str]:
    """Yields lines on the training items, if it `trains`, and on the scored items."""
    splits = {split: task.describe_split(split) for split in (*["train"] * trains, *task.dev)}
    if counts := {split: seen.counts for split, seen in splits.items() if seen.counts}:
        yield count_classes(counts, task.head.kind == "classes")
        yield from doubt_classes(splits, task.head.kind == "classes")
    yield from describe_numbers(splits)
    yield from find_repeated(splits)
    empty = {split: sum(map(_is_empty, zip(*seen.texts, strict=True))) for split, seen in splits.items()}
    if found := [f"{count:,} of {split}" for split, count in empty.items() if count]:
        yield f"empty texts: {', '.join(found)}"
    yield from find_cut(splits)


def count_classes(counts: Mapping[str, Mapping[str, int]], exclusive: bool) -> str:
    """Formats the items of each class in every split; of many classes the smallest and the largest."""
    said = []
    for split, count in counts.items():
        if len(count) <= NAMED:
            said.append(f"{split} " + ", ".join(f"{_quote_name(name)} {number:,}" for name, number in count.items()))
        else:
            least, most = min(count, key=count.__getitem__), max(count, key=count.__getitem__)
            there = sum(map(bool, count.values()))
            extent = f"from {count[least]:,} ({_quote_name(least)}) to {count[most]:,} items ({_quote_name(most)})"
            said.append(f"{split} has {there:,} of {len(count):,} classes, {extent}")
        if exclusive and split != "train":
            said[-1] += f" (the largest alone: {100 * max(count.values()) / max(1, sum(count.values())):.1f}%)"
    return f"counts: {'; '.join(said)}"


def _quote_name(name: str) -> str:
    """Quotes the name of a class if it begins or ends with blanks."""
    return name if name == name.strip() else repr(name)


def doubt_classes(splits: Mapping[str, Seen], exclusive: bool) -> Iterator[str]:
    """Yields doubts about classes: similar names, classes without training items, and labels that are no classes."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in next(iter(splits.values())).counts:
        alike["".join(name.split()).casefold()].append(name)
    for names in alike.values():
        if len(names) > 1:
            yield f"{' and '.join(map(repr, names))} differ by case or blanks alone: are they one class?"
    if "train" not in splits:
        return
    counts, items = splits["train"].counts, len(splits["train"])
    there = [name for name, count in counts.items() if count]
    for split, seen in splits.items():
        if new := {name: count for name, count in seen.counts.items() if count and name not in there}:
            shown = ", ".join(f"{name} {count:,}" for name, count in [*new.items()][:NAMED])
            more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
            yield f"{split} has what train never has, so that nobody can learn it: {shown}{more}"
    if not exclusive:
        return
    if len(there) == 1:
        yield f"all training items are {there[0]!r}: there is nothing to learn"
    elif len(counts) > items:
        yield f"there are more classes ({len(counts):,}) than training items ({items:,})"
    elif items < FEW * len(there) and len(there) > 2:
        yield (
            f"{len(there):,} classes for {items:,} training items: is the column of the label a name of the item, or "
            'a number (kind = "score")?'
        )


def describe_numbers(splits: Mapping[str, Seen]) -> Iterator[str]:
    """Yields the range and mean of scores."""
    known = {split: seen.numbers for split, seen in splits.items() if seen.numbers is not None and len(seen)}
    said = []
    for split, numbers in known.items():
        mean = numbers.mean(dtype=np.float64)
        said.append(f"{split} {numbers.min():g} to {numbers.max():g}, mean {mean:.4g}")
    if said:
        yield f"numbers: {'; '.join(said)}"
    if "train" in known and np.ptp(known["train"]) == 0:
        yield "all numbers of train are the same: there is nothing to learn"


def _is_empty(texts: tuple[str, ...]) -> bool:
    """Tells whether one of the texts of an item is empty or blank."""
    return any(not text or text.isspace() for text in texts)


def find_repeated(splits: Mapping[str, Seen]) -> Iterator[str]:
    """Yields a line on repeated training items, and on scored items that are in train."""
    if "train" not in splits:
        return
    train, keys = splits["train"], {}
    for split, seen in splits.items():
        keys[split] = np.fromiter(map(hash, zip(*seen.texts, strict=True)), np.int64, len(seen))
    _, first, group = np.unique(keys["train"], return_index=True, return_inverse=True)
    repeated = np.arange(len(train)) != first[group]
    answers = np.fromiter(map(hash, train.answers), np.int64, len(train))
    unlike = answers != answers[first[group]]
    said = []
    if count := int(repeated.sum()):
        where = np.flatnonzero(unlike if unlike.any() else repeated)[0]
        other = f", {unlike.sum():,} of them with another answer" * bool(unlike.any())
        said.append(f"twice in train: {count:,} of {len(train):,} items{other}, such as {_quote_text(train, where)}")
    for split, seen in splits.items():
        known = np.flatnonzero(np.isin(keys[split], keys["train"]))
        if split != "train" and len(known):
            share = f"{len(known):,} of {len(seen):,} ({_format_share(len(known) / len(seen))})"
            flattering = f"in train and in {split}, which flatters the scores"
            said.append(f"{flattering}: {share}, such as {_quote_text(seen, known[0])}")
    if said:
        yield "; ".join(said)


def _quote_text(seen: Seen, item: int) -> str:
    text = " ".join(seen.texts[0][item].split())
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}…")


class Measured(NamedTuple):
    """The measured lengths of a split."""

    lengths: PieceLengths
    pieces: Array
    """Pieces of every sequence of the sample."""
    is_sample: bool


def measure(seen: Seen) -> Iterator[Measured]:
    """Measures the items of a split, or a fixed sample of a long one."""
    if not len(seen):
        return
    order = np.random.default_rng(0).permutation(len(seen))[:SAMPLE]
    characters = np.cumsum([sum(len(column[number]) for column in seen.texts) for number in order.tolist()])
    chosen = order[: max(1, int(np.searchsorted(characters, SAMPLE_CHARACTERS, "right")))]
    for lengths in seen.lengths:
        yield Measured(lengths, lengths.measure(np.sort(chosen)), len(chosen) < len(seen))


def find_cut(splits: Mapping[str, Seen]) -> Iterator[str]:
    """Yields lines on texts that are cut off: how many, and the share of pieces that is lost."""
    told: dict[str, list[str]] = defaultdict(list)
    for split, seen in splits.items():
        for measured in measure(seen):
            cut = measured.pieces[measured.pieces > measured.lengths.limit]
            if not measured.lengths.cuts or not len(cut):
                continue
            total, longest = measured.pieces.sum(), measured.pieces.max()
            share, lost = len(cut) / len(measured.pieces), np.sum(cut - measured.lengths.limit) / total
            what = f"{measured.lengths.what} longer than {measured.lengths.setting} = {measured.lengths.limit}"
            told[what].append(
                f"{len(cut):,} of {len(measured.pieces):,} of {split}{', a sample' * measured.is_sample} "
                f"({_format_share(share)}; {_format_share(lost)} of all pieces; the longest has {longest:,})"
            )
    for what, said in told.items():
        yield f"{what} are cut off: {', '.join(said)}"


def _format_share(share: float) -> str:
    """Formats a share that is not zero, however small."""
    return f"{100 * share:.1f}%" if share >= 0.0005 else "less than 0.1%"
