"""Finds which part of which parameter each flat fp32 tensor of this rank holds, under every ZeRO stage.

DeepSpeed hands the optimizer flat tensors: parameters end to end, cut wherever one rank's share ends and the next
begins. Trust ratios, checkpoints and exports need the parameters themselves. Nothing here guesses: a layout is taken
only if its numbers are those of the model and if all ranks together hold each parameter exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_prep.common.errors import UserError
from pretraining.optimizers.steps.flat import FlatTensor, Slice
from pretraining.processes.group import find_device


def find_flat_tensors(engine: Any, model: nn.Module) -> list[FlatTensor]:
    """Finds this rank's flat tensors in the order of DeepSpeed's groups; refuses a layout that it does not
    understand."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer, kind = engine.optimizer, type(engine.optimizer).__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        flat_tensors = list(_read_whole(optimizer, names))
    elif kind in _READERS:
        flat_tensors = list(_READERS[kind](optimizer, names))
    else:
        raise _refuse_layout(f"its optimizer is {kind}")
    _check(flat_tensors, model)
    return flat_tensors


@torch.no_grad()
def fill_flat_tensors(flat_tensors: Sequence[FlatTensor], weights: Mapping[str, Tensor]) -> None:
    """Copies weights into the flat tensors; the parameters themselves must have them already."""
    for flat in flat_tensors:
        for part in flat.parts:
            if part.name in weights:
                weight = weights[part.name].view(-1)
                flat.view_part(part, flat.tensor).copy_(weight[part.start : part.start + part.length])


def _refuse_layout(reason: str) -> UserError:
    return UserError(
        f"DeepSpeed has divided the model in a way that is not understood: {reason}\n"
        "leave out what the recipe's [deepspeed] says of zero_optimization, or take another parallel.zero"
    )


def _read_whole(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[FlatTensor]:
    """Reads the layout of ZeRO 0: every rank holds every parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            yield FlatTensor(parameter, {name: parameter.numel()}, (Slice(name, 0, parameter.numel(), 0),))


def _read_stages_1_and_2(optimizer: Any, names: dict[int, str]) -> Iterator[FlatTensor]:
    for number, tensor in enumerate(optimizer.single_partition_of_fp32_groups):
        sizes = {names[id(parameter)]: parameter.numel() for parameter in optimizer.round_robin_bit16_groups[number]}
        yield _cut_flat(tensor, sizes, optimizer.round_robin_bit16_offsets[number], optimizer, number)


def _read_zero_1(optimizer: Any, names: dict[int, str]) -> Iterator[FlatTensor]:
    for number, tensor in enumerate(optimizer.fp32_groups_flat_partition):
        sizes = {names[id(parameter)]: parameter.numel() for parameter in optimizer.bf16_groups[number]}
        yield _cut_flat(tensor, sizes, optimizer.list_offsets(number), optimizer, number)


def _cut_flat(tensor: Tensor, sizes: dict[str, int], offsets: Sequence[int], optimizer: Any, number: int) -> FlatTensor:
    """Finds this rank's share of parameters end to end, cut into equal shares for all ranks."""
    group = optimizer.real_dp_process_group[number]
    begin = dist.get_rank(group) * tensor.numel()
    parts = []
    for (name, size), offset in zip(sizes.items(), offsets, strict=True):
        first, last = max(offset, begin), min(offset + size, begin + tensor.numel())
        if first < last:
            parts.append(Slice(name, start=first - offset, length=last - first, offset=first - begin))
    return FlatTensor(tensor, sizes, tuple(parts), group)


def _read_stage_3(optimizer: Any, names: dict[int, str]) -> Iterator[FlatTensor]:
    """Reads the layout of ZeRO 3: every parameter is cut and padded by itself."""
    if hasattr(optimizer, "backup_optimizer"):
        raise _refuse_layout("one part of the optimizer is on the GPU, another on the CPU (ratio)")
    for number, tensor in enumerate(optimizer.fp32_partitioned_groups_flat):
        rank = optimizer._get_sub_group_partition_rank(number)
        parts = []
        for parameter in optimizer.fp16_groups[number]:
            at, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            assert at == number
            start = rank * length
            real = min(length, parameter.ds_numel - start)
            if real > 0:
                parts.append(Slice(names[id(parameter)], start, real, offset))
        sizes = {names[id(parameter)]: parameter.ds_numel for parameter in optimizer.fp16_groups[number]}
        yield FlatTensor(tensor, sizes, tuple(parts), optimizer._get_sub_group_process_group(number))


_READERS = {
    "DeepSpeedZeroOptimizer": _read_stages_1_and_2,
    "Zero1": _read_zero_1,
    "FixedPointZero1": _read_zero_1,
    "DeepSpeedZeroOptimizer_Stage3": _read_stage_3,
}


def _check(flat_tensors: Sequence[FlatTensor], model: nn.Module) -> None:
    """Checks that all ranks together hold each parameter once, with its values but for rounding to 16 bits."""
    parameters = dict(model.named_parameters())
    index = {name: number for number, name in enumerate(parameters)}
    held = torch.zeros(len(index), dtype=torch.int64)
    for flat in flat_tensors:
        for part in flat.parts:
            if _is_in_place(flat, part, parameters[part.name]):
                held[index[part.name]] += part.length
    if (group := flat_tensors[0].group) is not None:
        held = held.to(find_device(group))
        dist.all_reduce(held, group=group)
    for (name, parameter), count in zip(parameters.items(), held.tolist(), strict=True):
        numel = getattr(parameter, "ds_numel", parameter.numel())
        if count != numel:
            raise _refuse_layout(f"of the {numel} elements of {name}, {count} are where they should be")


def _is_in_place(flat: FlatTensor, part: Slice, parameter: Tensor) -> bool:
    if hasattr(parameter, "ds_tensor"):  # stage 3: of the parameter itself, only this rank's piece is here
        here = parameter.ds_tensor.detach().view(-1)[: part.length]
    else:
        here = parameter.detach().view(-1)[part.start : part.start + part.length]
    if part.offset + part.length > flat.tensor.numel():
        return False
    return torch.equal(flat.view_part(part, flat.tensor.detach()).to(here.device, here.dtype), here)
