"""What a recipe can say: every setting, its meaning and its limits; and the arithmetic that follows from it.

`overrides.py` reads recipes, and `conflicts.py` knows which settings do not go together. The docstring of a setting is
shown to users where the setting is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from data_prep.common.errors import UserError
from data_prep.common.sections import Count, Fraction, Positive, Section, whole
from pretraining.model.shape import SIZES, Shape
from pretraining.objectives import declaration as objectives
from pretraining.optimizers import declaration as optimizers


def _check_size(value: Any) -> Any:
    """Takes a whole number from 1 on, or "auto"; one error for both, where pydantic would have one for each."""
    number = whole(value)
    if number == "auto" or (type(number) is int and 1 <= number < 2**31):
        return number
    raise PydanticCustomError("positive_or_auto", 'a whole number of at least 1 is needed, or "auto"')


def check_licence(value: str) -> str:
    """Takes a licence as the hub spells it."""
    if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", value):
        return value
    raise PydanticCustomError("licence", LICENCE_HINT)


LICENCE_HINT: Final = (
    "a licence as the hub spells it is needed, in small letters and without spaces: apache-2.0, mit, other"
)
VOCABULARY = 30522
"""Pieces of the published models' vocabulary; assumed where there is no data."""
Dtype = Literal["bf16", "fp16", "fp32"]
Offload = Literal["none", "optimizer", "all"]
PositiveOrAuto = Annotated[Annotated[int, Field(ge=1, lt=2**31)] | Literal["auto"], BeforeValidator(_check_size)]


class Model(Section):
    """The encoder: a published size, or numbers; a number that is given beside a size takes the size's place."""

    size: Literal["tiny", "mini", "small", "medium", "base", "large"] | None = None
    """One of the published sizes."""
    layers: Positive | None = None
    """Layers of the encoder."""
    hidden: Positive | None = None
    """Width of the encoder."""
    heads: Positive | None = None
    """Attention heads (default: hidden / 64)."""
    intermediate: Positive | None = None
    """Width of the feed-forward layers (default: 4 x hidden)."""
    positions: Positive = 512
    """Positions that have an embedding: the longest sequence."""
    dropout: Fraction = 0.1
    """Share of the activations dropped after the embeddings and in each layer."""
    attention_dropout: Fraction = 0.1
    """Share of the attention probabilities dropped."""
    segments: Positive = 2
    """Kinds of segments that have an embedding: 2 for the pairs of next-sentence prediction."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    """Added to the variance in layer norms."""

    def shape(self, vocabulary: int, pairs: bool = True, objective: ObjectiveSettings | None = None) -> Shape:
        """Works out the sizes for a vocabulary of so many pieces; `pairs` says whether the data has pairs."""
        given, objective = self.model_dump(exclude={"size"}, exclude_none=True), objective or Objective()
        learns = objectives.configure_objective(objective)
        layers, hidden = SIZES[self.size] if self.size else (0, 0)
        hidden = self.hidden or hidden
        sizes = {"layers": layers, "hidden": hidden, "heads": max(1, hidden // 64), "intermediate": 4 * hidden}
        has_pairs = pairs and learns.pairs != "unused"
        values = {**sizes, **given, "objective": objective.name, "pairs": has_pairs, "sees": learns.sees}
        return Shape(vocabulary=vocabulary, **values)


class Data(Section):
    """The shards, whose folder is given as --data."""

    allow_other: bool = False
    """Continue a run on other text than its checkpoint was made from, with the same vocabulary."""


if TYPE_CHECKING:
    from data_prep.shards import Manifest
    from pretraining.objectives.declaration import ObjectiveSettings
    from pretraining.optimizers.declaration import OptimizerSettings

    Objective = ObjectiveSettings
    Optimizer = OptimizerSettings
else:
    Objective = objectives.all_settings(__name__)
    """The settings of all objectives, which lie with them."""
    Optimizer = optimizers.all_settings(__name__)
    """The settings of all optimizers, likewise."""


class Precision(Section):
    """In which numbers the model computes. Gradients accumulate in fp32, and the weights are kept in fp32."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto`: bf16 where the hardware has it, otherwise fp16 on a GPU and fp32 on a CPU."""
    loss_scale_power: Annotated[int, Field(ge=0, le=32), BeforeValidator(whole)] = 16
    """fp16: the loss is first scaled by 2 to this power."""
    loss_scale_window: Positive = 1000
    """fp16: steps without overflow after which the scale doubles."""
    loss_scale_min: Annotated[float, Field(gt=0)] = 1.0
    """fp16: the scale never falls below."""
    tf32: bool = False
    """fp32 on a GPU: let matrix products round what they multiply to the 10 bits of TF32, which is faster."""


