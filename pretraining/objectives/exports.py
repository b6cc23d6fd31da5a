"""What an objective exports: the logits that transformers must compute too, and what a model card says of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pretraining.model.shape import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from pretraining.model.batch import PretrainingBatch
    from pretraining.model.encoder import PretrainingModel


class ObjectiveExports(ABC):
    """The part of an objective that an exported folder follows from."""

    named_in_config: ClassVar[bool] = False
    """whether config.json of an export names it, because its class in transformers fits another objective too"""
    reading: ClassVar[str] = ""
    """how to read the logits of its exports, if that is unusual"""
    tag: ClassVar[str] = "feature-extraction"
    """the task of such models on the hub"""
    loads_as: ClassVar[str]
    """the class of transformers that loads the model with its predictions"""
    learns: ClassVar[str]
    """what its model does, for messages: a model that …"""

    def __init_subclass__(cls) -> None:
        """Resets what a parent says of the use of its exports: the subclass predicts something else."""
        for name in {"reading", "tag", "loading_remark"} - {*vars(cls)}:
            setattr(cls, name, vars(ObjectiveExports)[name])

    @abstractmethod
    def logits(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Computes the logits of the exported heads by display names, from the states of `needed_pieces`."""

    @abstractmethod
    def pick_their_logits(self, output: Any, chosen: Tensor) -> dict[str, Tensor]:
        """Picks the same logits from the output of transformers for one sequence with these predicted pieces."""

    @abstractmethod
    def describe_heads(self, shape: Shape) -> str:
        """Describes its heads for the model card and messages: an encoder with its …"""

    def auto_class(self, shape: Shape) -> str:  # noqa: ARG002
        """Returns the AutoModel class of transformers that loads all exported heads."""
        return self.loads_as

    def loading_remark(self, shape: Shape) -> str | None:  # noqa: ARG002
        """Returns the model card's remark about loading, by default of a class that another objective has named."""
        return None if "loads_as" in vars(type(self)) else f"The class is another model's: this one {self.learns}."
