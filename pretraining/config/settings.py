"""The settings of a recipe with their meaning and limits, and the arithmetic of steps and batches.

`overrides.py` reads recipes, `conflicts.py` finds contradictory settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from data_prep.common.errors import UserError
from data_prep.common.sections import (
    Count,
    Fraction,
    InsteadOf,
    May,
    Positive,
    Removed,
    Section,
    ShortFlag,
    find_facts,
    whole,
)
from pretraining.architectures import declaration as architectures
from pretraining.model.shape import ARCHITECTURE, OBJECTIVE, Shape
from pretraining.objectives import declaration as objectives
from pretraining.optimizers import declaration as optimizers


def _check_size(value: Any) -> Any:
    """Accepts a whole number from 1 on, or "auto"; raises one error for both, where pydantic would raise two."""
    number = whole(value)
    if number == "auto" or (type(number) is int and 1 <= number < 2**31):
        return number
    raise PydanticCustomError("positive_or_auto", 'a whole number of at least 1 is needed, or "auto"')


Dtype = Literal["bf16", "fp16", "fp32"]
Offload = Literal["none", "optimizer", "all"]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveOrAuto = Annotated[Annotated[int, Field(ge=1, lt=2**31)] | Literal["auto"], BeforeValidator(_check_size)]

WSD_SHARE = 0.1
"""Share of a schedule in which the learning rate of `wsd` falls by default: 10% suffice (Hägele et al., 2024)."""


@dataclass(frozen=True)
class OfSchedule:
    """Fact about a setting of a phase: it goes with a `learning_rate`, and counts under these kinds of decay (default:
    all)."""

    decays: tuple[str, ...] = ()


if TYPE_CHECKING:
    from data_prep.shards import Manifest
    from pretraining.architectures.declaration import ModelSettings
    from pretraining.data.corpora import Corpora
    from pretraining.data.mixing import Mixture
    from pretraining.objectives.declaration import ObjectiveSettings
    from pretraining.optimizers.declaration import OptimizerSettings

    Model = ModelSettings
    Objective = ObjectiveSettings
    Optimizer = OptimizerSettings
    ObjectiveName = str
else:
    ObjectiveName = Literal[tuple(objectives.objectives())]
    Model = architectures.join_all_settings(__name__)
    """The settings of all architectures, defined in their files."""
    Objective = objectives.join_all_settings(__name__)
    """The settings of all objectives, likewise."""
    Optimizer = optimizers.join_all_settings(__name__)
    """The settings of all optimizers, likewise."""


class Precision(Section):
    """The precision of the computation. Gradients accumulate in fp32, and the weights are kept in fp32."""

    removed: ClassVar = {
        "loss_scale_power": Removed(16, "a scale that is too large halves within a few steps"),
        "loss_scale_window": Removed(1000, "the scale of fp16 adapts by itself"),
        "loss_scale_min": Removed(1.0, "the scale of fp16 adapts by itself"),
        "tf32": Removed(False, "bf16 is faster, and as good"),
    }
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto`: bf16 where the hardware has it, otherwise fp16 on a GPU and fp32 on a CPU."""


class Parallel(Section):
    """How the ranks share the work. Their number comes from the launcher."""

    zero: Annotated[int, Field(ge=0, le=3), BeforeValidator(whole)] = 1
    """ZeRO stage: 1 divides the optimizer's state among the ranks, 2 the gradients too, 3 the weights too."""
    tensor: Positive = 1
    """Ranks that share a model: each holds a part of every matrix. The other ranks read other data."""
    across_nodes: bool = False
    """Let ranks that share a model be on several machines, between which the sums of every layer are slow."""
    offload: Offload = "none"
    """State that is kept in the host's memory instead of the GPU's; `all` is optimizer and weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU of the rank where there is one."""
    same_bits: bool = False
    """Train to the same bits on any number of ranks (ZeRO 1, not fp16)."""


