"""The encoder of any architecture, on sequences laid one after another without padding, and the model that learns
an objective.

n pieces, s sequences, H hidden. Linear layers and norms compute on the n pieces, and in bf16 on a CPU on some rows of
zeros too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_prep.common.errors import UserError
from pretraining.mesh.mesh import ALONE, Declared, Mesh, Shares, take_shares
from pretraining.model import gpu_operations as gpu
from pretraining.model.attention import lay_out
from pretraining.model.batch import Batch, PretrainingBatch
from pretraining.model.dropout import Dropout, make_row_keys
from pretraining.model.fused import find_operations, make_turns
from pretraining.model.layout import Layout
from pretraining.model.modules import LayerDropouts, LookupTable
from pretraining.model.shape import BIAS, HEAD, NORM, Role, Shape

AnyEncoder = TypeVar("AnyEncoder", bound="Encoder")
SITES = 4
"""The most places of a layer that apply dropout: their masks must differ."""


class Sight(NamedTuple):
    """What the pieces of a layer see, and how they tell positions apart. A layer has it as `sight` if it differs from
    this one."""

    window: int | None = None
    """the farthest that a piece sees on each side; None for all of its sequence"""
    base: float | None = None
    """the base of rotary positions, whose tables are the layout's `turns`; None for none"""


Layouts = Mapping[Sight, Layout]


def find_sight(layer: nn.Module) -> Sight:
    """Finds what the pieces of a layer see."""
    return getattr(layer, "sight", Sight())


class Embeddings(nn.Module):
    """The base class of the embeddings of an architecture."""

    word: LookupTable
    """of pieces; heads that predict pieces use it as their decoder"""
    mesh: Mesh = ALONE
    """the ranks that divide the table of pieces"""

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        """Computes the input of the first layer, (n, H)."""
        raise NotImplementedError


class WeightOfModel(Declared, Protocol):
    """The facts of a declared weight that a model asks for."""

    @property
    def role(self) -> Role: ...


class Trainable(nn.Module):
    """A model that an engine can train: it has a shape, and its dropout follows a seed."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, self.mesh, self.shares = shape, ALONE, Shares()
        self.dropout_seed = 0
        """The seed of dropout masks, which every step of training sets."""

    def declared_weights(self) -> Sequence[WeightOfModel]:
        """Lists the declarations of weights, also of those that it does not have; by default none."""
        return []

    def take_shares(self, mesh: Mesh) -> Shares:
        """Replaces its weights by this rank's shares, once. On the meta device, no rank ever holds whole weights."""
        self.shares = take_shares(self, self.declared_weights(), mesh)
        return self.shares

    def roles(self) -> dict[str, Role]:
        """Returns the roles of all weights, by their names. A weight that no architecture declares gets the role of
        its module: a norm, a bias, or the matrix of a head."""
        declared, roles = {weight.ours: weight.role for weight in self.declared_weights()}, {}
        for prefix, module in self.named_modules():
            for own, _ in module.named_parameters(prefix, recurse=False):
                usual = NORM if isinstance(module, nn.LayerNorm) else HEAD
                usual = BIAS if own.rpartition(".")[2].startswith("bias") else usual
                roles[own] = declared.get(own, usual)
        return roles


class ArchitectureOfModel(Protocol):
    """The methods of an architecture that a model calls."""

    def build(self, shape: Shape) -> tuple[Embeddings, list[nn.Module]]: ...

    def weights(self, shape: Shape) -> Sequence[WeightOfModel]: ...

    def heads(self, shape: Shape) -> Mapping[str, Sequence[WeightOfModel]]: ...


