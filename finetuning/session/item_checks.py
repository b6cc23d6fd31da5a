"""Checks of the items of a task before training: classes, repetitions and long texts, in a few lines.

It takes a second or two for files of any size: texts are compared by their hashes, and long splits are sampled for
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from finetuning.tasks.task import Seen, Task

SAMPLE = 5_000
"""Items of a split that are measured: about a second for texts of 1,000 characters."""
NAMED = 12
"""Maximum classes in a list."""
QUOTED = 40
"""Characters of a quoted text."""


def check_items(task: Task, trains: bool = True) -> Iterator[str]:
    """Yields lines on the training items, if it `trains`, and on the scored items."""
    splits = {split: task.describe_split(split) for split in (*["train"] * trains, *task.dev)}
    yield from count_classes(splits, task.head.kind == "classes")
    if trains:
        yield from find_repeated(splits)
    yield from find_cut(splits)


def count_classes(splits: Mapping[str, Seen], exclusive: bool) -> Iterator[str]:
    """Yields the items of each class in every split, and the classes that train lacks."""
    counts = {split: {name: count for name, count in seen.counts.items() if count} for split, seen in splits.items()}
    said = []
    for split, count in counts.items():
        if count:
            share = f" (the largest alone: {max(count.values()) / sum(count.values()):.1%})"
            said.append(f"{split} {_list_counts(count)}{share * (exclusive and split != 'train')}")
    if said:
        yield f"counts: {'; '.join(said)}"
    for split, count in counts.items():
        if new := {name: number for name, number in count.items() if name not in counts.get("train", count)}:
            yield f"{split} has classes not in train, which no model can learn: {_list_counts(new)}"


def _list_counts(counts: Mapping[str, int]) -> str:
    """Lists classes with their numbers of items."""
    shown = ", ".join(f"{name} {count:,}" for name, count in [*counts.items()][:NAMED])
    return shown + f" and {len(counts) - NAMED:,} classes more" * (len(counts) > NAMED)


def find_repeated(splits: Mapping[str, Seen]) -> Iterator[str]:
    """Yields a line on repeated training items, and on scored items that are in train."""
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
            share = f"{len(known):,} of {len(seen):,} ({len(known) / len(seen):.1%})"
            flattering = f"in train and in {split}, which flatters the scores"
            said.append(f"{flattering}: {share}, such as {_quote_text(seen, known[0])}")
    if said:
        yield "; ".join(said)


def _quote_text(seen: Seen, item: int) -> str:
    text = " ".join(seen.texts[0][item].split())
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}…")


def find_cut(splits: Mapping[str, Seen]) -> Iterator[str]:
    """Yields lines on texts that are cut off: how many of a split, or of a sample of it, and the share of pieces that
    is lost."""
    for split, seen in splits.items():
        chosen = np.sort(np.random.default_rng(0).permutation(len(seen))[:SAMPLE])
        for lengths in seen.lengths if len(chosen) else ():
            pieces = lengths.measure(chosen)
            cut = pieces[pieces > lengths.limit]
            if len(cut):
                lost = np.sum(cut - lengths.limit) / pieces.sum()
                sample = ", a sample" * (len(chosen) < len(seen))
                what = f"{lengths.what} longer than {lengths.setting} = {lengths.limit} are cut off"
                yield f"{what}: {len(cut):,} of {len(pieces):,} of {split}{sample} ({lost:.1%} of all pieces)"