class Compute(Section):
    """How the arithmetic is done: affects speed, rounding and the draws of dropout only."""

    removed: ClassVar = {
        "kernels": Removed("auto", "our kernels compute where they can be compiled"),
        "compile": Removed(False, "our own kernels are as fast on GPUs and faster on CPUs"),
    }
    checkpoint_activations: bool = False
    """Compute the layers again in the backward pass instead of keeping their activations."""
    attention: Literal["auto", "flash", "own"] = "auto"
    """16-bit attention on a GPU: PyTorch's `flash` kernels, or our `own`, whose dropout is that of a CPU, up to 512
    pieces. `auto` takes the faster, today `flash`."""
    deterministic: bool = False
    """Use only deterministic operations: slower on a GPU; on a CPU all are deterministic anyway."""
    graphs: Literal["auto", "off"] = "auto"
    """Run the optimizer's step on a GPU as one CUDA graph (ZeRO 0 and 1, not in fp16); `auto` falls back to single
    launches."""
    threads: Positive | None = None
    """CPU threads of a rank (default: the cores divided by the ranks of this machine)."""


class Phase(Section):
    """A stretch of training on sequences of one length.

    A phase with a `learning_rate` starts a new schedule. Without one, the schedule of the phase before covers this
    phase's steps too.
    """

    removed: ClassVar = {"decay_share": Removed(WSD_SHARE, "give decay_steps")}
    name: Annotated[str, Field(min_length=1)]
    """Name in logs and checkpoints."""
    length: Positive
    """Length of the sequences, at most the longest of the data; a missing length is cut out of the next longer."""
    batch: Positive
    """Sequences of a step, over all ranks."""
    micro_batch: PositiveOrAuto
    """Sequences that a rank computes at a time, or "auto": the most that fit; batch is made of these."""
    objective: ObjectiveName | None = None
    """Training objective of this phase, with the settings of [objective] (default: its `name`)."""
    steps: Annotated[Positive | None, InsteadOf(("share",))] = None
    """Optimizer steps."""
    share: Annotated[Annotated[float, Field(gt=0, le=1)] | None, InsteadOf(("steps",))] = None
    """Share of the recipe's `steps` or `hours`, instead of steps."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Highest learning rate."""
    warmup: Annotated[Fraction, InsteadOf(("warmup_steps",)), OfSchedule()] = 0.0
    """Share of the schedule in which the learning rate rises to its highest."""
    warmup_steps: Annotated[Count | None, InsteadOf(("warmup",)), OfSchedule()] = None
    """Steps of the warm-up, instead of its share."""
    decay: Annotated[Literal["linear", "polynomial", "cosine", "constant", "wsd"], OfSchedule()] = "linear"
    """Decay after the warm-up; `wsd` is constant and then linear. A recipe with `hours` goes by the clock."""
    power: Annotated[float, Field(gt=0), OfSchedule(("polynomial",))] = 1.0
    """Exponent of the polynomial decay: (remaining share of the schedule) to this power."""
    final: Annotated[float, Field(ge=0, le=1), OfSchedule(("linear", "polynomial", "cosine", "wsd"))] = 0.0
    """Learning rate at the end, as a share of the highest."""
    decay_steps: Annotated[Count | None, OfSchedule(("wsd",))] = None
    """Last steps, in which the learning rate of `wsd` falls (default: a tenth of the schedule)."""
    new_positions: Literal["drawn", "copied"] = "drawn"
    """First embeddings of positions that no earlier phase trained: `drawn` at random, as in the paper, or `copied` from
    trained positions."""
    mix: Annotated[dict[str, Share] | None, InsteadOf(("mix_temperature",))] = None
    """Shares of the sequences by corpus of --data: { wiki = 0.7, books = 0.3 }; others are not read (default: by
    numbers of examples)."""
    last_mix: dict[str, Share] | None = None
    """Shares at the end of the phase; they move linearly (default: they stay)."""
    mix_temperature: Annotated[Share | None, InsteadOf(("mix",))] = None
    """Shares by numbers of examples to this power; 0: all alike."""
    decay_from: Annotated[Literal["warmup", "start"], OfSchedule(("linear", "polynomial", "cosine"))] = "warmup"
    """Where decay begins; with `start` (original BERT, NVIDIA), the warm-up replaces the decay's first part."""

    def mixture(self, corpora: Corpora) -> Mixture:
        """Returns the corpora that the phase reads, with their shares."""
        from pretraining.data.mixing import Mixture  # loads NumPy and Arrow, which status.py does without

        return Mixture.choose(corpora, self.length, self.mix, self.last_mix, self.mix_temperature)


class Evaluation(Section):
    """Validation on the documents held out; at the end of each phase in any case."""

    every: Count = 1000
    """Steps between evaluations; 0: at the end of phases alone."""
    examples: Count = 4096
    """Examples of an evaluation, over all ranks; 0: all there are."""
    pairs: Annotated[str, Field(min_length=1)] | None = None
    """File of minimal pairs, as for run_pairs.py, of which 20 a paradigm are scored at the ends of phases."""
    retrieval: Annotated[str, Field(min_length=1)] | None = None
    """Folder of queries and passages, as for evaluate.py, that the model is scored on at the ends of phases."""


