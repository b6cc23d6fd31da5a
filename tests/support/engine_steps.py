"""Steps of a small model by an engine, some with a gradient that is not finite; or all of them twice, and then this
says whether weights moved and both runs gave the same bits: python tests/support/engine_steps.py cuda bf16 lamb
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch
from support.pretraining_reference import SMALL, random_batch
from torch import Tensor

from data_prep.common.launchers import World
from pretraining.config.settings import Compute, Optimizer, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import set_arithmetic
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import Deal, PretrainingBatches
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.processes.group import connect, disconnect

SHAPE = replace(SMALL, hidden=128, heads=2)
"""Heads of 64, which the flash kernels take."""


def make_steps(engine: Engine, lengths: Sequence[int], factors: Sequence[float]) -> list[list[Tensor]]:
    """Makes a step for each of these factors of the loss; returns weights, averages and numbers of steps after each."""
    kept = []
    for step, factor in enumerate(factors):
        batch = random_batch(lengths, engine.model.shape.vocabulary, step)
        batches = PretrainingBatches((batch,), len(batch.lengths), len(batch.labels), deal=Deal(0, 1, 1))
        train_step(engine, batches, 1e-3, Seeds(step, step), lambda *given, by=factor: MLM.loss(*given) * by)
        states = [each for flat in engine.flat_tensors for each in engine.optimizer.get_state(flat.tensor).values()]
        kept.append([each.clone() for each in (*(weight for _, weight in engine.weights()), *states)])
    engine.close()
    return kept


def assert_leaves_out(poison: float, device: torch.device, name: str, zero: int, same_bits: bool = False) -> None:
    """A step whose gradient is not finite changes neither weights, averages nor the number of steps."""
    settings = EngineSettings(
        Optimizer.model_validate({"name": name}), Precision(dtype="fp32"), Parallel(zero=zero, same_bits=same_bits)
    )
    engine = Engine(build_model(SHAPE).initialize(1), settings, device)
    first, second, third = make_steps(engine, [9, 5, 12, 64], (1.0, poison, 1.0))
    assert engine.optimizer_steps == 2
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, second, third))


def main(kind: str, dtype: str, optimizer: str) -> None:
    """Prints two words: whether all weights moved, and whether they are the same after both runs."""
    device = torch.device(kind, 0)
    precision = Precision.model_validate({"dtype": dtype})
    scale = {"fp16": {"initial_scale_power": 8}} if dtype == "fp16" else {}
    compute = Compute(deterministic=True)
    set_arithmetic(precision, compute, device)
    connect(World(), device)
    settings = EngineSettings(
        Optimizer.model_validate({"name": optimizer}), precision, compute=compute, deepspeed=scale
    )
    engines = (Engine(build_model(SHAPE).initialize(1), settings, device) for _ in range(2))
    lengths = [96, 64, 30] * (100 if kind == "cuda" else 5)
    one, other = (make_steps(engine, lengths, [1.0] * 5) for engine in engines)
    disconnect()
    moved = not any(torch.equal(*pair) for pair in zip(one[0], one[-1], strict=True))
    print(moved, all(torch.equal(*pair) for kept in zip(one, other, strict=True) for pair in zip(*kept, strict=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