class Encoder(Trainable):
    """Embeddings and layers of an architecture. Models with heads derive from it."""

    def __init__(self, shape: Shape, architecture: ArchitectureOfModel, recompute: bool = False):
        """`recompute`: the backward pass computes each layer again instead of saving its activations."""
        super().__init__(shape)
        self.architecture, self.recompute = architecture, recompute
        self.embeddings, layers = architecture.build(shape)
        self.layers = nn.ModuleList(layers)

    def declared_weights(self) -> Sequence[WeightOfModel]:
        heads = self.architecture.heads(self.shape).values()
        return [*self.architecture.weights(self.shape), *itertools.chain.from_iterable(heads)]

    def initialize(self: AnyEncoder, seed: int) -> AnyEncoder:
        """Draws weights from a normal distribution cut at two standard deviations. All ranks draw the same for a seed;
        a GPU draws others than a CPU."""
        generator = torch.Generator(next(self.parameters()).device).manual_seed(seed)
        roles = self.roles()
        for name, parameter in self.named_parameters():
            kind, _, spread = roles[name]
            if kind in ("bias", "norm"):
                nn.init.constant_(parameter, float(kind == "norm"))
            else:
                draw = partial(nn.init.trunc_normal_, std=spread, a=-2 * spread, b=2 * spread, generator=generator)
                self.shares.fill(name, parameter.detach(), draw)
        words = self.embeddings.word.weight.detach()
        words[max(0, self.shape.vocabulary - self.shares.find_start("embeddings.word.weight", len(words))) :] = 0
        return self

    def encode(self, batch: Batch, chosen: Tensor | None = None) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H), or of the pieces at the k places `chosen`, (k, H).

        For some pieces, the last layer computes only these after its attention.
        """
        if chosen is None:
            return self.restore_order(deque(self._states(self.orient(batch)), maxlen=1)[0], batch)
        places = batch.reverse_places()[chosen] if self.shape.learns.sees == "after" else chosen
        return deque(self._states(self.orient(batch), places), maxlen=1)[0]

    def encode_layers(self, batch: Batch) -> Iterator[Tensor]:
        """Yields the hidden states after the embeddings and after each layer, (n, H)."""
        return (self.restore_order(x, batch) for x in self._states(self.orient(batch)))

    def orient(self, batch: Batch) -> Batch:
        """Orients a batch for the layers: where a piece sees those after it, sequences are reversed, so that attention
        has to support one direction only."""
        return batch.reverse() if self.shape.learns.sees == "after" else batch

    def restore_order(self, x: Tensor, batch: Batch) -> Tensor:
        """Restores the order of the text in hidden states of the layers."""
        return x.index_select(0, batch.reverse_places()) if self.shape.learns.sees == "after" else x

    def _states(self, batch: Batch, chosen: Tensor | None = None) -> Iterator[Tensor]:
        """Yields the hidden states of an oriented batch, layer by layer; of the last layer, only those at `chosen`."""
        hidden, attention = self.make_dropouts(batch)
        x = self.embeddings(batch, hidden)
        yield x
        sights = dict.fromkeys(map(find_sight, self.layers))
        layouts = {sight: self._lay_out(batch, x, sight, attention) for sight in sights}
        layout = next(iter(layouts.values()))
        n, spare = len(x), layout.spare_rows(x)
        if spare:
            x = F.pad(x, (0, 0, 0, spare))
            hidden, attention = hidden.add_spare_rows(spare), attention.add_spare_rows(spare)
        for number in range(1, len(self.layers)):
            x = self._run_layer(number, x, layouts, hidden, attention)
            yield x[:n] if spare else x
        if chosen is None:
            x = self._run_layer(len(self.layers), x, layouts, hidden, attention)
        else:
            n, spare = len(chosen), layout.spare_rows(x[: len(chosen)])
            chosen = F.pad(chosen, (0, spare)) if spare else chosen  # by the first row: nobody reads these results
            hidden = hidden.select_rows(chosen)
            x = self._run_layer(len(self.layers), x, layouts, hidden, attention, chosen)
        yield x[:n] if spare else x

    def _lay_out(self, batch: Batch, x: Tensor, sight: Sight, dropout: Dropout) -> Layout:
        """Chooses the layout for the layers with this sight."""
        shape, where = self.shape, (batch.starts, batch.lengths, x, self.shape.heads)
        layout = lay_out(*where, shape.one_way, sight.window, 0 if shape.one_way else batch.one_way, dropout)
        if sight.base is not None:
            size = shape.hidden // shape.heads
            layout.turns = batch.positions, make_turns(sight.base, size, shape.positions, x.device)
        return layout

    def _run_layer(
        self, number: int, x: Tensor, layouts: Layouts, hidden: Dropout, attention: Dropout, *chosen: Tensor
    ) -> Tensor:
        """Passes hidden states through a layer, counted from 1; the last may take the places of the rows to compute."""
        layer, at = self.layers[number - 1], SITES * number
        layout = layouts[find_sight(layer)]
        dropouts = LayerDropouts(attention.select_site(at), hidden.select_site(at + 1), hidden.select_site(at + 2))
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, x, layout, dropouts, *chosen, use_reentrant=False)
        return layer(x, layout, dropouts, *chosen)

    def sequence_places(self, batch: Batch) -> Tensor:
        """Finds the places of the pieces that stand for their sequences, (s,) int64: those that see all of it. That is
        [CLS], or the last piece where a piece sees only those before it."""
        return (batch.starts[1:] - 1 if self.shape.learns.sees == "before" else batch.starts[:-1]).long()

    def make_dropouts(self, batch: Batch) -> tuple[Dropout, Dropout]:
        """Makes the dropouts of hidden states and of the probabilities of attention.

        Our kernels draw masks from keys of rows, so that ranks and devices do not matter. The flash kernels of a GPU
        draw those of attention from PyTorch's generator, which differs between ranks.
        """
        shape = self.shape
        hidden, attention = (shape.dropout, shape.attention_dropout) if self.training else (0.0, 0.0)
        keys = torch.empty(0, dtype=torch.int32)
        if (hidden or attention) and batch.pieces.device.type == "cpu":
            keys = make_row_keys(self.dropout_seed, batch.examples, batch.positions.numpy(), np.array(batch.lengths))
        elif (hidden or attention) and gpu.usable("row_keys", batch.positions):
            longest = max(batch.lengths)
            keys = gpu.make_row_keys(self.dropout_seed, batch.examples, batch.positions, batch.starts, longest)
        if hidden and self.mesh.tensor_ranks > 1 and not find_operations("drop", self.embeddings.word.weight):
            raise UserError(
                f"parallel.tensor = {self.mesh.tensor_ranks}: the ranks that share a model need the same masks of "
                "dropout,\nwhich our kernels alone draw; install g++ (on a GPU: triton), or take model.dropout = 0"
            )
        return Dropout(hidden, keys), Dropout(attention, keys, first_head=self.mesh.select_heads(shape.heads).start)


class ObjectiveOfModel(Protocol):
    """The methods of an objective that a model calls."""

    def build(self, shape: Shape) -> dict[str, nn.Module]: ...

    def own_weights(self, shape: Shape) -> Sequence[WeightOfModel]: ...

    def needed_pieces(self, model: PretrainingModel, batch: PretrainingBatch) -> Tensor: ...

    def forward(self, model: PretrainingModel, batch: PretrainingBatch) -> Any: ...


class PretrainingModel(Encoder):
    """The encoder with the heads of an objective."""

    def __init__(
        self, shape: Shape, architecture: ArchitectureOfModel, objective: ObjectiveOfModel, recompute: bool = False
    ):
        super().__init__(shape, architecture, recompute)
        self.objective = objective
        for name, head in objective.build(shape).items():
            self.add_module(name, head)

    def declared_weights(self) -> Sequence[WeightOfModel]:
        return [*super().declared_weights(), *self.objective.own_weights(self.shape)]

    def head(self, name: str) -> Any:
        """Returns the head of this name."""
        return self.get_submodule(name)

    def forward(self, batch: PretrainingBatch) -> Any:
        """Returns the sums over the batch that the objective computes, as a named tuple."""
        return self.objective.forward(self, batch)

    def states_for_heads(self, batch: PretrainingBatch) -> Tensor:
        """Computes only the hidden states that the heads of the objective need."""
        return self.encode(batch, self.objective.needed_pieces(self, batch))