class Logging(Section):
    """What is logged during the run."""

    every: Positive = 10
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Write the files that `tensorboard --logdir runs` shows."""
    peak_flops: Annotated[float, Field(gt=0)] | None = None
    """Operations a second of one rank that count as 100% utilisation (default: measured at the start)."""


class Checkpoints(Section):
    """When the state of the run is saved; at the end of each phase in any case."""

    removed: ClassVar = {"keep_every": Removed(0, "list the steps as keep_at, or keep more")}
    every: Count = 1000
    """Steps between checkpoints; 0: at the end of phases alone."""
    keep: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_at: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None
    """Also save after these steps, and keep those checkpoints: [1000, 20000]."""

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return (bool(self.every) and step % self.every == 0) or self.keeps(step)

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step is kept however old it is."""
        return step in (self.keep_at or ())


class RunCheckpoints(Checkpoints):
    """When the state of the run is saved, at the end of each phase in any case, and what is averaged at its end."""

    average: Annotated[int, Field(ge=2)] | None = None
    """Number of last checkpoints whose mean weights are also exported, and compared with the last (default: none)."""


class Card(Section):
    """Entries of the model card that follow from nothing else."""

    licence: str | None = None
    """Licence of the model, as the hub spells it: apache-2.0, mit, cc-by-sa-4.0 (default: not specified)."""


