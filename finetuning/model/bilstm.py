"""A BiLSTM that reads the rows of every sequence in both directions, without padding, and what it says of a whole one.

n rows of all sequences one after another, s sequences, W width of what is read, H width of what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from data_prep.common.arrays import ranges


def build_bilstm(width: int, hidden: int, depth: int) -> nn.LSTM:
    """Makes a BiLSTM that gives rows of `hidden` numbers, half of them for each direction."""
    return nn.LSTM(width, hidden // 2, depth, bidirectional=True)


def initialize_bilstm(lstm: nn.LSTM, seed: int) -> None:
    """Draws fresh weights as PyTorch does, evenly up to 1/√(width of a direction): the same for a seed on any ranks."""
    generator = torch.Generator().manual_seed(seed)
    bound = lstm.hidden_size**-0.5
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def read_both_ways(lstm: nn.LSTM, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """(n, H): what a BiLSTM says of every row, (n, W), of sequences of these lengths, some of which may be empty."""
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
    """(s, H): the highest of every number over the rows of a sequence, which is what a BiLSTM says of the whole."""
    return torch.segment_reduce(rows, "max", lengths=torch.tensor(lengths, device=rows.device))
