"""What transformers, the peer of the training benchmarks, is given: the same shards and the same batches, padded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.measure import SHARD
from pretraining.model.batch import PretrainingBatch


def make_shards(data: Path, out: Path, lengths: Sequence[int] = (128, 512), files: str = "wiki/AA") -> Path:
    """Shards of real text with the published vocabulary, one duplicate of each length."""
    command = [sys.executable, str(SHARD), "--docs", str(data / files), "--out", str(out)]
    options = ["--vocab", str(data / "vocab.txt"), "--duplicates", "1", "--lengths", *map(str, lengths)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return out


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
