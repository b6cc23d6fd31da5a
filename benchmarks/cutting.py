"""The sides of a contest of preparation.py: cutting sentences into pieces, and nothing else.

All make the same ids of the same sentences: ours of their bytes, which is what shard.py has, the others of strings.
Each begins without knowing a word of them, whatever turns it took before, and what it loads is not counted.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.contests import OURS
from data_prep.vocabulary.vocabulary import load_vocabulary
from data_prep.vocabulary.wordpiece import FastWordPiece

BATCH = 1000  # sentences that `tokenizers` is given at a time


def cutting_sides(vocabulary: Path, text: Path) -> dict[str, Callable[[], float]]:
    """The sides, each of which returns the seconds that it took; nanotoken is one where it is installed."""
    sides = {OURS: ours, "tokenizers alone": tokenizers_alone}
    if importlib.util.find_spec("nanotoken"):
        sides["nanotoken alone"] = nanotoken_alone
    pipeline = load_vocabulary(vocabulary, cased=False).pipeline()
    sentences = text.read_text(encoding="utf-8").split("\n")
    return {name: partial(side, pipeline, sentences) for name, side in sides.items()}


def ours(pipeline: Tokenizer, sentences: Sequence[str]) -> float:
    """What cuts the sentences of shard.py."""
    encoded = [sentence.encode() for sentence in sentences]
    text, ends = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(each) for each in encoded])
    encoder = FastWordPiece(pipeline, cased=False)
    return _seconds(lambda: encoder.encode(text, ends))


def tokenizers_alone(pipeline: Tokenizer, sentences: Sequence[str]) -> float:
    """The library that makes the pipeline, which remembers no words."""
    return _seconds(lambda: in_batches(pipeline, sentences))


def nanotoken_alone(pipeline: Tokenizer, sentences: Sequence[str]) -> float:
    """A tokenizer in Rust that remembers words too, on the core that we are on."""
    import nanotoken

    encoder = nanotoken.Tokenizer(pipeline)
    return _seconds(lambda: encoder.encode_batch(sentences, add_special_tokens=False, parallel=False))


def in_batches(pipeline: Tokenizer, sentences: Sequence[str]) -> None:
    """Cuts sentences with `tokenizers`, in batches, as fast as it is used from Python."""
    for at in range(0, len(sentences), BATCH):
        pipeline.encode_batch(sentences[at : at + BATCH], add_special_tokens=False)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