class Parallel(Section):
    """How the ranks share the work. Their number comes from the launcher."""

    zero: Annotated[int, Field(ge=0, le=3), BeforeValidator(whole)] = 1
    """ZeRO stage: 1 divides the optimizer's state among the ranks, 2 the gradients too, 3 the weights too."""
    offload: Offload = "none"
    """What lives in the host's memory instead of the GPU's; `all` is optimizer and weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU of the rank where there is one."""


class Compute(Section):
    """How the arithmetic is done: faster or slower, the same but for rounding and the draws of dropout."""

    compile: bool = False
    """Compile the layers with torch.compile, which replaces our own kernels there; on a CPU these are faster."""
    checkpoint_activations: bool = False
    """Compute the layers again in the backward pass instead of keeping their activations."""
    kernels: Literal["auto", "torch"] = "auto"
    """`auto`: our fused operations, on a GPU where Triton can compile them; `torch`: torch's own alone."""
    deterministic: bool = False
    """Take only operations that give the same bits every time: slower on a GPU; on a CPU all of them do anyway."""
    threads: Positive | None = None
    """CPU threads of a rank (default: the cores divided by the ranks of this machine)."""


class Phase(Section):
    """A stretch of training on sequences of one length.

    A phase with a `learning_rate` starts a schedule. A phase without one goes on in the schedule of the phase before
    it, which then spans the steps of both.
    """

    name: Annotated[str, Field(min_length=1)]
    """What logs and checkpoints call it."""
    length: Positive
    """Length of the sequences, at most the longest of the data; one that it lacks is cut out of the next longer."""
    batch: Positive
    """Sequences of a step, over all ranks."""
    micro_batch: PositiveOrAuto
    """Sequences that a rank computes at a time, or "auto": the most that fit; batch is made of these."""
    steps: Positive | None = None
    """Optimizer steps."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the recipe's `steps` or `hours`, instead of steps."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Highest learning rate."""
    warmup: Fraction = 0.0
    """Share of the schedule in which the rate grows to its highest."""
    warmup_steps: Count | None = None
    """Steps of the warm-up, instead of its share."""
    decay: Literal["linear", "polynomial", "cosine", "constant", "wsd"] = "linear"
    """What follows the warm-up; `wsd` is constant and then linear. A recipe with `hours` goes by the clock."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the polynomial decay: (what is left of the schedule) to this power."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate at the end, as a share of the highest."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the schedule in which the rate of `wsd` falls."""
    new_positions: Literal["drawn", "copied"] = "drawn"
    """How positions begin that no phase before has trained: `drawn` with all weights at the start, as in the paper, or
    `copied` from those before them, so that what is known of neighbours holds for them at once."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Where the decay counts from; `start` as the original BERT and NVIDIA's: the warm-up hides its first part."""


SCHEDULE_KEYS = ("warmup", "warmup_steps", "decay", "power", "final", "decay_share", "decay_from")
"""Settings that a phase may only have together with a `learning_rate`."""


class Evaluation(Section):
    """Validation on the documents held out; at the end of each phase in any case."""

    every: Count = 1000
    """Steps between evaluations; 0: at the end of phases alone."""
    examples: Count = 4096
    """Examples of an evaluation, over all ranks; 0: all there are."""
    pairs: Annotated[str, Field(min_length=1)] | None = None
    """File of minimal pairs, as run_pairs.py takes it, of which 20 a paradigm are asked at the ends of phases."""


class Logging(Section):
    """What is written while the run goes on."""

    every: Positive = 10
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Write TensorBoard's files beside metrics.jsonl."""
    peak_flops: Annotated[float, Field(gt=0)] | None = None
    """Operations a second of one rank that count as 100% utilisation (default: measured at the start)."""


class Checkpoints(Section):
    """When the state of the run is saved; at the end of each phase in any case."""

    every: Count = 1000
    """Steps between checkpoints; 0: at the end of phases alone."""
    keep: Positive = 3
    """How many checkpoints are kept; the newest are."""
    keep_every: Count = 0
    """Checkpoints of steps that divide by it are kept too; 0: none."""


class Card(Section):
    """What the model card says that nothing else tells."""

    licence: Annotated[str, AfterValidator(check_licence)] | None = None
    """Licence of the model, as the hub spells it: apache-2.0, mit, cc-by-sa-4.0 (default: not specified)."""


