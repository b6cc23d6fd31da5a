"""Finds settings of a recipe that contradict each other, the hardware, the data or DeepSpeed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator
from typing import Any, Literal

from data_prep.common.errors import UserError
from data_prep.common.sections import find_facts
from data_prep.common.toml_text import Key, dotted, show_value
from data_prep.settings import SHORTEST
from pretraining.architectures import declaration as architectures
from pretraining.config.settings import (
    WSD_SHARE,
    Computing,
    OfSchedule,
    Phase,
    Recipe,
    count_micro_batches,
    find_divisor,
)
from pretraining.model.shape import PIECE_HEAD, SIDES, Shape
from pretraining.objectives import declaration as objectives
from pretraining.optimizers import declaration as optimizers

OWNED = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler gradient_clipping "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer bf16 bfloat16 fp16 amp torch_autocast data_types "
    "zero_optimization.stage zero_optimization.offload_optimizer zero_optimization.offload_param "
    "zero_optimization.cpu_offload activation_checkpointing compile steps_per_print timers tensorboard seed "
    "checkpoint.load_universal prescale_gradients gradient_predivide_factor "
    "zero_optimization.round_robin_gradients zero_optimization.zenflow"
).split()
"""Settings of DeepSpeed that follow from the recipe; the last two would make a step another one."""
OPEN = (
    "aio checkpoint comet comms_logger communication_data_type csv_monitor disable_allgather dump_state flops_profiler "
    "memory_breakdown seq_parallel_communication_data_type wall_clock_breakdown wandb zero_optimization"
).split()
"""Settings of DeepSpeed that a recipe may give. DeepSpeed ignores unknown names, so they are checked here."""


def find_faults(
    recipe: Recipe,
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    lengths: Collection[int] | None = None,
) -> list[str]:
    """Lists all faults with their cures; an argument that is None is unknown and not checked."""
    faults = [*_find_model_faults(recipe), *_find_duration_faults(recipe), *find_computing_faults(recipe, device)]
    faults += _find_mesh_faults(recipe, ranks)
    if recipe.parallel.same_bits and recipe.hours is not None:
        faults.append(f"parallel.same_bits = true: not by the clock (hours = {recipe.hours:g}); give steps")
    if recipe.parallel.same_bits and "communication_data_type" in recipe.deepspeed:
        faults.append("deepspeed.communication_data_type: parallel.same_bits = true sends integers; remove it")
    for number, phase in enumerate(recipe.phases):
        faults += _find_phase_faults(recipe, number, phase)
        faults += _find_mix_faults(recipe, number, phase)
        try:
            # what does not divide for one rank does not for more
            readers = max(1, (ranks or 1) // recipe.parallel.tensor)
            count_micro_batches(phase, readers, number, uneven=recipe.parallel.same_bits)
        except UserError as error:
            faults.append(str(error))
    faults += _find_data_faults(recipe, lengths) if lengths is not None else []
    average, keep = recipe.checkpoints.average or 0, recipe.checkpoints.keep
    if average > keep:
        faults.append(f"checkpoints.average = {average}: only checkpoints.keep = {keep} are kept; keep {average}")
    used = [settings.name for settings in recipe.list_objectives()]
    faults += objectives.find_faults(recipe.objective, recipe.hours is not None, used)
    return [*faults, *_find_deepspeed_faults(recipe.deepspeed)]


def _find_data_faults(recipe: Recipe, lengths: Collection[int]) -> Iterator[str]:
    """Names the first phase with longer sequences than the data, and flags that make all such phases as long."""
    longest = max(lengths, default=0)  # shorter sequences are cut out of longer ones
    long = {number: phase.length for number, phase in enumerate(recipe.phases) if phase.length > longest}
    for number, length in [*long.items()][:1]:
        there, needed = ", ".join(map(str, sorted(lengths))), " ".join(map(str, sorted({*lengths, *long.values()})))
        flags = (f"--phases.{each}.length {min(longest, recipe.model.positions)}" for each in long)
        cure = f"make it with shard.py --lengths {needed}, or add {' '.join(flags)}"
        yield f"phases.{number}.length = {length}: the data has {there}; {cure}"


def find_computing_faults(settings: Computing, device: Literal["cpu", "cuda"] | None) -> list[str]:
    """Lists faults of the optimizer and the hardware, with their cures; device None: unknown."""
    faults = [*_find_hardware_faults(settings, device), *_find_same_bits_faults(settings, device)]
    return [*faults, *optimizers.find_faults(settings.optimizer)]


def _find_model_faults(recipe: Recipe) -> Iterator[str]:
    model, kind = recipe.model, architectures.find_architecture(recipe.model.architecture)
    if model.size is None and None in (model.layers, model.hidden):
        cure = "or give model.layers and model.hidden, or begin with a model that has them: --init FOLDER"
        yield f"model.size: is missing: one of {', '.join(kind.sizes)}; {cure}"
        return
    yield from architectures.find_faults(model)
    for settings in recipe.list_objectives():
        if (sees := objectives.configure_objective(settings).sees) not in kind.sees:
            able = [f'"{name}"' for name, each in objectives.objectives().items() if each.sees == kind.sees[0]]
            yield (
                f'objective.name = "{settings.name}": its pieces see {SIDES[sees]}, but in '
                f"{recipe.base_model or 'model.architecture'} ({kind.title}) they see {SIDES[kind.sees[0]]}; take "
                f"objective.name = {' or '.join(able)}"
            )
    if model.size not in (None, *kind.sizes):
        return  # so its numbers are not known
    shape = model.shape(vocabulary=1)
    if shape.hidden % shape.heads:
        below = find_divisor(shape.hidden, shape.heads)
        yield f"model.heads = {shape.heads}: does not divide model.hidden = {shape.hidden}; {below} does"
    tensor = recipe.parallel.tensor
    best = find_divisor(math.gcd(shape.heads, shape.intermediate), tensor)
    for name, value in (("heads", shape.heads), ("intermediate", shape.intermediate)):
        if value % tensor:  # vocabularies are padded
            yield f"parallel.tensor = {tensor}: does not divide model.{name} = {value}; take {best}"
    for settings in recipe.list_objectives():
        yield from _find_head_faults(recipe, objectives.configure_objective(settings), shape)


def _find_head_faults(recipe: Recipe, objective: objectives.Objective, shape: Shape) -> Iterator[str]:
    """Checks that the architecture has the heads of an objective, and that minimal pairs can be scored by them."""
    shape, name = shape.change_learning(pairs=False), show_value(objective.settings.name)
    needed = set(objective.exported_heads(shape))
    if not needed <= architectures.find_architecture(shape.architecture).heads(shape).keys():
        every = architectures.architectures().items()
        able = " or ".join(show_value(other) for other, kind in every if needed <= kind.heads(shape).keys())
        lacking = f"{show_value(shape.architecture)} has no {objective.describe_heads(shape)}"
        yield f"objective.name = {name}: {lacking}; take model.architecture = {able}"
    if recipe.evaluation.pairs and PIECE_HEAD not in objective.heads(shape):
        cause = f"a model that {objective.learns} ({name}) says of no piece how likely it is"
        yield f"evaluation.pairs = {show_value(recipe.evaluation.pairs)}: {cause}; leave it out"


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
    needed, other, why = "steps", "share", "the recipe gives neither steps nor hours, so each phase its steps"
    if total is not None:
        needed, other, why = "share", "steps", f"the recipe gives {total}, and each phase its share of them"
    if getattr(phase, other) is not None:
        cure = f"or give --phases.N.steps of each, and no {total}" if total else f"give --phases.{number}.steps"
        yield f"phases.{number}.{other} = {getattr(phase, other):g}: {why}; {cure}"
    elif getattr(phase, needed) is None:
        yield f"phases.{number}.{needed}: is missing: {why}; give --phases.{number}.{needed}"


def _find_phase_faults(recipe: Recipe, number: int, phase: Phase) -> Iterator[str]:
    at = f"phases.{number}"
    if not SHORTEST <= phase.length <= recipe.model.positions:
        there = f"the model has {recipe.model.positions} positions; take {SHORTEST} to {recipe.model.positions}"
        yield f"{at}.length = {phase.length}: {there}, or other model.positions"
    if phase.learning_rate is None and number == 0:
        yield f"{at}.learning_rate: is missing: the highest learning rate"
    for name, fact in find_facts(Phase, OfSchedule).items():
        value = getattr(phase, name)
        fault = f"{at}.{name} = {show_value(value)}: means nothing "
        if phase.learning_rate is None and number and name in phase.model_fields_set:
            yield f"{fault}without a learning_rate of the phase; remove it, or give {at}.learning_rate"
        elif fact.decays and phase.decay not in fact.decays and value != Phase.model_fields[name].default:
            users = " or ".join(map(show_value, fact.decays))
            yield f"{fault}with {at}.decay = {show_value(phase.decay)}; remove it, or take {users}"
    if recipe.schedule_owners()[number] == number:
        yield from _find_schedule_faults(recipe, number, phase)


def _find_mix_faults(recipe: Recipe, number: int, phase: Phase) -> Iterator[str]:
    """Checks the shares of corpora, without knowing the corpora."""
    for name in ("mix", "last_mix"):
        shares = getattr(phase, name)
        if shares is not None and abs(sum(shares.values()) - 1) > 1e-6:
            fault = f"the shares make {sum(shares.values()):g}; they must make 1"
            yield f"phases.{number}.{name} = {show_value(shares)}: {fault}"
    if phase.mix is not None and phase.mix_temperature is not None:
        yield f"phases.{number}.mix_temperature = {phase.mix_temperature:g}: mix is given too; keep one of them"
    if phase.last_mix is not None and recipe.hours is not None:
        fault = "the recipe goes by the clock (hours), so that nobody knows where the phase ends; leave it out"
        yield f"phases.{number}.last_mix = {show_value(phase.last_mix)}: {fault}"


def _find_schedule_faults(recipe: Recipe, number: int, phase: Phase) -> Iterator[str]:
    """Checks the warm-up and the decay of a schedule, each of which is given in steps or as a share of it."""
    at, counts, parts = f"phases.{number}", recipe.phase_steps(), dict[str, float]()
    spanned = [follower for follower, owner in enumerate(recipe.schedule_owners()) if owner == number]
    total = sum(counts[follower] for follower in spanned) if counts else 0
    warmup = f"{at}.warmup = {phase.warmup:g}"
    if phase.warmup_steps is not None and phase.warmup:
        yield f"{at}.warmup_steps = {phase.warmup_steps}: {warmup} is given too; keep one of them"
    for name, share, usual in (("warmup_steps", phase.warmup, warmup), ("decay_steps", WSD_SHARE, "the decay of wsd")):
        given = getattr(phase, name)
        if given is None:
            parts[usual] = share
            continue
        said = f"{at}.{name} = {given}"
        parts[said] = given / max(total, 1)
        if counts is None:
            yield f"{said}: the recipe goes by the clock (hours); leave it out, or give {at}.warmup, a share"
        elif total and given >= total:
            names = " and ".join(f"phases.{follower}.steps" for follower in spanned)
            yield f"{said}: the schedule has {total} steps in all ({names}); give fewer than these"
    if phase.decay == "wsd" and max(parts.values()) < 1 < sum(parts.values()) - 1e-9:
        yield f"{': and '.join(parts)} exceed the whole schedule; give less"


def _find_hardware_faults(recipe: Computing, found: Literal["cpu", "cuda"] | None) -> Iterator[str]:
    """Checks precision, ZeRO and the device; `found`: the device that `auto` takes."""
    parallel, wanted = recipe.parallel, recipe.parallel.device
    device = found if wanted == "auto" else wanted
    if wanted == "cuda" and found == "cpu":
        yield 'parallel.device = "cuda": no GPU is found here; take "auto" or "cpu", or look at nvidia-smi'
    if device == "cpu" and recipe.precision.dtype == "fp16":
        yield 'precision.dtype = "fp16": not on a CPU; take "bf16", "fp32", or "auto" for the best that there is'
    if parallel.offload != "none":
        at = f'parallel.offload = "{parallel.offload}"'
        if device == "cpu":
            yield f'{at}: a CPU has no other memory to move it to (parallel.device = "{wanted}"); take "none"'
        if parallel.zero < (least := 3 if parallel.offload == "all" else 1):
            yield f"{at}: needs parallel.zero = {least}; it is {parallel.zero}"


def _find_same_bits_faults(settings: Computing, found: Literal["cpu", "cuda"] | None) -> Iterator[str]:
    """Checks what `parallel.same_bits` needs; `found`: the device that `auto` takes."""
    parallel, precision = settings.parallel, settings.precision
    if not parallel.same_bits:
        return
    on_gpu = (found if parallel.device == "auto" else parallel.device) == "cuda"
    wrong = {
        f"needs parallel.zero = 1; it is {parallel.zero}": parallel.zero != 1,
        'not with precision.dtype = "fp16" and its scale; take "bf16" or "fp32"': precision.dtype == "fp16",
        f'not with parallel.offload = "{parallel.offload}"; take "none"': parallel.offload != "none",
        f"not with parallel.tensor = {parallel.tensor}; take 1": parallel.tensor != 1,
        "on a GPU it needs compute.deterministic = true": on_gpu and not settings.compute.deterministic,
    }
    yield from (f"parallel.same_bits = true: {fault}" for fault, is_there in wrong.items() if is_there)


def _find_mesh_faults(recipe: Recipe, ranks: int | None) -> Iterator[str]:
    """Checks what ranks that share a model need, besides its sizes."""
    parallel, tensor = recipe.parallel, recipe.parallel.tensor
    if tensor == 1:
        return
    names = [settings.name for settings in recipe.list_objectives()]
    second = [name for name in names if not objectives.objectives()[name].can_be_shared]
    wrong = {
        f"does not divide the ranks, {ranks}; start a multiple of {tensor} (for a plan: --ranks), or take 1": ranks
        and ranks % tensor,
        "not with parallel.zero = 3, which divides the same weights again; take 1 or 2": parallel.zero == 3,
        f'not with parallel.offload = "{parallel.offload}"; take "none"': parallel.offload != "none",
        f'not with the objective "{"".join(second[:1])}", which has a second model; take 1': second,
    }
    yield from (f"parallel.tensor = {tensor}: {fault}" for fault, is_there in wrong.items() if is_there)


def _find_deepspeed_faults(raw: dict[str, Any]) -> Iterator[str]:
    for key, value in _walk_table(raw):
        name, said = dotted(key), f"deepspeed.{dotted(key)} = {show_value(value)}"
        if name in OWNED:
            yield f"{said}: the other sections of the recipe decide this; remove it"
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
