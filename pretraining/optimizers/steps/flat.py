"""Optimizers on flat fp32 tensors, which hold many parameters and parts of parameters: builds the one that a recipe
names; the base class of all, and the one that moves parameters one by one, by the update that an optimizer declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_prep.common.sections import declared_in
from pretraining.mesh.mesh import Shares
from pretraining.model.cuda_graphs import RepeatedWork
from pretraining.model.shape import Role
from pretraining.optimizers.declaration import Optimizer, OptimizerSettings, find_optimizer
from pretraining.processes.group import find_device

WEIGHT, GRADIENT = "weight", "gradient"
BLOCK = 1 << 14
"""With `parallel.same_bits`, the numbers of a parameter that are added up together: no rank's share ends in them."""
Rate = Tensor | float
"""A learning rate: a tensor where `needs_rate_tensor`."""
WHOLE = Shares()
"""The shares of a model that each rank holds whole."""


class Slice(NamedTuple):
    """The part of a parameter that a flat tensor holds."""

    name: str
    """name of the parameter"""
    start: int
    """the part's first element in the flattened parameter"""
    length: int
    offset: int
    """the part's first element in the flat tensor"""


class FlatTensor(NamedTuple):
    """A flat fp32 tensor of this rank's optimizer, and the parts of parameters in it; the rest is padding."""

    tensor: Tensor
    sizes: dict[str, int]
    """the elements of each parameter in the tensors of all ranks, also where this one has no part of it"""
    parts: tuple[Slice, ...]
    group: Any = None
    """the process group of the ranks that hold the rest; None where this rank holds all"""

    def view_part(self, part: Slice, flat: Tensor) -> Tensor:
        """Returns the view of a part in a tensor with the layout of `tensor`, such as an average or a gradient."""
        return flat.view(-1).narrow(0, part.offset, part.length)


def add_over_group(own: Tensor, group: Any) -> Tensor:
    """Adds up a tensor over the ranks of a group, which all call it; None is a group of this rank alone."""
    if group is None or dist.get_world_size(group) == 1:
        return own
    total = own.to(find_device(group))
    dist.all_reduce(total, group=group)
    return total.to(own.device)