class Guards(Section):
    """What is done when training goes wrong."""

    rollbacks: Count = 3
    """How often a run goes back to its last checkpoint, and leaves out the batches that did it, before it gives up."""
    spike: Annotated[float, Field(ge=0)] = 2.0
    """A logged loss that is so much above the median of the last 20 has gone wrong; 0: never."""
    hang: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without any progress after which the run ends, naming the rank that the others wait for."""


class Computing(Section):
    """The sections that settings of pre-training and of fine-tuning share."""

    optimizer: Optimizer = Optimizer()
    """What turns gradients into weights."""
    precision: Precision = Precision()
    """In which numbers the model computes."""
    parallel: Parallel = Parallel()
    """How the ranks share the work."""
    compute: Compute = Compute()
    """How the arithmetic is done."""


class Recipe(Computing):
    """All that decides how a model is trained."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 12345
    """Decides the weights at the start, the order of the data, and dropout."""
    steps: Positive | None = None
    """Steps of all phases, where these give shares."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of all phases, where these give shares: phases and learning rate then go by the clock."""
    base_model: Annotated[str, Field(min_length=1)] | None = None
    """The model whose weights a run begins with, and which gives the sizes: a folder of transformers, a run, a
    checkpoint, or a name on the Hugging Face hub. `--init` is short for it."""
    objective: Objective = Objective()
    """What the model learns by."""
    model: Model = Model()
    """The encoder."""
    data: Data = Data()
    """The shards."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """The stretches of training, in their order."""
    evaluation: Evaluation = Evaluation()
    """Validation."""
    logging: Logging = Logging()
    """What is written."""
    checkpoints: Checkpoints = Checkpoints()
    """When the state is saved."""
    guards: Guards = Guards()
    """What is done when training goes wrong."""
    card: Card = Card()
    """What the model card says that nothing else tells."""
    deepspeed: dict[str, Any] = Field(default={})
    """Settings of DeepSpeed's own, for what the recipe has no name for."""

    def shape(self, manifest: Manifest | None) -> Shape:
        """The sizes of the model, with the heads that this data can train; without data, the published vocabulary."""
        if manifest is None:
            return self.model.shape(VOCABULARY, objective=self.objective)
        return self.model.shape(manifest.vocabulary_size, manifest.has_pairs, self.objective)

    def phase_steps(self) -> tuple[int, ...] | None:
        """The steps of the phases; None where the clock decides."""
        if self.hours is not None:
            return None
        if self.steps is None:
            return tuple(phase.steps or 0 for phase in self.phases)
        ends = [round(self.steps * share) for share in _sum_running([phase.share or 0.0 for phase in self.phases])]
        return tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True))

    def phase_seconds(self) -> tuple[float, ...] | None:
        """The seconds of the phases; None where steps decide."""
        return None if self.hours is None else tuple(3600 * self.hours * (phase.share or 0.0) for phase in self.phases)

    def schedule_owners(self) -> tuple[int, ...]:
        """The number of the phase whose schedule a phase follows, for every phase."""
        owners: list[int] = []
        for number, phase in enumerate(self.phases):
            owners.append(number if phase.learning_rate is not None or not owners else owners[-1])
        return tuple(owners)

    def as_dict(self) -> dict[str, Any]:
        """All settings but those of the schedule in phases that have none of their own."""
        content = super().as_dict()
        for phase, given in zip(content["phases"], self.phases, strict=True):
            if given.learning_rate is None:  # it follows the schedule of another
                for name in SCHEDULE_KEYS:
                    phase.pop(name, None)
        return content


def _sum_running(values: Sequence[float]) -> list[float]:
    sums = [sum(values[: count + 1]) for count in range(len(values))]
    return [*sums[:-1], 1.0] if values else []  # the shares of a recipe make 1, whatever the rounding


def count_micro_batches(phase: Phase, ranks: int, number: int = 0, found: int = 1) -> int:
    """Counts the micro-batches that a rank accumulates in a step; UserError where the batch does not divide.

    `found` is the micro-batch where the phase has "auto"; by default one sequence.
    """
    micro_batch = found if phase.micro_batch == "auto" else phase.micro_batch
    together = micro_batch * ranks
    if phase.batch % together == 0:
        return phase.batch // together
    below = phase.batch // together * together
    nearest = below if below and phase.batch - below <= below + together - phase.batch else below + together
    by, cure = f"{ranks} rank{'s' * (ranks > 1)}", f"take batch = {nearest}"
    if phase.micro_batch != "auto":
        by += f" x phases.{number}.micro_batch = {micro_batch}"
        if phase.batch % ranks == 0:
            cure += f", or micro_batch = {find_divisor(phase.batch // ranks, micro_batch)}"
    raise UserError(f"phases.{number}.batch = {phase.batch}: does not divide by {by}; {cure}")


def find_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is not above the limit."""
    return max(divisor for divisor in list_divisors(number) if divisor <= limit)


def list_divisors(number: int) -> list[int]:
    """All divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
