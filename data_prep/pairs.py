#!/usr/bin/env python3
"""Makes pairs of texts from documents, to train embeddings that search.

    python data_prep/pairs.py --docs wiki/ --out pairs
    python finetuning/run_task.py pairs/pairs.toml --model exported/mini

A pair is a title and the first passage of its document, or two passages that follow each other. One document in twenty
is held out: its pairs are dev.jsonl, and the retrieval test held-out/ in BEIR's form. passages.jsonl has all passages.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass

from data_prep.common.capacity import limit_memory
from data_prep.common.errors import UserError, quote
from data_prep.common.flags import read_flags
from data_prep.common.outputs import making
from data_prep.common.terminal import open_console, run_curable
from data_prep.readers.reader import Problems
from data_prep.readers.sources import describe_sources, find_files, list_left_out
from data_prep.readers.text_pairs import DEV, HELD_OUT, PASSAGES, SHORTEST, TASK, TRAIN, write_pairs
from data_prep.settings import Settings


@dataclass(frozen=True)
class Pairs:
    """Makes pairs of texts from documents, to train embeddings that search."""

    docs: tuple[str, ...]
    """Text: files, folders or globs in any format that shard.py reads; what cannot be read is left out and listed."""
    out: Path = Path("pairs")
    """Folder for the pairs, the passages, the task and the retrieval test."""
    replace: bool = False
    """Replace files of these names that something else has made."""


def main(arguments: list[str]) -> int:
    """Makes the pairs that the arguments ask for; returns the exit code."""
    wanted = read_flags(Pairs, arguments, "pairs.py", "search")
    return run_curable(lambda: prepare(wanted))


def prepare(wanted: Pairs) -> None:
    """Writes the pairs, and prints how many there are and what was left out."""
    console, problems = open_console(soft_wrap=True), Problems("skip")
    if not wanted.docs:
        raise UserError("--docs: name a file, a folder or a glob (or try --docs demo)")
    files = find_files([*wanted.docs], out=wanted.out, problems=problems)
    for line in describe_sources(files, Settings()):
        console.print(line, markup=False)
    places = [wanted.out / name for name in (TASK, TRAIN, DEV, HELD_OUT, PASSAGES)]
    with making(places, "pairs.py", [Path(path) for path in wanted.docs], wanted.replace):
        counts = write_pairs(wanted.out, files, problems)
    untitled = f", {counts['untitled']:,} of them without a title" * bool(counts["untitled"])
    console.print(f"{counts['passages']:,} passages; {counts['documents']:,} documents with pairs{untitled}")
    console.print(f"{counts[TRAIN]:,} pairs for training")
    console.print(f"{counts[DEV]:,} pairs of {counts['held-out documents']:,} held-out documents")
    if counts["too short"]:
        texts = f"without a title and a passage of {SHORTEST} characters, or two passages"
        console.print(f"without pairs: {counts['too short']:,} documents {texts}")
    for line in list_left_out(problems.skipped):
        console.print(line, markup=False)
    console.print(f"next: python finetuning/run_task.py {quote(wanted.out / TASK)}", markup=False)


if __name__ == "__main__":
    limit_memory()
    sys.exit(main(sys.argv[1:]))