class Guards(Section):
    """What is done when training diverges or hangs."""

    rollbacks: Count = 3
    """How often a run returns to its last checkpoint and skips the batches concerned, before it gives up."""
    spike: Annotated[float, Field(ge=0)] = 2.0
    """Training has diverged if a logged loss is this much above the median of the last 20 of the phase (at least 10);
    0: never."""
    hang: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without progress after which the run ends, naming the rank that the others wait for."""


class Computing(Section):
    """The sections that settings of pre-training and of fine-tuning share."""

    optimizer: Optimizer = Optimizer()
    """How gradients change the weights."""
    precision: Precision = Precision()
    """The precision of the computation."""
    parallel: Annotated[Parallel, May.CHANGE_BETWEEN_STARTS] = Parallel()
    """How the ranks share the work."""
    compute: Annotated[Compute, May.CHANGE_BETWEEN_STARTS] = Compute()
    """How the arithmetic is done."""


class Recipe(Computing):
    """All that decides how a model is trained."""

    removed: ClassVar = {"data": Removed({"allow_other": False}, "other text is for a branch (--branch RUN)")}
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 12345
    """Decides the weights at the start, the order of the data, and dropout."""
    steps: Annotated[Positive | None, InsteadOf(("hours",))] = None
    """Total steps, if phases have a `share`."""
    hours: Annotated[Annotated[float, Field(gt=0)] | None, InsteadOf(("steps",))] = None
    """Total hours, if phases have a `share`: phases and learning rate then follow the clock."""
    base_model: Annotated[Annotated[str, Field(min_length=1)] | None, ShortFlag("init")] = None
    """The model whose weights and sizes a run begins with: a folder of transformers, a run, a checkpoint, or a name
    on the Hugging Face hub. `--init` is short for it."""
    objective: Objective = Objective()
    """The training objective."""
    model: Model = Model()
    """The encoder."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """The phases of training, in order."""
    evaluation: Annotated[Evaluation, May.CHANGE_BETWEEN_STARTS] = Evaluation()
    """Validation."""
    logging: Annotated[Logging, May.CHANGE_BETWEEN_STARTS] = Logging()
    """What is logged."""
    checkpoints: Annotated[RunCheckpoints, May.CHANGE_BETWEEN_STARTS] = RunCheckpoints()
    """When the state is saved, and what is averaged at the end."""
    guards: Annotated[Guards, May.CHANGE_BETWEEN_STARTS] = Guards()
    """What is done when training diverges or hangs."""
    card: Card = Card()
    """Entries of the model card that follow from nothing else."""
    deepspeed: Annotated[dict[str, Any], May.CHANGE_BETWEEN_STARTS] = Field(default={})
    """Settings of DeepSpeed's own, for what the recipe has no name for."""

    def shape(self, manifest: Manifest | None) -> Shape:
        """Computes the sizes of the model with the heads that this data can train; without data, for the published
        vocabulary."""
        kind, has_pairs = architectures.find_architecture(self.model.architecture), not manifest or manifest.has_pairs
        shape = self.model.shape(manifest.vocabulary_size if manifest else kind.vocabulary)
        learning = objectives.configure_objective(self.objective).learning(has_pairs and kind.learns_pairs(shape))
        return replace(shape, learns=learning)

    def in_phase(self, phase: Phase) -> Recipe:
        """Returns the recipe with the objective of a phase as that of all."""
        if phase.objective is None:
            return self
        return self.model_copy(update={"objective": self.objective.model_copy(update={"name": phase.objective})})

    def list_objectives(self) -> list[ObjectiveSettings]:
        """Lists the settings of the objectives that phases have, each once."""
        used = [self.in_phase(phase).objective for phase in self.phases] or [self.objective]
        return list({each.name: each for each in used}.values())

    def objective_steps(self, number: int) -> tuple[int, int] | None:
        """Steps of the phases with the objective of phase `number`: before it, and in all; None by the clock."""
        if (steps := self.phase_steps()) is None:
            return None
        names = [self.in_phase(phase).objective.name for phase in self.phases]
        same = [count * (name == names[number]) for name, count in zip(names, steps, strict=True)]
        return sum(same[:number]), sum(same)

    def phase_steps(self) -> tuple[int, ...] | None:
        """Steps of the phases; None by the clock."""
        if self.hours is not None:
            return None
        if self.steps is None:
            return tuple(phase.steps or 0 for phase in self.phases)
        shares = accumulate(phase.share or 0.0 for phase in self.phases[:-1])
        ends = [*(round(self.steps * share) for share in shares), self.steps]  # shares make 1, whatever the rounding
        return tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True))

    def phase_seconds(self) -> tuple[float, ...] | None:
        """Seconds of the phases; None if steps are given."""
        return None if self.hours is None else tuple(3600 * self.hours * (phase.share or 0.0) for phase in self.phases)

    def schedule_owners(self) -> tuple[int, ...]:
        """For each phase, the number of the phase whose schedule it follows."""
        owners: list[int] = []
        for number, phase in enumerate(self.phases):
            owners.append(number if phase.learning_rate is not None or not owners else owners[-1])
        return tuple(owners)

    def as_dict(self) -> dict[str, Any]:
        """Returns all settings, without those of the schedule in phases that have none of their own."""
        content = super().as_dict()
        model = content["model"]
        own = architectures.find_architecture(model["architecture"]).settings_type.model_fields
        content["model"] = {name: value for name, value in model.items() if name in own}
        if model["architecture"] == ARCHITECTURE:
            del content["model"]["architecture"]  # so that older versions read it
        kinds = [OBJECTIVE, *(settings.name for settings in self.list_objectives())]
        learned = {name for kind in kinds for name in objectives.objectives()[kind].settings_type.model_fields}
        content["objective"] = {name: value for name, value in content["objective"].items() if name in learned}
        for phase, given in zip(content["phases"], self.phases, strict=True):
            if given.learning_rate is None:  # it follows the schedule of another
                for name in find_facts(Phase, OfSchedule):
                    phase.pop(name, None)
        return content


def count_micro_batches(phase: Phase, ranks: int, number: int = 0, found: int = 1, uneven: bool = False) -> int:
    """Counts the micro-batches that a rank accumulates in a step; raises UserError if the batch does not divide.

    `found`: the micro-batch if the phase has "auto"; by default one sequence. `uneven`: a rank may have fewer.
    """
    micro_batch = found if phase.micro_batch == "auto" else phase.micro_batch
    if uneven:
        return -(-count_micro_batches(phase, 1, number, found) // ranks)
    together = micro_batch * ranks
    if phase.batch % together == 0:
        return phase.batch // together
    by = f"{ranks} rank{'s' * (ranks > 1)}"
    if phase.micro_batch != "auto":
        by += f" x phases.{number}.micro_batch = {micro_batch}"
    fits = max(1, phase.batch // together) * together
    raise UserError(f"phases.{number}.batch = {phase.batch}: does not divide by {by}; take batch = {fits}")


def find_divisor(number: int, limit: int) -> int:
    """Finds the largest divisor of a number up to a limit."""
    return max(divisor for divisor in list_divisors(number) if divisor <= limit)


def list_divisors(number: int) -> list[int]:
    """Lists all divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
