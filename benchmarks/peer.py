"""What the sides of the benchmarks are given: shards, sentences, words, and for transformers the same batches padded.

Real text is in the folder that CLOZE_DATA names; where it is not, the corpus that is built in takes its place.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.measure import ROOT, SHARD
from data_prep.common.errors import UserError
from data_prep.readers import demo
from data_prep.shards import MANIFEST
from data_prep.vocabulary.source import find_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary, train_vocabulary
from pretraining.model.batch import PretrainingBatch

BUILD = ROOT / "build"
DEMO_FILES, DEMO_PIECES = 400, 8000
LENGTHS = ("--lengths", 128, 512)


def make_shards(out: Path, *words: object) -> Path:
    """Shards with one duplicate of each length, by these words of shard.py; UserError where it fails."""
    command = [sys.executable, str(SHARD), *map(str, words), "--duplicates", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{out}: no shards could be made:\n{done.stdout[-500:]}{done.stderr[-1000:]}")
    return out


def find_shards(given: Path | None, data: Path, say: Callable[[str], None]) -> Path:
    """Shards to train on: those that are given, or made of real text where it is, or of the corpus that is built in."""
    if given is not None:
        if not (given / MANIFEST).exists():
            raise UserError(
                f"{given}: no shards there (no {MANIFEST}); make them with data_prep/shard.py --out {given}"
            )
        return given
    if (data / "wiki").is_dir():
        some = data / "wiki/AA"  # 45 MB are more than enough
        real = ("--docs", some if some.is_dir() else data / "wiki", "--vocab", data / "vocab.txt")
        return _prepare("benchmark-wiki", *real, say=say)
    if (BUILD / "demo" / MANIFEST).exists():
        say(f"{BUILD / 'demo'}: the corpus that is built in (real text: CLOZE_DATA, or --shards)")
        return BUILD / "demo"
    return _prepare("benchmark-demo", "--docs", "demo", "--vocab-size", 8192, say=say)


def _prepare(name: str, *words: object, say: Callable[[str], None]) -> Path:
    """Makes shards in build/, unless they are there already, in a folder that is named by what they are made of."""
    out = BUILD / f"{name}-{zlib.crc32(' '.join(map(str, words)).encode()):08x}"
    if not (out / MANIFEST).exists():
        say(f"{out}: made now, of {words[1]}")
        make_shards(out, *words, *LENGTHS)
    return out


def demo_sentences() -> Iterator[str]:
    """Sentences of the documentation strings of this Python."""
    for path in demo.files()[:DEMO_FILES]:
        for _, text in demo.DOCSTRING.findall(path.read_bytes().decode(errors="ignore")):
            for passage in demo.prose(text):
                yield from (sentence for sentence in re.split(r"(?<=[.!?]) ", passage) if len(sentence) > 1)


def find_words(data: Path) -> Vocabulary:
    """The published vocabulary where it is at hand, otherwise one of the words of the demo corpus."""
    if (data / "vocab.txt").is_file():
        return find_vocabulary(str(data / "vocab.txt"), cased=False)
    words = Counter(word for each in demo_sentences() for word in re.findall(r"\w+|[^\w\s]", each.lower()))
    return train_vocabulary(words, DEMO_PIECES, cased=False)


def write_demo_task(folder: Path) -> Path:
    """Writes sentences of the demo corpus as SST-2 has them, of two classes that mean nothing, and returns the folder
    that stands for the one of real tasks."""
    task = folder / "glue" / "SST-2"
    task.mkdir(parents=True)
    rows = [f"{sentence}\t{number % 2}\n" for number, sentence in enumerate(demo_sentences()) if "\t" not in sentence]
    for name, some in (("train", rows), ("dev", rows[:64])):
        (task / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *some]))
    return folder


def padded(batch: PretrainingBatch) -> dict[str, torch.Tensor]:
    """The batch as transformers takes it, padded to its longest sequence."""
    width = max(batch.lengths)
    ids, segments, mask = (torch.zeros(len(batch.lengths), width, dtype=torch.int64) for _ in range(3))
    labels, flat = torch.full_like(ids, -100), torch.full_like(batch.pieces, -100)
    flat[batch.chosen] = batch.labels
    for row, (start, end) in enumerate(pairwise(batch.starts.tolist())):
        size = end - start
        ids[row, :size], segments[row, :size], mask[row, :size] = batch.pieces[start:end], batch.segments[start:end], 1
        labels[row, :size] = flat[start:end]
    return {
        "input_ids": ids,
        "token_type_ids": segments,
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": batch.random_next,
    }
