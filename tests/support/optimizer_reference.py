"""Optimizers under any ZeRO stage, ranks and precision, and plainly in fp64 on one process to compare them with.

Every parameter of a small BERT is pulled by given forces, 6 steps of 2 micro-batches, through the real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.config.settings import Compute, Optimizer, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import StepBatches
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.optimizers.muon import COEFFICIENTS, MOMENTUM, ROUNDS, ROW_MEMORY, USUAL
from pretraining.optimizers.steps.lamb import Lamb, find_ratios

SHAPE = Shape(layers=1, hidden=48, heads=4, intermediate=96, vocabulary=101, positions=96)
STEPS, MICRO = 6, 2
LEARNING_RATES = [1e-3 * (1 + step % 4) for step in range(STEPS)]
NVIDIA: dict[str, Any] = {"clip": 1.0}
"""the settings of NVIDIA's recipe, which are the defaults otherwise"""
EVERYTHING_IS_CUT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "sub_group_size": 3000}


def number_of(name: str) -> int:
    """A different one for each name, the same in every process."""
    return sum(ord(letter) * place for place, letter in enumerate(name, 1))


def force(name: str, count: int, step: int, part: int) -> Tensor:
    """The gradient of a parameter in a micro-batch: its size is the parameter's own. Its numbers have 6 bits, so that
    they also fit into bf16 where the loss is multiplied by 3 ranks."""
    draw = np.random.default_rng([number_of(name), step, part])
    numbers = torch.from_numpy(draw.standard_normal(count, dtype=np.float32))
    fractions, exponents = numbers.mul(10.0 ** (number_of(name) % 5 - 4)).frexp()
    return fractions.mul(64).round().div(64).ldexp(exponents)


def count_parts(ranks: int) -> int:
    """Returns the divisor of the sum of all forces of a step: a power of two, which rounds nothing in 16 bits."""
    return 1 << (MICRO * ranks - 1).bit_length()


def first_weights() -> dict[str, Tensor]:
    """Of different sizes, and no bias is zero."""
    weights = {}
    for name, parameter in build_model(SHAPE).named_parameters():
        generator = torch.Generator().manual_seed(number_of(name))
        weights[name] = torch.randn(parameter.shape, generator=generator) * (1 + number_of(name) % 3)
    return weights


class Pull(NamedTuple):
    """What stands for a micro-batch: which forces pull."""

    step: int
    part: int

    def to(self, _: torch.device) -> Pull:
        return self


class Pulled(PretrainingModel):
    """BERT's modules and parameters, with gradients that are given and not computed."""

    def __init__(self) -> None:
        super().__init__(SHAPE, BERT, MLM)
        self.load_state_dict(first_weights())
        for path, module in self.named_modules():
            if _has_parameters(module):
                module.forward = _pull(path, module)

    def forward(self, pull: Pull) -> Any:  # type: ignore[override]
        modules = [module for module in self.modules() if _has_parameters(module)]
        return torch.stack([module(pull.step, pull.part) for module in modules]).sum()


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _pull(path: str, module: nn.Module) -> Callable[[int, int], Tensor]:
    def forward(step: int, part: int) -> Tensor:
        pulled = []
        for name, parameter in module.named_parameters(recurse=False):
            pulls = force(f"{path}.{name}", parameter.numel(), step, part)
            pulled.append((parameter * pulls.view(parameter.shape).to(parameter)).sum().float())
        return torch.stack(pulled).sum()

    return forward


def make_engine(
    dtype: str,
    zero: int,
    chosen: dict[str, Any],
    offload: str = "none",
    device: str = "cpu",
    late: Mapping[str, float] = {},
    model: PretrainingModel | None = None,
    graphs: str = "auto",
    **more: Any,
) -> Engine:
    """An engine that trains `Pulled`, or another model; `more` is DeepSpeed's zero_optimization."""
    scale = {"initial_scale_power": 8, "loss_scale_window": 4}  # it grows within the steps
    settings = EngineSettings(
        optimizer=Optimizer.model_validate({"name": "lamb", **chosen}),
        precision=Precision.model_validate({"dtype": dtype}),
        parallel=Parallel.model_validate({"zero": zero, "offload": offload}),
        compute=Compute.model_validate({"graphs": graphs}),
        deepspeed={
            "zero_optimization": {**(EVERYTHING_IS_CUT if zero == 3 else {}), **more},
            **({"fp16": scale} if dtype == "fp16" else {}),
        },
    )
    return Engine(model or Pulled(), settings, torch.device(device), late)