def needs_rate_tensor(weights: Tensor) -> bool:
    """Whether the learning rate of these weights is a tensor on their device, as a CUDA graph needs it."""
    return weights.is_cuda


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer that knows the parameters in DeepSpeed's flat tensors. `prepare` must be called before the first
    step."""

    keeps_zeros: ClassVar[bool] = False
    """whether a step keeps zeros in gradients; otherwise it may overwrite them by anything"""
    asks_ranks: ClassVar[bool] = True
    """whether a step exchanges numbers with other ranks; it is then captured only on a rank that holds all weights"""

    def __init__(self, kind: Optimizer, groups: Sequence[dict[str, Any]], settings: OptimizerSettings):
        assert not {"weight", "gradient", "step"} & {*kind.state}, f"{kind.state}: names that something else has"
        super().__init__(groups, {"lr": 0.0, "weight_decay": settings.weight_decay})
        self.kind, self.settings = kind, settings
        self.same_bits = False
        """whether a step has the same bits on any number of ranks (`parallel.same_bits`)"""
        self.flats: dict[int, FlatTensor] = {}
        """flat tensors by the id of their tensor"""
        self.scale: Tensor | float = 1.0
        """the factor of gradients in a step; on a device it is NaN if they are not finite, and nothing moves"""
        self.find_scale: Callable[[], Tensor] | None = None
        """computes `scale` on the device as part of each step, and of its graph; None where it is set before"""
        self.found_inf: Tensor | None = None
        """1 on the device if the gradients of a step are not finite, else 0; None where the host has checked them"""
        self.rounded: dict[int, Tensor] = {}
        """by the id of a flat tensor, where a step writes its new weights in the type of the model"""
        self.written: set[int] = set()
        """the ids of the flat tensors whose `rounded` the last step has written while it moved them"""
        self.decays = True
        """whether the weights that move decay by their role, also where the recipe's decay is 0"""
        self.dtype = torch.float32
        """the type of matrix products in an `update`: the model's, or fp32 for an offloaded optimizer"""
        self.graph: RepeatedWork | None = None
        """makes steps on a GPU by a CUDA graph; None makes them kernel by kernel"""
        self._kept: list[Tensor] = []
        """the gradients that the graph reads"""
        self._numbers: list[Tensor] = []
        """on a GPU, the factor of gradients, then the learning rate of each group"""

    def prepare(
        self,
        flat_tensors: Sequence[FlatTensor],
        roles: Mapping[str, Role],
        shapes: Mapping[str, torch.Size],
        shares: Shares = WHOLE,
    ) -> None:
        """Takes the layout of DeepSpeed's flat tensors, the roles and shapes of parameters, and which of them are
        shares of weights, before the first step."""
        self.flats = {id(flat.tensor): flat for flat in flat_tensors}
        self.roles, self.shapes, self.shares = roles, shapes, shares
        groups = [flat.group for flat in flat_tensors if flat.group is not None]
        if self.asks_ranks and (shares.divisions or any(dist.get_world_size(group) > 1 for group in groups)):
            self.graph = None
        self.read_layout()

    def read_layout(self) -> None:
        """Derives what an optimizer needs besides from the layout; all ranks call it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.written.clear()
        moving = [[tensor for tensor in group["params"] if tensor.grad is not None] for group in self.param_groups]
        tensors = [*chain.from_iterable(moving)]
        if not tensors or not needs_rate_tensor(tensors[0]):
            self._move_groups(moving, [group["lr"] for group in self.param_groups])
            return
        self._numbers += [tensors[0].new_zeros(()) for _ in range(len(self._numbers), 1 + len(self.param_groups))]
        factor, *rates = self._numbers[: 1 + len(self.param_groups)]
        for rate, group in zip(rates, self.param_groups, strict=True):
            rate.fill_(group["lr"])
        if self.find_scale is None and isinstance(self.scale, Tensor):
            self.scale = factor.copy_(self.scale)
        if self.graph is None:
            self._move_groups(moving, rates)
        else:
            key = self._find_key(moving)
            self._keep_gradients(tensors, is_new=key != self.graph.key)
            self.graph.run(lambda: self._move_groups(moving, rates), key)
            if self.graph.failed:
                self.graph, self._kept = None, []

    def _move_groups(self, moving: Sequence[Sequence[Tensor]], rates: Sequence[Rate]) -> None:
        """Moves the weights of all groups, and rounds them: the part of a step that a graph repeats."""
        if self.find_scale is not None:
            self.scale = self.find_scale()
        self.found_inf = self.scale.isfinite().logical_not().float() if isinstance(self.scale, Tensor) else None
        for group, tensors, rate in zip(self.param_groups, moving, rates, strict=True):
            if tensors:
                self.decays = group.get("decays", True)
                self.move(tensors, rate, group["weight_decay"])
        for tensor in chain.from_iterable(moving):
            if id(tensor) in self.rounded.keys() - self.written:
                self.rounded[id(tensor)].copy_(tensor)

    def _find_key(self, moving: Sequence[Sequence[Tensor]]) -> tuple[Any, ...]:
        """Finds the addresses and numbers that a graph of this step would have, but for gradients."""
        states = [[tensor, *self.get_state(tensor).values()] for tensor in chain.from_iterable(moving)]
        addresses = [each.data_ptr() for each in (*chain.from_iterable(states), *self.rounded.values())]
        counts, decays = map(len, moving), [group["weight_decay"] for group in self.param_groups]
        scale = self.scale if isinstance(self.scale, float) and self.find_scale is None else None
        return (*addresses, *counts, *decays, scale)

    def _keep_gradients(self, tensors: Sequence[Tensor], is_new: bool) -> None:
        """Copies gradients that lie elsewhere than in the step before to where the graph reads them."""
        given = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if is_new:
            self._kept = given
        moved = [pair for pair in zip(self._kept, given, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
        if moved:
            torch._foreach_copy_([kept for kept, _ in moved], [new for _, new in moved])
        for tensor, kept in zip(tensors, self._kept, strict=True):
            tensor.grad = kept

    def move(self, tensors: Sequence[Tensor], learning_rate: Rate, decay: float) -> None:
        """Makes one step of tensors that have the same place on every rank: under stage 3, one tensor at a time."""
        raise NotImplementedError

    def scale_on(self, device: torch.device) -> Tensor:
        """Returns the factor of gradients as a tensor on a device."""
        return self.scale if isinstance(self.scale, Tensor) else torch.full((), self.scale, device=device)

    def count_step(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Counts this step for each tensor, and returns the counts; a step with `found_inf` does not count."""
        steps = [self.get_state(tensor)["step"] for tensor in tensors]
        torch._foreach_add_(steps, 1.0)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        return steps

    def get_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the state of a tensor, with the number of steps that have moved it; zeros at first."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in self.kind.state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class ByParameter(FlatOptimizer):
    """Moves parameters by the `update` of an optimizer's declaration.

    A matrix that one rank holds moves there. Matrices that ZeRO or a mesh has cut are gathered on all ranks.
    """

    def read_layout(self) -> None:
        flats = self.flats if self.kind.whole_matrices else {}
        self.cut = {name: find_cut_parameters(flat) for name, flat in flats.items()}
        self.parts: dict[int, dict[str, list[Slice]]] = {name: {} for name in self.flats}
        for number, flat in self.flats.items():
            for part in flat.parts:
                self.parts[number].setdefault(part.name, []).append(part)

    def move(self, tensors: Sequence[Tensor], learning_rate: Rate, decay: float) -> None:
        for tensor in tensors:
            self._move_one(self.flats[id(tensor)], learning_rate, decay)

    def rounding(self, device: torch.device) -> torch.autocast:
        """Returns the context in which matrix products are in the type of the model."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _move_one(self, flat: FlatTensor, learning_rate: Rate, decay: float) -> None:
        """Moves the parameters of a flat tensor; all ranks of its group go through them in the same order."""
        [step], found_inf = self.count_step([flat.tensor]), self.found_inf
        sources = self.find_sources(flat.tensor)
        sources[GRADIENT].mul_(self.scale)
        for name in flat.sizes:
            parts = self.parts[id(flat.tensor)].get(name, [])
            for values in self.find_values(flat, name, parts, sources):
                gradient = values.pop(GRADIENT)
                before = {kind: value.clone() for kind, value in values.items() if found_inf is not None}
                averages = {kind: value for kind, value in values.items() if kind != WEIGHT}
                with self.rounding(flat.tensor.device):
                    change = self.kind.update(
                        self.roles[name], values[WEIGHT], gradient, averages, step.double(), self.settings
                    )
                values[WEIGHT].mul_(1 - learning_rate * decay)
                if isinstance(learning_rate, Tensor):
                    values[WEIGHT].addcmul_(change, learning_rate, value=-1)
                else:
                    values[WEIGHT].sub_(change, alpha=learning_rate)
                if found_inf is not None:
                    for kind, value in before.items():
                        values[kind].copy_(torch.where(found_inf > 0, value, values[kind]))

    def find_sources(self, tensor: Tensor) -> dict[str, Tensor]:
        """Returns a flat tensor, its gradients and its averages, by their names in an `update`."""
        assert tensor.grad is not None
        state = self.get_state(tensor)
        return {WEIGHT: tensor, GRADIENT: tensor.grad, **{name: state[name] for name in self.kind.state}}

    def find_values(
        self, flat: FlatTensor, name: str, parts: Sequence[Slice], sources: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Yields weight, gradient and state of a parameter, and writes changes back: this rank's stretches, or whole
        matrices, one for each part of a fused parameter."""
        if not self.kind.whole_matrices:
            for part in parts:
                yield {kind: flat.view_part(part, source) for kind, source in sources.items()}
            return
        cut = name in self.cut[id(flat.tensor)]
        if not cut and not parts:
            return  # another rank holds it
        shape = self.shapes[name]
        whole = {
            kind: gather_parameter(flat, parts, source, shape) if cut else flat.view_part(parts[0], source).view(shape)
            for kind, source in sources.items()
        }
        whole = {kind: self.shares.join(name, values) for kind, values in whole.items()}
        blocks = {kind: values.chunk(self.roles[name].parts) for kind, values in whole.items()}
        for number in range(self.roles[name].parts):
            yield {kind: values[number] for kind, values in blocks.items()}
        for kind, source in sources.items() if cut or name in self.shares else ():
            own = self.shares.take(name, whole[kind]).view(-1)
            for part in parts:
                flat.view_part(part, source).copy_(own[part.start : part.start + part.length])


