"""The ranks of a run as data x tensor: the ranks of a tensor group share a model, and read the same rows of data.

Tensor ranks are innermost: rank = data_rank * tensor_ranks + tensor_rank. So a tensor group is within a machine, unless
`parallel.across_nodes` lets it span several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pretraining.mesh.cuts import Division, cut_tensor, find_whole_size, join_shares
from pretraining.processes.group import TIMEOUT, find_device, place

DIVIDED = "tensor_model_parallel"
"""The attribute of a parameter that ranks divide, by which DeepSpeed counts each share in norms, and others once."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the mesh."""

    data_rank: int = 0
    """says which rows this rank reads"""
    data_ranks: int = 1
    tensor_rank: int = 0
    """says which part of a weight this rank holds"""
    tensor_ranks: int = 1
    data_group: Any = None
    """the ranks that hold the same parts of weights, whose gradients are added up; None for all ranks of the run"""
    tensor_group: Any = None
    """the ranks that share a model; None where each has a whole one, or tries alone how much memory a share takes"""

    @property
    def counts(self) -> bool:
        """Whether this rank adds the values that its tensor group has in common to sums over all ranks."""
        return self.tensor_rank == 0

    def reduce(self, own: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a contiguous tensor in place over the ranks of the tensor group, if any, which call it together."""
        if self.tensor_group is not None:
            dist.all_reduce(own, operation, group=self.tensor_group)
        return own

    def select_heads(self, heads: int) -> range:
        """Returns the numbers of the attention heads that this rank computes, of so many."""
        own = heads // self.tensor_ranks
        return range(self.tensor_rank * own, (self.tensor_rank + 1) * own)


ALONE = Mesh()
"""The mesh of a model that is not shared."""


def form_mesh(tensor_ranks: int) -> Mesh:
    """Divides the connected ranks into tensor groups of this size; all ranks call it together."""
    rank, ranks = place()
    if tensor_ranks == 1:
        return Mesh(rank, ranks)
    numbers, timeout = torch.arange(ranks).view(-1, tensor_ranks), timedelta(seconds=TIMEOUT)
    groups: list[Any] = []
    for lists in (numbers.t(), numbers):
        found = [(dist.new_group(each, timeout=timeout), each) for each in lists.tolist()]
        groups += [group for group, each in found if rank in each]
    return Mesh(rank // tensor_ranks, ranks // tensor_ranks, rank % tensor_ranks, tensor_ranks, *groups)


def make_mpu(mesh: Mesh) -> Any:
    """Makes the object by which DeepSpeed finds its groups, as Megatron-LM has it; None where no model is shared."""
    if mesh.tensor_ranks == 1:
        return None
    tensor = {"rank": mesh.tensor_rank, "world_size": mesh.tensor_ranks, "group": mesh.tensor_group}
    data = {"rank": mesh.data_rank, "world_size": mesh.data_ranks, "group": mesh.data_group}
    answers = {"data_parallel": data, "model_parallel": tensor, "tensor_model_parallel": tensor}
    mpu = SimpleNamespace()
    for name, values in answers.items():
        for what, value in values.items():
            setattr(mpu, f"get_{name}_{what}", lambda value=value: value)
    return mpu


@dataclass(frozen=True)
class Shares:
    """The weights that the ranks of a tensor group divide."""

    mesh: Mesh = ALONE
    divisions: Mapping[str, Division] = field(default_factory=dict)
    """by the names of the weights; without those that each rank holds whole"""

    def __contains__(self, name: str) -> bool:
        return name in self.divisions

    def find_whole_size(self, name: str, own: Tensor) -> torch.Size:
        """Returns the size of a weight, of which this rank holds `own`."""
        if name not in self:
            return own.shape
        return torch.Size(find_whole_size(own.shape, self.divisions[name], self.mesh.tensor_ranks))

    def fill(self, name: str, own: Tensor, draw: Callable[[Tensor], object]) -> None:
        """Fills this rank's `own` part of a weight with what `draw` puts into the whole, the same on all ranks."""
        whole = own.new_empty(self.find_whole_size(name, own)) if name in self else own
        draw(whole)
        if name in self:
            own.copy_(self.take(name, whole))

    def find_start(self, name: str, size: int) -> int:
        """Returns the index of the first element of this rank's share, of `size` elements, in the concatenation of the
        shares of all ranks."""
        return self.mesh.tensor_rank * size if name in self else 0

    def mark(self, model: nn.Module) -> None:
        """Marks the parameters of a model that ranks divide."""
        for name in self.divisions:
            setattr(model.get_parameter(name), DIVIDED, True)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Takes this rank's share of a weight, or of a tensor of its shape."""
        if name not in self:
            return whole
        return cut_tensor(whole, self.divisions[name], self.mesh.tensor_rank, self.mesh.tensor_ranks).contiguous()

    def join(self, name: str, own: Tensor) -> Tensor:
        """Joins the shares of all ranks of the tensor group, which call it together."""
        if name not in self:
            return own
        sent = own.contiguous().to(find_device(self.mesh.tensor_group))
        shares = [torch.empty_like(sent) for _ in range(self.mesh.tensor_ranks)]
        dist.all_gather(shares, sent, self.mesh.tensor_group)
        return join_shares(shares, self.divisions[name]).to(own.device)


class Declared(Protocol):
    """The facts of a declared weight that decide which part of it a rank holds."""

    @property
    def ours(self) -> str: ...

    @property
    def division(self) -> Division: ...


def is_divided(parameter: Tensor) -> bool:
    """Whether the ranks of a tensor group divide a parameter; otherwise each has the whole."""
    return getattr(parameter, DIVIDED, False)


def take_shares(model: nn.Module, weights: Iterable[Declared], mesh: Mesh) -> Shares:
    """Replaces the weights of a whole model by this rank's shares, and tells its modules the mesh: each that has the
    attribute `mesh`. Modules whose weight is divided learn how by their attribute `cut`."""
    if mesh.tensor_ranks == 1:
        return Shares(mesh)
    there = dict(model.named_parameters())
    found = {each.ours: each.division for each in weights if each.ours in there}
    found = {name: each._replace(rows=len(there[name])) for name, each in found.items() if each.cut != "whole"}
    shares = Shares(mesh, found)
    for name, division in shares.divisions.items():
        there[name].data = shares.take(name, there[name].detach()).clone()
        module, _, own = name.rpartition(".")
        if own == "weight":
            setattr(model.get_submodule(module), "cut", division.cut)  # noqa: B010  # of any module
    for each_module in model.modules():
        if hasattr(each_module, "mesh"):
            setattr(each_module, "mesh", mesh)  # noqa: B010
    return shares


# The two operations by which a layer is divided among the ranks of a tensor group: each is the other's backward pass.
#
#     x -> copy_to_tensor_ranks -> products with own columns -> ... -> products with own rows -> sum_over_tensor_ranks
#
# Both return the tensor that was reduced: a gradient may come as a view that is not contiguous, and then it is a copy
# that is reduced.


def copy_to_tensor_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Returns x, which all ranks have alike, for products of which each rank computes a part. The backward pass adds up
    their gradients; it may overwrite the one it gets, which nobody else may read."""
    return x if mesh.tensor_ranks == 1 else _Copy.apply(x, mesh)  # type: ignore[no-untyped-call]


def sum_over_tensor_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Adds up what the ranks have computed, each a part of the sum. May overwrite x, which nobody else may read."""
    return x if mesh.tensor_ranks == 1 else _Sum.apply(x, mesh)  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.mesh.reduce(grad.contiguous()), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:  # noqa: ARG004
        return mesh.reduce(x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