def moved(engine: Engine) -> dict[str, Tensor]:
    """The weights after all steps, of any optimizer. All ranks together give what one process gives."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step, learning_rate in enumerate(LEARNING_RATES):
        micro: Any = tuple(Pull(step, ranks * number + rank) for number in range(MICRO))
        batches = StepBatches(micro, sequences=MICRO * ranks)
        train_step(engine, batches, learning_rate, Seeds(0, 0), lambda pulled, _: pulled / count_parts(ranks))
    return {name: each.clone() for name, each in engine.weights()}


def run_engine(engine: Engine) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights and LAMB's trust ratios after all steps."""
    weights = moved(engine)
    assert isinstance(engine.optimizer, Lamb)
    return weights, read_ratios(engine.optimizer)


def read_ratios(lamb: Lamb) -> dict[str, float]:
    """The trust ratios of the last step by the names of parameters."""
    together = ((names, find_ratios(squares).tolist()) for names, squares in lamb.squares.items())
    return {name: ratio for names, ratios in together for name, ratio in zip(names, ratios, strict=True)}


def separate(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters as the paper has them: query, key and value by themselves."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if ".qkv." in name:
            found |= {f"{name}[{number}]": each for number, each in enumerate(value.chunk(3))}
        else:
            found[name] = value
    return found


def orthogonalize_plainly(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix in fp64, round by round."""
    a, b, c = COEFFICIENTS
    found: Tensor = matrix.double() / matrix.double().norm()
    for _ in range(ROUNDS):
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return found


def reference(
    ranks: int, chosen: dict[str, Any], late: Mapping[str, float] = {}, done: float = 0.0
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Plain LAMB in fp64 on one process, or another optimizer, with the forces of all ranks: weights and trust ratios.
    `done` are the steps before these, `late` those of them that weights were not there for."""
    settings: Any = Optimizer.model_validate({"name": "lamb", **chosen})
    weights = {name: each.double() for name, each in separate(first_weights()).items()}
    means, powers, rows = ({name: torch.zeros_like(each) for name, each in weights.items()} for _ in range(3))
    ratios, roles = {}, build_model(SHAPE).roles()
    for step, learning_rate in enumerate(LEARNING_RATES, 1):
        for name, gradient in gradients(step - 1, ranks, settings).items():
            role, own, weight = roles[name.partition("[")[0]], done + step - late.get(name, 0.0), weights[name]
            by_muon = settings.name == "muon" and role.kind == "matrix"
            betas = (MOMENTUM if by_muon else settings.betas[0], settings.betas[1])
            means[name] = betas[0] * means[name] + (1 - betas[0]) * gradient
            powers[name] = betas[1] * powers[name] + (1 - betas[1]) * gradient**2
            first, second = ((1 - beta**own) if settings.bias_correction else 1.0 for beta in betas)
            update = means[name] / first / ((powers[name] / second).sqrt() + settings.epsilon)
            if by_muon:
                ahead = (1 - betas[0]) * gradient + betas[0] * means[name]
                update = orthogonalize_plainly(ahead) * USUAL * max(ahead.shape) ** 0.5
                if settings.even_rows:
                    rows[name] = ROW_MEMORY * rows[name] + (1 - ROW_MEMORY) * update.square().sum(1, keepdim=True)
                    update = update / rows[name].sqrt()
                    update = update / update.square().mean().sqrt() * USUAL
            update = update + (settings.weight_decay if role.decays else 0.0) * weight
            ratio = 1.0
            if settings.name == "lamb" and role.decays:
                ratios[name] = ratio = float(weight.norm() / update.norm())
            weights[name] = weight - learning_rate * ratio * update
    return weights, ratios


def gradients(step: int, ranks: int, settings: Any) -> dict[str, Tensor]:
    """The sum of all forces by `count_parts`, clipped."""
    found = {}
    for name, weight in first_weights().items():
        forces = [force(name, weight.numel(), step, part).double() for part in range(MICRO * ranks)]
        found[name] = torch.stack(forces).sum(0).div(count_parts(ranks)).view(weight.shape)
    norm = float(torch.stack([each.norm() for each in found.values()]).norm())
    factor = 1.0
    if settings.clip:
        factor = min(1.0, settings.clip / (norm + 1e-6))
    return separate({name: each * factor for name, each in found.items()})


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative one over parameters."""
    found = separate(found)
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - each).norm() / each.norm()) for name, each in wanted.items())
