"""The activations of frozen encoders, which are the same in every epoch: computed once, and kept in memory.

Every rank keeps those of all items, since an epoch may give it any of them. A start computes them in the same batches
as the start before it, so that a run that was stopped continues exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data_prep.common.arrays import Array
from finetuning.inputs import Encoded, Items
from finetuning.model.features import FrozenEncoders
from finetuning.ragged import Ragged
from finetuning.running.batches import count_pieces, encode_in_order, pack, split_by_pieces
from finetuning.running.outputs import give_up_if_asked
from pretraining.processes.context import Context
from pretraining.processes.group import gather

GB = 1e9


@dataclass(frozen=True)
class KeptItems(Items):
    """The items of a split with their activations."""

    items: Items
    activations: Tensor  # (rows of all items, k, W)
    rows: Ragged
    """The rows of every item: one for each piece, or for each tagged word."""

    def __len__(self) -> int:
        return len(self.items)

    def encode(self, numbers: Array) -> Encoded:
        """Makes model inputs of these items."""
        return replace(self.items.encode(numbers), kept=self.read)

    def read(self, numbers: Array) -> Tensor:
        """Reads the activations (r, k, W) of these items, one after another."""
        return self.activations[torch.from_numpy(self.rows.take(numbers).values)]


def keep_activations(
    splits: Mapping[str, Items],
    frozen: FrozenEncoders,
    dtype: torch.dtype,
    limit: float,
    context: Context,
    say: Callable[[str], None],
) -> Mapping[str, Items]:
    """Returns the items with their activations; unchanged if those of all ranks of a machine take more than `limit`,
    in 10⁹ bytes. All ranks call it together."""
    rows = {split: count_rows(items) for split, items in splits.items()}
    values = frozen.count * frozen.width * sum(map(len, (each.values for each in rows.values())))
    size = values * dtype.itemsize * max(gather(context.world.local_size)) / GB
    what = f"activations of {', '.join(splits)} take {size:,.3g} GB of memory"
    if size > limit:
        say(f"{what}, more than --features.cache_gb {limit:g}: they are computed again in every epoch")
        return splits
    say(f"{what}, and are computed once")
    return {split: compute_activations(items, rows[split], frozen, dtype, context) for split, items in splits.items()}


def count_rows(items: Items) -> Ragged:
    """Numbers the rows that frozen encoders compute for every item: its pieces, or its tagged words."""
    encoded = (encoded for _, encoded in encode_in_order(items))
    lengths = [count_pieces(each) if each.words is None else each.words.lengths for each in encoded]
    ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))
    return Ragged(np.arange(ends[-1] if len(ends) else 0), ends)


def compute_activations(
    items: Items, rows: Ragged, frozen: FrozenEncoders, dtype: torch.dtype, context: Context
) -> KeptItems:
    """Computes the activations of all items; GivenUpError if a signal asks to stop."""
    kept = torch.empty(len(rows.values), frozen.count, frozen.width, dtype=dtype)
    for numbers, encoded in encode_in_order(items):
        for chosen in split_by_pieces(np.arange(len(encoded)), count_pieces(encoded)):
            give_up_if_asked(context)
            batch = pack(encoded, chosen, numbers).to(context.device)
            kept[torch.from_numpy(rows.take(numbers[chosen]).values)] = frozen.compute_rows(batch, dtype).cpu()
    return KeptItems(items, kept, rows)
