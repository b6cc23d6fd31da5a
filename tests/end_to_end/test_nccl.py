"""What ranks tell one another lies where NCCL takes it, shown without a GPU. LAMB's norms are in test_lamb.py."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.pretended_gpu import PretendedGpu
from support.pretraining_reference import SMALL, random_batch
from support.processes import spawn
from support.training import connect_ranks

from data_prep.common.launchers import World
from pretraining.engine.partition import find_flat_tensors
from pretraining.mesh.mesh import ALONE
from pretraining.model.encoder import PretrainingModel
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import Losses
from pretraining.processes.group import disconnect
from pretraining.processes.stopping import Control, Decision
from pretraining.reporting import meter as meter_module
from pretraining.reporting.meter import Meter
from pretraining.training import phases as phases_module
from pretraining.training.phases import Clock


def tell_all() -> dict[str, Any]:
    """Everything that is joined over ranks, but for objects and barriers, which torch itself brings to the GPU."""
    connect_ranks()
    model = build_model(SMALL).initialize(1)
    with PretendedGpu():
        device = torch.device("cuda")
        found = {
            "decision": Control(World()).decide(wrong=dist.get_rank() == 1, saving=0.0),
            "totals": measured(device),
            "scored": scored(device),
            "held": len(find_flat_tensors(divided(model), model)),
        }
        clock = Clock(100.0 * dist.get_rank(), device)
        clock.agree()
        found["clock"] = clock.seconds < 100
    disconnect()
    return found


def measured(device: torch.device) -> dict[str, float]:
    setattr(meter_module, "read_peak_memory", lambda _: 5000)  # noqa: B010
    meter = Meter(device, ["masked"], ["predictions"], watch=meter_module.Stopwatch(torch.device("cpu")))
    meter.add([torch.tensor(1.5, device=device)], predictions=2, pieces=10, padded=10, flops=1.0)
    meter.step(1e-3)
    return meter.flush()[0]


def scored(device: torch.device) -> float:
    batch: Any = random_batch([5, 9], SMALL.vocabulary)
    stays = SimpleNamespace(labels=batch.labels, lengths=batch.lengths, to=lambda _: batch)
    setattr(phases_module, "validation_batches", lambda *_: [(stays, 1.0)])  # noqa: B010
    losses = Losses(*(torch.tensor(2.0, device=device) for _ in Losses._fields))
    quiet = SimpleNamespace(eval=lambda: None, train=lambda: None)
    model, held_out = SimpleNamespace(shape=SMALL), SimpleNamespace(shard_rows=[[4]], first_sets=[0, 1])
    engine: Any = SimpleNamespace(
        device=device, same_bits=False, deepspeed=quiet, model=model, forward=lambda _: losses
    )
    held_out.corpora = SimpleNamespace(parts=[SimpleNamespace(name="")])
    phase = SimpleNamespace(micro_batch=2, scored=[None], _mesh=ALONE, _mixture=SimpleNamespace(names=[""]))
    validate: Any = phases_module.TrainingPhase._validate
    loss: float = validate(phase, engine, held_out, lambda: None)[0]["next_loss"]
    return loss


def divided(model: PretrainingModel) -> Any:
    """What DeepSpeed looks like under ZeRO 2: each rank has its half of all parameters."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    half = -(-len(flat) // 2)
    own = torch.nn.functional.pad(flat, (0, 2 * half - len(flat)))[dist.get_rank() * half :][:half]
    optimizer = type("DeepSpeedZeroOptimizer", (), {})()
    optimizer.single_partition_of_fp32_groups = [own]
    optimizer.round_robin_bit16_groups = [parameters]
    sizes = [0, *(parameter.numel() for parameter in parameters[:-1])]
    optimizer.round_robin_bit16_offsets = [list(accumulate(sizes))]
    optimizer.real_dp_process_group = [dist.group.WORLD]
    return SimpleNamespace(optimizer=optimizer)


def test_what_ranks_tell_one_another_lies_on_the_gpu() -> None:
    done = spawn(2, tell_all)
    assert [(rank.code, rank.errors) for rank in done] == [(0, "")] * 2
    for rank in done:
        assert rank.result["decision"] == Decision.WRONG
        assert (rank.result["totals"]["masked"], rank.result["totals"]["predictions"]) == (3.0, 4)
        assert (rank.result["scored"], rank.result["held"]) == (2 * 2.0 / 4, 1)
        assert rank.result["clock"]
