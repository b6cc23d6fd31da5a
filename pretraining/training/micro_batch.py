"""Finds the micro-batch of a phase that has "auto": the largest that fits into the memory of every rank.

On a GPU by trial: a copy of the model computes the heaviest possible micro-batch, forward and backward, beside all
that the engine holds. The trial needs no other rank and changes nothing of the run. Under ZeRO 3, where a rank may have
no room for a copy, and on a CPU, where a process that takes too much is killed, by estimate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from data_prep.common.errors import UserError
from data_prep.common.toml_text import show_value
from pretraining.checkpoint.state import FoundMicroBatch
from pretraining.config.settings import Phase
from pretraining.data.batches import full_sequences
from pretraining.devices import read_name
from pretraining.engine.engine import Engine, is_shortage
from pretraining.engine.precision import DTYPES, name_dtype
from pretraining.mesh.mesh import ALONE, Mesh
from pretraining.model.batch import PretrainingBatches
from pretraining.objectives.declaration import find_objective
from pretraining.planning.memory import MARGIN, Heaviest, Room, find_largest_that_fits
from pretraining.planning.plan import Target
from pretraining.processes.context import Context
from pretraining.processes.group import gather
from pretraining.reporting.hardware import read_total_memory, synchronize
from pretraining.training.request import Request
from pretraining.training.resuming import build_share

Found = Mapping[str, FoundMicroBatch]
LESS_MEMORY = "compute.checkpoint_activations = true, or more ranks"


class MicroBatches:
    """The micro-batches of the phases of a run: from the recipe, or found where it has "auto"."""

    def __init__(self, request: Request, context: Context, engine: Engine, before: Found, keeps: bool = False):
        """`before`: micro-batches that were found before the checkpoint, by phase name; a run that `keeps` them takes
        no others."""
        self._request, self._context, self._engine, self._keeps = request, context, engine, keeps
        self._room = measure_room(engine.device, context.world.local_size)
        dtype = name_dtype(engine.dtype)
        self._target = Target(request.recipe, request.corpora, dtype, self._room, engine.mesh.data_ranks)
        self.found = dict(before)

    def size_for(self, phase: Phase) -> int:
        """The micro-batch of a phase, in sequences."""
        return self.found[phase.name].sequences if phase.micro_batch == "auto" else phase.micro_batch

    def find(self, first: int) -> None:
        """Finds the micro-batches of the phases from number `first` on, with `parallel.same_bits` also of those that
        this start does not train. All ranks call it together, before training."""
        recipe = self._request.recipe
        end = len(recipe.phases) if recipe.parallel.same_bits else self._request.num_phases
        with self._context.watch.pause():
            devices = sorted(set(gather(self._describe_device())))
            for number, phase in list(enumerate(recipe.phases))[first:end]:
                if phase.micro_batch == "auto":
                    self._find(number, phase, self._list_conditions(phase, devices))
                elif self._context.world.rank == 0 and not self._make_trial(phase)(phase.micro_batch):
                    self._context.warn(self._describe_shortage(number, phase, phase.micro_batch))

    def _find(self, number: int, phase: Phase, conditions: dict[str, object]) -> None:
        """Keeps the run's earlier micro-batch if nothing has changed; otherwise takes what fits on all ranks."""
        before = self.found.get(phase.name)
        if before is None or before.conditions != conditions:
            own = self.find_largest(phase)
            fault = None if own else self._describe_shortage(number, phase, 1)
            found = min(gather(own, fault))
            if before is None or not self._keeps:
                self.found[phase.name] = FoundMicroBatch(found, conditions)
            elif found > before.sequences and self._context.world.rank == 0:
                kept = f"parallel.same_bits keeps {before.sequences}, of the first start"
                self._context.warn(f"micro-batch of phase {phase.name}: {found} would fit, but {kept}")
            elif self._context.world.rank == 0 and not self._make_trial(phase)(before.sequences):
                self._context.warn(self._describe_shortage(number, phase, before.sequences))
        if self._context.world.rank == 0:
            found = self.found[phase.name].sequences
            self._context.console.print(f"micro-batch of phase {phase.name}: {found} (auto)", markup=False)

    def find_largest(self, phase: Phase, below: int | None = None) -> int | None:
        """Finds the largest micro-batch, below a limit if given, that fits on this rank; None if none does."""
        sizes = [size for size in self._target.sizes(phase) if below is None or size < below]
        return find_largest_that_fits(sizes, self._make_trial(phase))

    def _make_trial(self, phase: Phase) -> Callable[[int], bool]:
        """Returns a function that says whether a number of sequences fits on this rank, by trial or by estimate."""
        zero, device = self._engine.zero, self._engine.device
        if can_try(device) and zero < 3:  # a trial needs a whole copy of the weights
            mesh = Mesh(tensor_rank=self._engine.mesh.tensor_rank, tensor_ranks=self._engine.mesh.tensor_ranks)
            reserve = memory_to_reserve(self._target.plan_memory().device, device)
            return partial(fits_in_trial, self._target.heaviest(phase), device, reserve, mesh=mesh)
        return partial(self._target.fits, phase)

    def explain_shortage(self, number: int, phase: Phase) -> UserError:
        """Returns an error that names a micro-batch that fits, after a step of this rank ran out of memory."""
        self._engine.forget_gradients()
        release_memory(self._engine.device)
        return UserError(self._describe_shortage(number, phase, self.size_for(phase)))

    def _describe_shortage(self, number: int, phase: Phase, size: int) -> str:
        """Says that a micro-batch of this size does not fit, and which one does, of full sequences."""
        smaller, room = self.find_largest(phase, below=size), self._room
        where = f"{room.usable / 1e9:.1f} GB of a rank" if room.on_cpu else f"{room.size / 1e9:.1f} GB of this GPU"
        less = LESS_MEMORY if self._request.recipe.parallel.same_bits else f"a higher parallel.zero, {LESS_MEMORY}"
        given = f"give {smaller}{' and --parallel.same_bits false' * self._keeps}"
        cure = f"{given}, or see what else takes memory there" if smaller else f"take {less}"
        given = f"phases.{number}.micro_batch = {show_value(phase.micro_batch)}"
        return f"{given}: {size} x {phase.length} pieces do not fit into the {where}; {cure}"

    def _list_conditions(self, phase: Phase, devices: list[str]) -> dict[str, object]:
        """Lists all that decides which micro-batch fits: a run keeps its micro-batch while this stays the same."""
        recipe = self._request.recipe.as_dict()
        recipe["compute"].pop("graphs")  # older checkpoints lack it, and it changes little
        if not recipe["parallel"]["same_bits"]:
            del recipe["parallel"]["same_bits"]  # older checkpoints lack it
        return {
            "ranks": self._context.world.size,
            "devices": devices,
            "dtype": self._target.dtype,
            "model": self._target.shape_in(phase).values(),
            "batch": phase.batch,
            "length": phase.length,
            "predictions": self._target.heaviest(phase).predictions,
            **{section: recipe[section] for section in ("parallel", "deepspeed")},
            "compute": {"kernels": "auto", **recipe["compute"]},  # a setting until 1.1, and so in older checkpoints
        }

    def _describe_device(self) -> str:
        """Name and memory of the device of this rank."""
        device = self._engine.device
        return f"{read_name(device) if device.type == 'cuda' else device.type}, {self._room.size / 1e9:.0f} GB"


