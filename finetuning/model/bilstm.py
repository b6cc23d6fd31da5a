"""A BiLSTM over the rows of sequences, without padding, and the pooling of its outputs.

n rows of all sequences one after another, s sequences, W input width, H output width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from data_prep.common.arrays import ranges


def build_bilstm(width: int, hidden: int, depth: int) -> nn.LSTM:
    """Makes a BiLSTM of output width `hidden`, half of it for each direction."""
    return nn.LSTM(width, hidden // 2, depth, bidirectional=True)


def initialize_bilstm(lstm: nn.LSTM, seed: int) -> None:
    """Draws weights uniformly up to 1/√(width of a direction), as PyTorch does; the same on all ranks for a seed."""
    generator = torch.Generator().manual_seed(seed)
    bound = lstm.hidden_size**-0.5
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def read_both_ways(lstm: nn.LSTM, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Runs a BiLSTM over rows (n, W) of sequences of these lengths, some of them empty; returns (n, H)."""
    if not len(rows):
        return rows.new_zeros((0, 2 * lstm.hidden_size))
    sizes = np.asarray(lengths)
    places = np.empty_like(sizes)
    places[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))  # long sequences first
    times = ranges(np.zeros_like(sizes), sizes)
    order = np.lexsort((np.repeat(places, sizes), times))  # the first rows of all sequences, then the second ones, …
    packed = PackedSequence(rows[_move_index(order, rows)], torch.from_numpy(np.bincount(times)))
    read: PackedSequence = lstm(packed)[0]
    return read.data[_move_index(np.argsort(order), rows)]


def _move_index(numbers: np.ndarray, rows: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(rows.device, non_blocking=True)


def take_maximum(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Max-pools the rows of each sequence: (s, H)."""
    return torch.segment_reduce(rows, "max", lengths=torch.tensor(lengths, device=rows.device))