def find_cut_parameters(flat: FlatTensor) -> set[str]:
    """Finds the parameters of a flat tensor that no rank holds whole; all ranks of its group call it."""
    held = {part.name: part.length for part in flat.parts}
    longest = torch.tensor([held.get(name, 0) for name in flat.sizes])
    if flat.group is not None:
        longest = longest.to(find_device(flat.group))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=flat.group)
    return {name for (name, size), length in zip(flat.sizes.items(), longest.tolist(), strict=True) if length < size}


def gather_parameter(flat: FlatTensor, parts: Sequence[Slice], source: Tensor, shape: torch.Size) -> Tensor:
    """Gathers a parameter, its gradient or its state from the parts of all ranks, which all call it."""
    whole = torch.zeros(shape, dtype=source.dtype, device=source.device)
    for part in parts:
        whole.view(-1)[part.start : part.start + part.length] = flat.view_part(part, source)
    return add_over_group(whole, flat.group)  # exact: all ranks but one add zeros


def find_steps(name: str) -> type[FlatOptimizer]:
    """Finds the class that makes an optimizer's steps: the `STEPS` of the file of its name in this folder.

    An optimizer without such a file moves one parameter after another by its `update`.
    """
    found: type[FlatOptimizer] = declared_in(__file__, __package__, "STEPS").get(name, ByParameter)
    return found


def build_optimizer(
    model: nn.Module, roles: Mapping[str, Role], settings: OptimizerSettings, late: Mapping[str, float] = {}
) -> FlatOptimizer:
    """Makes the optimizer that the settings name, for the weights that decay and those that do not. Those that began
    `late`, after so many steps, are groups of their own, since a flat tensor has one count of steps."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 0.0): [], (False, 0.0): []}
    for name, weight in model.named_parameters():
        groups.setdefault((roles[name].decays, late.get(name, 0.0)), []).append(weight)
    found = [
        {"params": weights, "decays": decays, **({} if decays else {"weight_decay": 0.0})}
        for (decays, _), weights in groups.items()
    ]
    return find_steps(settings.name)(find_optimizer(settings), found, settings)
