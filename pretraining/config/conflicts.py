"""Finds settings of a recipe that contradict each other, the hardware, the data or DeepSpeed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any, Literal

from data_prep.common.errors import UserError
from data_prep.common.toml_text import Key, dotted, show_value
from data_prep.settings import SHORTEST
from pretraining.architectures import declaration as architectures
from pretraining.config.settings import SCHEDULE_KEYS, Computing, Phase, Recipe, count_micro_batches, find_divisor
from pretraining.model.shape import PIECE_HEAD, SIDES, Shape
from pretraining.objectives import declaration as objectives
from pretraining.optimizers import declaration as optimizers

OWNED = {
    "train_batch_size": "phases.0.batch",
    "train_micro_batch_size_per_gpu": "phases.0.micro_batch",
    "gradient_accumulation_steps": "phases.0.batch and phases.0.micro_batch",
    "optimizer": "optimizer.name and its neighbours",
    "zero_allow_untested_optimizer": "optimizer.name",
    "scheduler": "phases.0.learning_rate, .warmup and .decay",
    "gradient_clipping": "optimizer.clip",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast"), "precision.dtype"),
    "data_types": "precision.dtype; gradients accumulate in fp32",
    "zero_optimization.stage": "parallel.zero",
    "zero_optimization.offload_optimizer": "parallel.offload",
    "zero_optimization.offload_param": "parallel.offload",
    "zero_optimization.cpu_offload": "parallel.offload",
    "zero_force_ds_cpu_optimizer": "parallel.offload",
    "activation_checkpointing": "compute.checkpoint_activations",
    "compile": "compute.compile",
    **dict.fromkeys(("steps_per_print", "timers"), "logging.every"),
    "tensorboard": "logging.tensorboard",
    "seed": "seed",
    "checkpoint.load_universal": "the checkpoints, which any ranks can continue",
    **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor"), "gradients of ranks are added in fp32"),
}
"""Settings of DeepSpeed that follow from the recipe, with the keys that they follow from."""

USED_BY = {
    "power": ("polynomial",),
    "final": ("linear", "polynomial", "cosine", "wsd"),
    **dict.fromkeys(("decay_share", "decay_steps"), ("wsd",)),
    "decay_from": ("linear", "polynomial", "cosine"),
}
"""Settings of a schedule, with the kinds of decay that use them."""
TRACKERS = {"wandb": "wandb", "comet": "comet_ml"}
"""Sections of DeepSpeed that send metrics to a service, with the packages that they need."""
OPEN = (
    "aio", "checkpoint", "comet", "comms_logger", "communication_data_type", "csv_monitor", "disable_allgather",
    "dump_state", "flops_profiler", "memory_breakdown",
    "seq_parallel_communication_data_type", "wall_clock_breakdown", "wandb", "zero_optimization",
)  # fmt: skip
"""Settings of DeepSpeed that a recipe may give. DeepSpeed ignores unknown names, so they are checked here."""


def find_faults(
    recipe: Recipe,
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    lengths: Collection[int] | None = None,
) -> list[str]:
    """Lists all faults with their cures; an argument that is None is unknown and not checked."""
    faults = [*_find_model_faults(recipe), *_find_duration_faults(recipe), *_find_hardware_faults(recipe, device)]
    faults += _find_mesh_faults(recipe, ranks)
    for number, phase in enumerate(recipe.phases):
        faults += _find_phase_faults(recipe, number, phase)
        if lengths is not None and phase.length > max(lengths, default=0):  # a shorter one is cut out of longer ones
            there, needed = ", ".join(map(str, sorted(lengths))), " ".join(map(str, sorted({*lengths, phase.length})))
            faults.append(
                f"phases.{number}.length = {phase.length}: the data has {there}; "
                f"make it with shard.py --lengths {needed}, or take less"
            )
        try:
            readers = max(1, (ranks or 1) // recipe.parallel.tensor)
            count_micro_batches(phase, readers, number)  # what does not divide for one rank does not for more
        except UserError as error:
            faults.append(str(error))
    average, keep = recipe.checkpoints.average or 0, recipe.checkpoints.keep
    if average > keep:
        faults.append(f"checkpoints.average = {average}: only checkpoints.keep = {keep} are kept; keep {average}")
    used = [settings.name for settings in recipe.list_objectives()]
    faults += objectives.find_faults(recipe.objective, recipe.hours is not None, used)
    faults += [*_find_optimizer_faults(recipe, device), *_find_deepspeed_faults(recipe.deepspeed)]
    return faults if device is None else [*faults, *_find_tracker_faults(recipe)]


def find_computing_faults(settings: Computing, device: Literal["cpu", "cuda"] | None) -> list[str]:
    """Lists faults of the optimizer and the hardware, with their cures; device None: unknown."""
    return [*_find_hardware_faults(settings, device), *_find_optimizer_faults(settings, device)]


def _find_optimizer_faults(recipe: Computing, found: Literal["cpu", "cuda"] | None) -> Iterator[str]:
    place = optimizers.Placement(recipe.parallel.device, recipe.parallel.offload, found)
    return optimizers.find_faults(recipe.optimizer, place)


def _find_model_faults(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    lacking = [name for name in ("layers", "hidden") if model.size is None and getattr(model, name) is None]
    if lacking:
        yield (
            f"model.size: is missing: one of {', '.join(architectures.find_architecture(model.architecture).sizes)}; "
            f"or give the numbers, {' and '.join(f'model.{name}' for name in lacking)}; "
            "or begin with a model that has them: --init FOLDER"
        )
        return
    yield from architectures.find_faults(model)
    kind = architectures.find_architecture(model.architecture)
    for settings in recipe.list_objectives():
        if (sees := objectives.configure_objective(settings).sees) not in kind.sees:
            able = [f'"{name}"' for name, each in objectives.objectives().items() if each.sees == kind.sees[0]]
            yield (
                f'objective.name = "{settings.name}": its pieces see {SIDES[sees]}, but in '
                f"{recipe.base_model or 'model.architecture'} ({kind.title}) they see {SIDES[kind.sees[0]]}; take "
                f"objective.name = {' or '.join(able)}"
            )
        if recipe.compute.compile and not objectives.configure_objective(settings).compiles:
            yield (
                f'compute.compile = true: not with objective.name = "{settings.name}", whose sequences see in two '
                "ways; take compute.compile = false"
            )
    if model.size not in (None, *architectures.find_architecture(model.architecture).sizes):
        return  # so its numbers are not known
    shape = model.shape(vocabulary=1)
    if shape.hidden % shape.heads:
        below = find_divisor(shape.hidden, shape.heads)
        yield (
            f"model.heads = {shape.heads}: does not divide model.hidden = {shape.hidden}; "
            f"{below} does, with {shape.hidden // below} a head"
        )
    yield from _find_share_faults(recipe, shape)
    for settings in recipe.list_objectives():
        yield from _find_head_faults(recipe, objectives.configure_objective(settings), shape)


def _find_head_faults(recipe: Recipe, objective: objectives.Objective, shape: Shape) -> Iterator[str]:
    """Checks that the architecture has the heads of an objective, and that minimal pairs can be scored by them."""
    shape, name = shape.change_learning(pairs=False), show_value(objective.settings.name)
    needed = set(objective.exported_heads(shape))
    if not needed <= architectures.find_architecture(shape.architecture).heads(shape).keys():
        able = [
            show_value(name)
            for name, kind in architectures.architectures().items()
            if needed <= kind.heads(shape).keys()
        ]
        yield (
            f"objective.name = {name}: {show_value(shape.architecture)} has no {objective.describe_heads(shape)}; take "
            f"model.architecture = {' or '.join(able)}"
        )
    if recipe.evaluation.pairs and PIECE_HEAD not in objective.heads(shape):
        yield (
            f"evaluation.pairs = {show_value(recipe.evaluation.pairs)}: a model that {objective.learns} ({name}) says "
            "of no piece how likely it is; leave it out"
        )


def _find_duration_faults(recipe: Recipe) -> Iterator[str]:
    """Checks the lengths of the phases together."""
    if not recipe.phases:
        needed = "name, length, batch, micro_batch, steps and learning_rate"
        yield f"phases: is missing: give at least one [[phases]] with {needed}"
        return
    if recipe.steps is not None and recipe.hours is not None:
        yield f"steps = {recipe.steps}: hours = {recipe.hours:g} is given too; keep one of them"
    total = "hours" if recipe.hours is not None else "steps" if recipe.steps is not None else None
    for number, phase in enumerate(recipe.phases):
        yield from _find_length_faults(number, phase, total)
    shares = [phase.share for phase in recipe.phases if phase.share is not None]
    if total is not None and len(shares) == len(recipe.phases) and abs(sum(shares) - 1) > 1e-6:
        yield f"phases.0.share = {shares[0]:g}: the shares of the phases make {sum(shares):g}; they must make 1"
    counts = recipe.phase_steps() if total == "steps" and len(shares) == len(recipe.phases) else None
    for number, (share, count) in enumerate(zip(shares, counts or (), strict=False)):
        if not count:
            yield f"phases.{number}.share = {share:g}: of {recipe.steps} steps that is none; give more"
    names = [phase.name for phase in recipe.phases]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield f"phases.{number}.name = {show_value(name)}: phases.{names.index(name)}.name is the same"


def _find_length_faults(number: int, phase: Phase, total: str | None) -> Iterator[str]:
    """Checks the length of a phase; `total`: the key that gives the length of all phases, if any."""
    if phase.steps is not None and phase.share is not None:
        yield f"phases.{number}.steps = {phase.steps}: phases.{number}.share is given too; keep one of them"
    elif total is not None and phase.share is None:
        yield f"phases.{number}.share: is missing: the recipe gives {total}, and each phase its share of them"
    elif total is None and phase.share is not None and phase.steps is None:
        yield f"phases.{number}.share = {phase.share:g}: of what? give the recipe steps or hours"
    elif total is None and phase.steps is None:
        yield f"phases.{number}.steps: is missing: how long the phase is"


def _find_phase_faults(recipe: Recipe, number: int, phase: Phase) -> Iterator[str]:
    at = f"phases.{number}"
    if not SHORTEST <= phase.length <= recipe.model.positions:
        positions, more = recipe.model.positions, f", or model.positions = {phase.length}"
        yield (
            f"{at}.length = {phase.length}: the model has {positions} positions; take {SHORTEST} to {positions}"
            f"{more if phase.length > positions else ''}"
        )
    if phase.learning_rate is None and number == 0:
        yield f"{at}.learning_rate: is missing: the highest learning rate"
    elif phase.learning_rate is None:
        for name in SCHEDULE_KEYS:
            if name in phase.model_fields_set:
                yield (
                    f"{at}.{name} = {show_value(getattr(phase, name))}: the phase has no learning_rate of its own, so "
                    f"it follows the schedule of the phase before; remove it, or give {at}.learning_rate"
                )
    else:
        for name, users in USED_BY.items():
            value = getattr(phase, name)
            if value not in (Phase.model_fields[name].default, None) and phase.decay not in users:
                fault = f"{at}.{name} = {show_value(value)}: means nothing with {at}.decay = {show_value(phase.decay)}"
                yield f"{fault}; remove it, or take {' or '.join(map(show_value, users))}"
    in_shares = phase.warmup_steps is None and phase.decay_steps is None
    if phase.decay == "wsd" and in_shares and phase.warmup + phase.decay_share > 1:
        yield (
            f"{at}.warmup = {phase.warmup:g}: and {at}.decay_share = {phase.decay_share:g} exceed the whole schedule; "
            "give less"
        )
    for steps, share in (("warmup_steps", "warmup"), ("decay_steps", "decay_share")):
        if getattr(phase, steps) is not None and recipe.schedule_owners()[number] == number:
            yield from _find_stretch_faults(recipe, number, steps, share)


def _find_stretch_faults(recipe: Recipe, number: int, in_steps: str, in_share: str) -> Iterator[str]:
    """Checks the steps of the warm-up or the decay of a schedule, which may be given as a share too."""
    phase = recipe.phases[number]
    given, share = getattr(phase, in_steps), getattr(phase, in_share)
    at = f"phases.{number}.{in_steps} = {given}"
    if share != Phase.model_fields[in_share].default:
        yield f"{at}: phases.{number}.{in_share} = {share:g} is given too; keep one of them"
    counts = recipe.phase_steps()
    if counts is None:
        yield f"{at}: the recipe goes by the clock (hours); give phases.{number}.{in_share}, a share of the time"
        return
    spanned = [follower for follower, owner in enumerate(recipe.schedule_owners()) if owner == number]
    total = sum(counts[follower] for follower in spanned)
    names = " and ".join(f"phases.{follower}.steps" for follower in spanned)
    risen = "warmup" if phase.warmup_steps is None else "warmup_steps"
    warmup = round(total * phase.warmup) if phase.warmup_steps is None else phase.warmup_steps
    if in_steps == "decay_steps" and given < total < given + warmup:
        beside = f"phases.{number}.{risen} = {show_value(getattr(phase, risen))}"
        yield f"{at}: and {beside} exceed the {total} steps of {names}; give fewer"
    if in_steps == "warmup_steps" and phase.decay == "wsd" and phase.decay_steps is None:
        falling = round(total * phase.decay_share)
        if given < total < given + falling:
            beside = f"phases.{number}.decay_share = {phase.decay_share:g}"
            yield f"{at}: and {beside} exceed the {total} steps of {names}; give fewer"
    if total and given >= total:
        yield f"{at}: the schedule has {total} steps in all ({names}); give fewer than these"


def _find_hardware_faults(recipe: Computing, found: Literal["cpu", "cuda"] | None) -> Iterator[str]:
    """Checks precision, ZeRO and the device; `found`: the device that `auto` takes."""
    parallel, wanted = recipe.parallel, recipe.parallel.device
    device = found if wanted == "auto" else wanted
    if wanted == "cuda" and found == "cpu":
        yield 'parallel.device = "cuda": no GPU is found here; take "auto" or "cpu", or look at nvidia-smi'
    if device == "cpu" and recipe.precision.dtype == "fp16":
        yield (
            f'precision.dtype = "fp16": not on a CPU (parallel.device = "{wanted}"); '
            'take "bf16", "fp32", or "auto" for the best that there is'
        )
    yield from _find_tf32_faults(recipe, device)
    if recipe.compute.compile and parallel.zero == 3:
        yield (
            "compute.compile = true: not with parallel.zero = 3, which fetches the weights of a layer by calls that "
            "cannot be compiled; take parallel.zero = 1 or 2, or compute.compile = false"
        )
    if recipe.compute.attention == "own":
        at, compute = 'compute.attention = "own"', recipe.compute
        if compute.compile:
            yield f'{at}: not with compute.compile = true, whose layers call others; take "auto", or compile = false'
        if compute.kernels == "torch":
            yield f'{at}: not with compute.kernels = "torch", which forbids our kernels; take "auto" for one of them'
    if parallel.offload != "none":
        at = f'parallel.offload = "{parallel.offload}"'
        if device == "cpu":
            yield f'{at}: a CPU has no other memory to move it to (parallel.device = "{wanted}"); take "none"'
        if parallel.offload == "optimizer" and parallel.zero == 0:
            yield f"{at}: needs parallel.zero = 1, 2 or 3; it is 0"
        if parallel.offload == "all" and parallel.zero != 3:
            yield f"{at}: weights leave the GPU under parallel.zero = 3 alone; it is {parallel.zero}"


def _find_mesh_faults(recipe: Recipe, ranks: int | None) -> Iterator[str]:
    """Checks what ranks that share a model need, besides its sizes."""
    parallel, compute, tensor = recipe.parallel, recipe.compute, recipe.parallel.tensor
    if tensor == 1:
        return
    names = [settings.name for settings in recipe.list_objectives()]
    second = [name for name in names if not objectives.objectives()[name].can_be_shared]
    wrong = {
        f"does not divide the ranks, {ranks}; start a multiple of {tensor} (for a plan: --ranks), or take 1": ranks
        and ranks % tensor,
        "not with parallel.zero = 3, which divides the same weights again; take 1 or 2": parallel.zero == 3,
        f'not with parallel.offload = "{parallel.offload}"; take "none"': parallel.offload != "none",
        "not with compute.compile = true, which compiles no sums over ranks; take false": compute.compile,
        'not with compute.kernels = "torch", by which ranks draw other masks; take "auto"': compute.kernels == "torch",
        f'not with the objective "{"".join(second[:1])}", which has a second model; take 1': second,
    }
    yield from (f"parallel.tensor = {tensor}: {fault}" for fault, is_there in wrong.items() if is_there)


def _find_share_faults(recipe: Recipe, shape: Shape) -> Iterator[str]:
    """Checks that ranks that share a model divide its sizes; vocabularies are padded."""
    tensor, best = (
        recipe.parallel.tensor,
        find_divisor(math.gcd(shape.heads, shape.intermediate), recipe.parallel.tensor),
    )
    for name, value in (("heads", shape.heads), ("intermediate", shape.intermediate)):
        if value % tensor:
            yield f"parallel.tensor = {tensor}: does not divide model.{name} = {value}; take {best}"


def _find_tracker_faults(recipe: Recipe) -> Iterator[str]:
    """Checks the packages for services that DeepSpeed sends metrics to, on the machine that trains."""
    for section, package in TRACKERS.items():
        options = recipe.deepspeed.get(section)
        if isinstance(options, dict) and options.get("enabled") and not find_spec(package):
            fault = f"{package} is not installed; pip install {package}"
            yield f"deepspeed.{section}.enabled = true: {fault}, or remove it"


def _find_tf32_faults(recipe: Computing, device: Literal["cpu", "cuda"] | None) -> Iterator[str]:
    if recipe.precision.tf32 and device == "cpu":
        yield (f'precision.tf32 = true: only a GPU has TF32 (parallel.device = "{recipe.parallel.device}"); take false')
    elif recipe.precision.tf32 and recipe.precision.dtype != "fp32":
        yield (
            f'precision.tf32 = true: is for products in fp32 (precision.dtype = "{recipe.precision.dtype}"); '
            'take false, or precision.dtype = "fp32"'
        )


def _find_deepspeed_faults(raw: dict[str, Any]) -> Iterator[str]:
    for key, value in _walk_table(raw):
        name, said = dotted(key), f"deepspeed.{dotted(key)} = {show_value(value)}"
        if name in OWNED:
            yield f"{said}: follows from the recipe: {OWNED[name]}; remove it"
        elif name == "zero_optimization.round_robin_gradients" and value:
            yield f"{said}: DeepSpeed mixes up parameters under it; remove it"
        elif name == "zero_optimization.zenflow":
            yield f"{said}: moves weights by gradients of earlier steps, which is no optimizer of ours; remove it"
        elif name == "zero_optimization" and not isinstance(value, dict):
            yield f"{said}: a table is needed"
        elif len(key) == 1 and name not in OPEN:
            near = difflib.get_close_matches(name, [*OPEN, *OWNED], 1)
            yield f"{said}: unknown" + (f"; did you mean deepspeed.{near[0]}?" if near else " to DeepSpeed")


def _walk_table(table: dict[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in table.items():
        yield (*above, name), value
        if isinstance(value, dict):
            yield from _walk_table(value, (*above, name))
