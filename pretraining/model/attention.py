"""Attention over ragged sequences: every piece attends to its own sequence.

`lay_out` chooses the layout, once for all layers of a batch:

    ByHeads    CPU that multiplies bf16, in bf16: a head of a sequence at a time, in the cache
    Grouped    otherwise on a CPU: sequences of similar lengths together, by matrix products and our fused kernels
    Packed     GPU from compute capability 8.0 on, in 16 bits: the flash kernels, which need no padding
    Own        there too, for short sequences: our kernels, whose dropout depends on the example alone
    Padded     elsewhere: scaled_dot_product_attention

In some sequences of a batch a piece may see only those before it: they are the first ones, so that each kernel is
called twice at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.dropout import KEEPS, Dropout
from pretraining.model.gpu_layouts import Own, Packed, PackedTwice, has_flash, takes_own
from pretraining.model.layout import WHOLE, Layout, add_bias, split_ways
from pretraining.model.own_backward import Forward, Gradients, with_backward

GRAIN = 64
"""Our kernels compute sequences together whose lengths are equal when rounded up to a multiple of this."""
BLOCK = 32
"""The width of a head must be a multiple of this for our kernels that multiply small matrices."""


def lay_out(
    starts: Tensor,
    lengths: tuple[int, ...],
    states: Tensor,
    heads: int,
    one_way: bool = False,
    window: int | None = None,
    first: int = 0,
    dropout: Dropout = KEEPS,
) -> Layout:
    """Chooses the layout for the hidden states, (n, hidden); nothing here waits for a GPU.

    `starts` is (s + 1,) int32; `one_way` says whether a piece sees only itself and those before it; it sees those at a
    distance of at most `window`, or all. `first`: the number of the first sequences in which a piece sees one way, if
    in the others it sees both. `dropout` is that of the probabilities of attention.
    """
    if kernels.usable(states):
        by = ByHeads if can_multiply_heads(states, heads) else Grouped
        return by(starts, lengths, one_way, window, first)
    if not has_flash(states, heads):
        return Padded(starts, max(lengths), len(states), one_way, window, first)
    ahead = len(lengths) if one_way else first
    if takes_own(states, heads, max(lengths), dropout, ahead, window):
        return Own(starts, max(lengths), ahead, window)
    if 0 < first < len(lengths):
        return PackedTwice(starts, lengths, window, first)
    return Packed(starts, max(lengths), one_way or first > 0, window)


def can_multiply_heads(states: Tensor, heads: int) -> bool:
    """Whether our kernels for a CPU can multiply the small matrices of a head of these hidden states."""
    size = states.shape[1] // heads
    return states.dtype == torch.bfloat16 and size % BLOCK == 0 and kernels.small_products() is not None


class Padded(Layout):
    """Sequences padded to the longest, for any device and type."""

    def __init__(self, starts: Tensor, longest: int, pieces: int, one_way: bool, window: int | None, first: int = 0):
        length = -(-longest // 16) * 16
        device, begins = starts.device, starts[:-1]
        at, piece = (torch.arange(count, dtype=torch.int32, device=device) for count in (length, pieces))
        sequence = torch.searchsorted(starts[1:], piece, right=True)
        self.rows = (begins[:, None] + at).clamp(max=pieces - 1)
        """(s, length): the piece at every place; at padding any piece, which gets no gradient"""
        self.places = sequence * length + (piece - begins[sequence])
        """(n,): the place of every piece among the s * length places"""
        self.inside = (at < starts.diff()[:, None])[:, None, None]
        """(s, 1, 1 or length, length): whether a place has a piece that is seen"""
        if one_way:
            self.inside = self.inside & (at <= at[:, None])
        elif first:
            both = torch.arange(len(begins), device=device) >= first
            self.inside = self.inside & ((at <= at[:, None]) | both[:, None, None, None])
        if window is not None:
            self.inside = self.inside & ((at - at[:, None]).abs() <= window)
            padding = at >= starts.diff()[:, None]
            self.inside |= padding[:, None, :, None]  # a row that saw nothing would become NaN

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        s, length = self.rows.shape
        padded = add_bias(qkv, bias).index_select(0, self.rows.view(-1)).view(s, length, 3, heads, -1)
        query, key, value = padded.permute(2, 0, 3, 1, 4)  # (s, heads, length, size) each
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=self.inside, dropout_p=dropout.probability)
        return out.transpose(1, 2).reshape(s * length, -1).index_select(0, self.places)


@dataclass(frozen=True)
class Group:
    """Sequences that our kernels compute together, some pieces of all of them at a time."""

    starts: Tensor
    """(s,) int32: where the sequences begin"""
    lengths: Tensor
    """(s,) int32"""
    length: int
    """the length that they are padded to"""
    one_way: bool
    window: int | None

    @property
    def whole(self) -> bool:
        """Whether all scores of a sequence are computed: with a window that is nearly as long, others save nothing."""
        return self.window is None or GRAIN + self.window >= self.length

    @property
    def sight(self) -> tuple[int, ...]:
        """The arguments of our kernels: whether pieces see one way, the window, the rows of a band, and the columns of
        their scores."""
        window = WHOLE if self.window is None else self.window
        if self.whole:
            return int(self.one_way), window, self.length, self.length
        return int(self.one_way), window, GRAIN, GRAIN + window * (1 if self.one_way else 2)

    def take_bands(self, x: Tensor) -> Tensor:
        """Takes the rows that each GRAIN of rows sees, zeros outside of a sequence, of x (s * heads, length, size):
        (bands, width, size). The copy costs less than a product for each band, at which threads would meet."""
        if self.whole:
            return x
        _, window, rows, width = self.sight
        padded = F.pad(x, (0, 0, window, width - rows - window))
        return padded.unfold(1, width, rows).transpose(2, 3).reshape(-1, width, x.shape[2])

    def sum_bands(self, bands: Tensor) -> Tensor:
        """Adds up what each band has for a row: the backward pass of `take_bands`."""
        if self.whole:
            return bands
        _, window, rows, width = self.sight
        parts = bands.view(-1, self.length // rows, width, bands.shape[2])
        sums = bands.new_zeros(len(parts), self.length + width, bands.shape[2], dtype=torch.float32)
        for at in range(0, width, rows):
            part = parts[:, :, at : at + rows]
            sums[:, at : at + self.length].unflatten(1, (-1, rows))[:, :, : part.shape[2]] += part
        return sums[:, window : window + self.length].to(bands.dtype)


class ByOurKernels(Layout):
    """The common part of the layouts on a CPU."""

    def spare_rows(self, states: Tensor, packed: bool = False) -> int:
        """Rounds the number of rows up, by at most an eighth, so that few different numbers occur.

        For each new number oneDNN compiles code for every product in bf16 or with packed weights, which takes as long
        as some small products.
        """
        grain = 1 << len(states).bit_length() >> 4
        if states.dtype == torch.bfloat16:
            return -len(states) % max(16, grain)
        return -len(states) % max(1, grain) if packed else 0


class ByHeads(ByOurKernels):
    """One head of one sequence at a time, by kernels that do not save the scores."""

    def __init__(self, starts: Tensor, lengths: tuple[int, ...], one_way: bool, window: int | None, first: int = 0):
        self.kernel = f"attention_by_{kernels.small_products()}"
        self.pieces, sizes = int(starts[-1]), torch.tensor(lengths, dtype=torch.int32)
        self.window = WHOLE if window is None else window
        ways = split_ways(len(lengths), one_way, first)
        self.parts = [(starts[part], sizes[part], int(way)) for part, way in ways]
        """sequences that the kernels compute together: their starts and lengths, and whether they see one way"""

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        return _attend_by_heads(qkv, bias, self, heads, dropout)


@with_backward
def _attend_by_heads(qkv: Tensor, bias: Tensor | None, layout: ByHeads, heads: int, dropout: Dropout) -> Forward:
    pieces, (n, hidden) = layout.pieces, (len(qkv), qkv.shape[1] // 3)
    size = hidden // heads
    given = [
        ((starts, lengths, *dropout.for_kernels, size**-0.5, one_way, layout.window), (len(lengths), heads, size))
        for starts, lengths, one_way in layout.parts
    ]
    out, spreads = qkv.new_empty(n, hidden), torch.empty(pieces, heads, 2)
    out[pieces:] = 0
    for inputs, sizes in given:
        kernels.call(layout.kernel, qkv, bias, *inputs, out, spreads, *sizes)

    def backward(grad: Tensor, qkv: Tensor, spreads: Tensor, bias: Tensor | None = None) -> Gradients:
        grad_qkv, grad_bias = torch.empty_like(qkv), None if bias is None else bias.new_empty(len(given), len(bias))
        grad_qkv[pieces:] = 0
        for number, (inputs, sizes) in enumerate(given):
            sums = None if grad_bias is None else grad_bias[number]
            kernels.call(f"{layout.kernel}_backward", qkv, bias, *inputs, grad, spreads, grad_qkv, sums, *sizes)
        return grad_qkv, None if grad_bias is None else grad_bias.sum(0)

    return out, (qkv, spreads) if bias is None else (qkv, spreads, bias), backward


class Grouped(ByOurKernels):
    """Sequences in groups of the same rounded length, for our kernels on a CPU."""

    def __init__(self, starts: Tensor, lengths: tuple[int, ...], one_way: bool, window: int | None, first: int = 0):
        alike: dict[tuple[int, bool], list[int]] = {}
        for number, length in enumerate(lengths):
            alike.setdefault((-(-length // GRAIN), one_way or number < first), []).append(number)
        sizes = torch.tensor(lengths, dtype=torch.int32)
        self.groups = []
        for (_, way), members in sorted(alike.items()):
            length = -(-max(lengths[member] for member in members) // 16) * 16
            group = Group(starts[members], sizes[members], length, way, window)
            self.groups.append(group if group.whole else replace(group, length=-(-length // GRAIN) * GRAIN))

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        return _attend_in_groups(qkv, bias, self.groups, heads, dropout)


@with_backward
def _attend_in_groups(qkv: Tensor, bias: Tensor | None, groups: list[Group], heads: int, dropout: Dropout) -> Forward:
    n, hidden, size = len(qkv), qkv.shape[1] // 3, qkv.shape[1] // 3 // heads
    out = qkv.new_empty(n, hidden)
    out[_count_pieces(groups) :] = 0
    saved = []
    for group in groups:
        s, length = len(group.starts), group.length
        parts, shape = qkv.new_empty(3, s * heads, length, size), (s, heads, length, size)
        kernels.call("split_heads", qkv, bias, group.starts, group.lengths, parts, 3, *shape)
        query, key, value = parts
        shares = query.view(-1, group.sight[2], size) @ group.take_bands(key).transpose(1, 2)  # scores, then softmax
        dropped = torch.empty_like(shares) if dropout.drops else shares
        where = (group.starts, group.lengths, *dropout.for_kernels)
        kernels.call("softmax_forward", shares, *where, size**-0.5, dropped, *group.sight, s, heads, length)
        context = dropped @ group.take_bands(value)
        kernels.call("merge_heads", context, group.starts, group.lengths, out, None, 1, *shape)
        saved += [parts, shares]
    return out, tuple(saved), partial(_attend_in_groups_backward, groups, heads, dropout, bias is not None)


def _attend_in_groups_backward(
    groups: list[Group], heads: int, dropout: Dropout, has_bias: bool, grad: Tensor, *saved: Tensor
) -> Gradients:
    n, hidden = grad.shape
    grad_qkv, grad_bias = grad.new_empty(n, 3 * hidden), torch.zeros(3 * hidden) if has_bias else None
    grad_qkv[_count_pieces(groups) :] = 0
    for group, parts, shares in zip(groups, saved[::2], saved[1::2], strict=True):
        s, length, size = len(group.starts), group.length, hidden // heads
        grad_context, shape = torch.empty_like(parts[0]), (s, heads, length, size)
        kernels.call("split_heads", grad, None, group.starts, group.lengths, grad_context, 1, *shape)
        dropped = shares
        if dropout.drops:
            dropped = torch.empty_like(shares)
            where = (group.starts, group.lengths, *dropout.for_kernels)
            kernels.call("redo_dropout", shares, *where, dropped, *group.sight, s, heads, length)
        grad_context, query = (each.view(-1, group.sight[2], size) for each in (grad_context, parts[0]))
        grad_scores = grad_context @ group.take_bands(parts[2]).transpose(1, 2)
        inputs = (shares, dropped, group.lengths, size**-0.5, *group.sight)
        kernels.call("softmax_backward", grad_scores, *inputs, s, heads, length)
        grad_parts = torch.empty_like(parts)
        torch.bmm(grad_scores, group.take_bands(parts[1]), out=grad_parts[0].view(query.shape))
        grad_parts[1] = group.sum_bands(grad_scores.transpose(1, 2) @ query)
        grad_parts[2] = group.sum_bands(dropped.transpose(1, 2) @ grad_context)
        kernels.call("merge_heads", grad_parts, group.starts, group.lengths, grad_qkv, grad_bias, 3, *shape)
    return grad_qkv, None if grad_bias is None else grad_bias.to(grad.dtype)


def _count_pieces(groups: list[Group]) -> int:
    """Counts the pieces of all sequences; later rows belong to none."""
    return sum(int(group.lengths.sum()) for group in groups)
