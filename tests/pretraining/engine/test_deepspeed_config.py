"""What DeepSpeed is told: it waits for no GPU that we do not need to wait for, and takes no memory for nothing."""

from __future__ import annotations

from typing import Any

import torch
from support.lamb_reference import NVIDIA, SHAPE, make_engine, run_engine
from support.training import run_connected

from pretraining.engine import deepspeed_config
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.objectives.declaration import build_model
from pretraining.planning import memory

STAGES = [("fp32", zero) for zero in range(4)] + [("bf16", zero) for zero in (1, 2, 3)]
SMALL_BUCKET = 1234


def on_all_stages() -> dict[Any, Any]:
    """How often DeepSpeed waits for the device in twenty steps, and the buckets that it takes."""
    from deepspeed.accelerator import get_accelerator

    waits: list[None] = []
    setattr(get_accelerator(), "synchronize", lambda *_: waits.append(None))  # noqa: B010
    found: dict[Any, Any] = {}
    for case in STAGES:
        engine = make_engine(*case, NVIDIA)
        waits.clear()
        run_engine(engine)
        found[case] = len(waits), getattr(engine.deepspeed.optimizer, "reduce_bucket_size", None)
    own = make_engine("fp32", 2, NVIDIA, reduce_bucket_size=SMALL_BUCKET)
    found["own"] = own.deepspeed.optimizer.reduce_bucket_size
    return found


def test_deepspeed_does_not_wait_for_the_device_and_takes_buckets_no_larger_than_the_model() -> None:
    """Unless the user says another size."""
    (found,) = run_connected(1, on_all_stages)
    assert [found[case][0] for case in STAGES] == [0] * len(STAGES)
    buckets = {found[case][1] for case in STAGES} - {None}
    assert buckets == {sum(parameter.numel() for parameter in build_model(SHAPE).parameters())}
    assert found["own"] == SMALL_BUCKET


def test_large_models_get_deepspeeds_own_bucket() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    default = DeepSpeedZeroConfig.model_fields["reduce_bucket_size"].default
    made = deepspeed_config.make_deepspeed_config(EngineSettings(), torch.float32, torch.device("cuda"), 1, 10**10)
    assert made["zero_optimization"]["reduce_bucket_size"] == default == memory.BUCKET