def measure_room(device: torch.device, ranks: int) -> Room:
    """Returns the memory of a rank on this machine; ranks on CPUs share the main memory."""
    on_cpu = device.type == "cpu"
    return Room(read_total_memory(device) / (ranks if on_cpu else 1), on_cpu)


def can_try(device: torch.device) -> bool:
    """Whether a process can run out of this device's memory and continue."""
    return device.type == "cuda"


def memory_to_reserve(planned: float, device: torch.device) -> int:
    """Bytes that a trial leaves free: a margin, and memory that the engine does not hold yet but needs in a step."""
    if device.type == "cpu":
        return 0
    return int(max(0.0, planned - torch.cuda.memory_allocated(device)) + MARGIN * read_total_memory(device))


def fits_in_trial(heaviest: Heaviest, device: torch.device, reserve: int, sequences: int, mesh: Mesh = ALONE) -> bool:
    """Whether a rank can compute the heaviest micro-batch of `sequences` with `reserve` bytes to spare."""
    try:
        compute_on_copy(heaviest, device, reserve, sequences, mesh)
        fits = True
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        fits = False
    release_memory(device)  # here, where the error no longer holds the activations
    return fits


def compute_on_copy(heaviest: Heaviest, device: torch.device, reserve: int, sequences: int, mesh: Mesh = ALONE) -> None:
    """Computes a micro-batch, forward and backward, on a temporary copy of the model, or of this rank's share of it.

    The copy's weights and gradients stand for the buffers that DeepSpeed fills within a step.
    """
    objective = find_objective(heaviest.shape)
    ballast = torch.empty(reserve, dtype=torch.uint8, device=device)
    model = build_share(heaviest.shape, heaviest.recompute, mesh, DTYPES[heaviest.dtype], device)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    batch = full_sequences(sequences, heaviest.length, int(heaviest.predictions), objective).to(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        batches = PretrainingBatches((batch,), sequences, len(batch.labels), len(batch.pieces))
        torch.autograd.backward(objective.loss(model(batch), batches))
    synchronize(device)
    del ballast


def release_memory(device: torch.device) -> None:
    """Frees unused memory, and resets the peak, which was not that of training."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
