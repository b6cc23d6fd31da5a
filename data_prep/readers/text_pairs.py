"""Pairs of texts of one document, to train embeddings on: its title with its first passage, a passage with the next.

No text is in two pairs of a document. Documents are held out by the hash of their text, so copies stay on one side.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Document, Options, Problems
from data_prep.readers.sources import SourceFile

SHORTEST, LONGEST = 100, 1000
"""Characters of a passage: shorter paragraphs are joined with the next ones, longer ones are cut."""
SHARE, MOST_HELD_OUT = 0.05, 20_000_000
"""Share of the documents that is held out, of at most about this many bytes of files: they are kept in memory."""
TASK, TRAIN, DEV = "pairs.toml", "train.jsonl", "dev.jsonl"
HELD_OUT, PASSAGES = "held-out", "passages.jsonl"
"""What is written: a task of run_task.py, a folder in BEIR's form with the pairs of dev, and all passages."""
TASK_TEXT = f'name = "pairs"\nkind = "embeddings"\ntrain = "{TRAIN}"\ndev = "{DEV}"\n'
Pair = tuple[str, str]


def cut_passages(paragraphs: Iterable[str]) -> list[str]:
    """Cuts a text into passages; a shorter rest is added to the last one."""
    passages, text = list[str](), ""
    for paragraph in paragraphs:
        text, start = f"{text} {paragraph}".strip(), 0
        while len(text) - start > LONGEST:
            blank = text.rfind(" ", start + SHORTEST, start + LONGEST)
            end = blank if blank > 0 else start + LONGEST
            passages.append(text[start:end].strip())
            start = end
        text = text[start:].strip()
        if len(text) >= SHORTEST:
            passages.append(text)
            text = ""
    if text:
        passages[-1:] = [" ".join([*passages[-1:], text])]
    return passages


def pair_texts(title: str, passages: Sequence[str]) -> list[Pair]:
    """Pairs the texts of a document; none if they are too short."""
    texts = [*filter(None, [title.strip()]), *passages]
    pairs = zip(texts[::2], texts[1::2], strict=False)
    return [(first, second) for first, second in pairs if first != second and len(second) >= SHORTEST]


def read_documents(files: Sequence[SourceFile], problems: Problems) -> Iterator[Document]:
    """Yields the documents of files of any format, one after another."""
    for file in files:
        reader = list_readers()[file.format]
        for span in reader.spans(Path(file.path), file.size):
            yield from reader.read(span, Options(problems, source=file.source))


def divide(documents: Iterable[tuple[str, list[Pair]]], share: float) -> Iterator[tuple[bool, list[Pair]]]:
    """Yields the pairs of each document, which has a text, and whether it is held out: those with the lowest hashes of
    their texts, at least one and its copies."""
    lowest, kept, some = 1.0, list[list[Pair]](), False
    for text, pairs in documents:
        hashed = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
        rank = int.from_bytes(hashed, "big") / 2**64
        some = some or rank < share
        if some or rank > lowest:
            yield rank < share, pairs
        elif rank == lowest:
            kept.append(pairs)
        else:  # the one to hold out if no other is
            yield from ((False, each) for each in kept)
            lowest, kept = rank, [pairs]
    yield from ((not some, each) for each in kept)


def write_pairs(folder: Path, files: Sequence[SourceFile], problems: Problems) -> Counter[str]:
    """Writes the pairs of all documents in files, those of held-out documents apart; counts documents and pairs."""
    share = min(SHARE, MOST_HELD_OUT / sum(file.size for file in files))
    counts, held_out = Counter[str](), list[Pair]()

    def find_pairs(every: BinaryIO) -> Iterator[tuple[str, list[Pair]]]:
        for document in read_documents(files, problems):
            passages = cut_passages(document.passages)
            pairs = pair_texts(document.title, passages)
            every.writelines(spell_row({"title": document.title, "text": text}) for text in passages)
            counts["passages"] += len(passages)
            counts["untitled"] += bool(pairs) and not document.title.strip()
            counts["documents" if pairs else "too short"] += 1
            if pairs:
                yield "\n".join(passages), pairs  # without the title: copies may have other ones

    with replacing(folder / TRAIN) as train, replacing(folder / PASSAGES) as every:
        for is_held_out, pairs in divide(find_pairs(every), share):
            counts["held-out documents"] += is_held_out
            held_out += pairs if is_held_out else []
            train.writelines([] if is_held_out else map(spell_pair, pairs))
            counts[DEV if is_held_out else TRAIN] += len(pairs)
        if not counts[TRAIN]:
            text = f"--docs: {counts['documents']:,} documents with pairs, and training takes 2: one is held out"
            short = f"{counts['too short']:,} documents are too short for a pair"
            raise UserError("\n".join([text, *[short] * bool(counts["too short"]), *problems.skipped[:1]]))
    write_file(folder / DEV, map(spell_pair, held_out))
    write_retrieval(folder / HELD_OUT, held_out)
    write_file(folder / TASK, [TASK_TEXT.encode()])
    return counts


def write_file(path: Path, lines: Iterable[bytes]) -> None:
    """Writes lines into a file, whole or not at all."""
    with replacing(path) as file:
        file.writelines(lines)


def spell_pair(pair: Pair) -> bytes:
    """Spells a pair as a line of JSON."""
    return spell_row({"question": pair[0], "passage": pair[1]})


def spell_row(row: dict[str, str]) -> bytes:
    """Spells a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"


def write_retrieval(folder: Path, pairs: Sequence[Pair]) -> None:
    """Writes pairs as a retrieval test in BEIR's form; equal texts are one query or one document."""
    asked, found = (dict.fromkeys(side) for side in zip(*pairs, strict=True))
    queries, corpus = ({text: str(number) for number, text in enumerate(texts)} for texts in (asked, found))
    rows = ({"_id": name, "title": "", "text": text} for text, name in corpus.items())
    write_file(folder / "queries.jsonl", (spell_row({"_id": name, "text": text}) for text, name in queries.items()))
    write_file(folder / "corpus.jsonl", map(spell_row, rows))
    lines = dict.fromkeys(f"{queries[question]}\t{corpus[passage]}\t1\n" for question, passage in pairs)
    write_file(folder / "qrels" / "test.tsv", (line.encode() for line in ("query-id\tcorpus-id\tscore\n", *lines)))
