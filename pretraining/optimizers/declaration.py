"""The declaration of an optimizer. Every other file of this folder is an optimizer, and `find_optimizer` finds it.

    class Lion(Optimizer):
        title = summary = "Lion"
        state = ("average",)             # fp32 numbers for each weight
        traffic = 26                     # bytes through memory for each parameter

        def update(self, role, weight, gradient, state, step, settings):
            change = state["average"].lerp(gradient, 1 - settings.betas[0]).sign_()
            state["average"].lerp_(gradient, 1 - settings.betas[1])
            return change

    OPTIMIZER = Lion()

is a whole `pretraining/optimizers/lion.py`, and no other code changes: recipes accept `optimizer.name = "lion"`,
checkpoints keep its state, and `--check` counts it (`make recipes-page` writes its name into docs/recipes.md). `update`
gets the role of every weight, so that it can treat embeddings differently; with `whole_matrices = True` it gets
whole matrices under every ZeRO stage, with query, key and value one by one, as in `muon.py`. Settings of its own are a
class that derives from `OptimizerSettings`, as in `lamb.py`. Nothing here loads PyTorch: an optimizer that needs more
than the methods of tensors has a file of the same name in `steps/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from data_prep.common.sections import Fraction, NamedSection, declared_in, foreign_values, joined_settings
from pretraining.model.shape import Role

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor]

DEFAULT = "adamw"


class OptimizerSettings(NamedSection):
    """What turns gradients into weights. Decay never falls on biases and norms."""

    name: str = DEFAULT
    """The algorithm."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the averages of the gradient and of its square."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the root of the second average."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled decay of the weights."""
    bias_correction: bool = True
    """Correct the averages for their start at zero; the original BERT does not."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient, over all weights; 0 leaves it as it is."""


class Optimizer:
    """The declaration of an optimizer."""

    title: ClassVar[str]
    """its name in sentences"""
    summary: ClassVar[str]
    """its name and its purpose, for the table of settings"""
    settings: ClassVar[type[OptimizerSettings]] = OptimizerSettings
    """the settings of all optimizers, and its own"""
    state: ClassVar[tuple[str, ...]]
    """names of the fp32 numbers that it keeps for each weight; files of checkpoints begin with these names"""
    traffic: ClassVar[int]
    """bytes read and written for each parameter in a step. AdamW has 34: 8 for the weight, 8 to read the gradient twice
    (for its norm, then the step), 16 for two averages, 2 for the copy in 16 bits"""
    whole_matrices: ClassVar[bool] = False
    """whether `update` needs whole parameters under every ZeRO stage"""

    @property
    def state_bytes(self) -> int:
        """The bytes of its state for each parameter."""
        return 4 * len(self.state)

    def facts(self, settings: OptimizerSettings) -> list[str]:
        """Lists its settings for the model card, without clipping."""
        return [
            f"betas {settings.betas[0]:g} and {settings.betas[1]:g}",
            f"epsilon {settings.epsilon:g}",
            f"weight decay {settings.weight_decay:g}, not of biases and norms",
            "bias correction" if settings.bias_correction else "no bias correction",
        ]

    def update(
        self, role: Role, weight: Tensor, gradient: Tensor, state: State, step: Tensor, settings: OptimizerSettings
    ) -> Tensor:
        """Returns the update, without learning rate and decay, that is subtracted from a weight; moves the state in
        place.

        With `whole_matrices` all tensors have the shape of the parameter, otherwise they are flat stretches of it.
        `role` is that of the weight; of a weight with several parts, whole matrices are the parts one by one: query,
        key and value. The gradient is clipped already. `step` is a tensor on the device of the weights, and counts
        from 1. Tensors are fp32, and matrix products are in the type of the model's, as under `torch.autocast`;
        in fp32 where the optimizer is offloaded.
        """
        raise NotImplementedError


@lru_cache
def optimizers() -> dict[str, Optimizer]:
    """Finds all optimizers, by their names in recipes."""
    return declared_in(__file__, __package__, "OPTIMIZER")


def find_optimizer(settings: OptimizerSettings) -> Optimizer:
    """Finds the optimizer that the settings name."""
    return optimizers()[settings.name]


def join_all_settings(module: str) -> type[OptimizerSettings]:
    """Makes a class `Optimizer` of this module with the settings of all optimizers."""
    meaning = "The algorithm: " + ", or ".join(kind.summary for kind in optimizers().values()) + "."
    return joined_settings("Optimizer", OptimizerSettings, _settings_of_all(), DEFAULT, meaning, module)


def _settings_of_all() -> dict[str, type[OptimizerSettings]]:
    return {name: kind.settings for name, kind in optimizers().items()}


def find_faults(settings: OptimizerSettings) -> Iterator[str]:
    """Yields the settings of other optimizers."""
    return foreign_values("optimizer", settings, OptimizerSettings, _settings_of_all())


def describe_settings(settings: OptimizerSettings) -> str:
    """Describes the algorithm with its settings, for the model card."""
    kind = find_optimizer(settings)
    facts = [*kind.facts(settings), *([f"gradients clipped to a norm of {settings.clip:g}"] if settings.clip else [])]
    return f"{kind.title}; {'; '.join(facts)}"
