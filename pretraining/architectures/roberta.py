"""RoBERTa: BERT with one segment, and with names and task heads of its own in transformers.

transformers numbers its positions from the id of the padding piece + 1: from 2 with RoBERTa's own vocabulary. Ours
begin at 0 as everywhere; the rows before the first position exist in folders alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pretraining.architectures.bert import Bert
from pretraining.architectures.declaration import name_classes
from pretraining.architectures.weights import TaskHead, Weight, declare_linear
from pretraining.model.shape import HEAD, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from data_prep.vocabulary.vocabulary import Special


FIRST, POSITIONS = "first_position", Bert.config_names["positions"]


@dataclass(frozen=True)
class RobertaShape(Shape):
    """The sizes of RoBERTa."""

    first_position: int = 2
    """the number of the first position in transformers"""


class Roberta(Bert):
    """RoBERTa as published."""

    title = "RoBERTa"
    shape_type = RobertaShape
    config_marks = ("bos_token_id", "eos_token_id")
    defaults: ClassVar = {"segments": 1, "epsilon": 1e-5}
    sizes: ClassVar = {name: Bert.sizes[name] for name in ("base", "large")}
    vocabulary = 50265
    model_type, class_prefix, trunk = "roberta", "Roberta", "roberta."
    classes: ClassVar = name_classes("Roberta", "MaskedLM", "CausalLM")
    head_prefixes = ("roberta.pooler.", "lm_head.", "classifier.", "qa_outputs.")
    untrained = ("roberta.pooler.",)
    piece_names = ("lm_head.bias", "lm_head.dense", "lm_head.layer_norm")
    copies: ClassVar = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def embeddings(self, shape: Shape) -> list[Weight]:
        assert isinstance(shape, RobertaShape)
        first = {"positions": shape.first_position}
        return [replace(weight, before=first.get(weight.rows or "", 0)) for weight in super().embeddings(shape)]

    def heads(self, shape: Shape) -> dict[str, list[Weight]]:
        return {name: weights for name, weights in super().heads(shape).items() if name != "next_head"}

    def task_head(self, shape: Shape, head: TaskHead) -> list[Weight]:
        if head.kind not in ("classes", "labels", "score"):
            return super().task_head(shape, head)
        pooler = declare_linear("pooler", ["classifier.dense"], shape.hidden, shape.hidden, HEAD)
        return [*pooler, *declare_linear("head", ["classifier.out_proj"], head.outputs, shape.hidden, HEAD)]

    def config(self, shape: Shape) -> dict[str, Any]:
        assert isinstance(shape, RobertaShape)
        return {**super().config(shape), POSITIONS: shape.positions + shape.first_position}

    def adapt_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        positions, padding = config.get(POSITIONS, 512), config.get("pad_token_id", 1)
        if not isinstance(positions, int) or not isinstance(padding, int):
            return config
        return {**config, FIRST: padding + 1, POSITIONS: positions - padding - 1}

    def fit_vocabulary(self, shape: Shape, special: Special) -> Shape:
        assert isinstance(shape, RobertaShape)
        return replace(shape, first_position=special.pad + 1)

    def find_padding(self, shape: Shape) -> int | None:
        assert isinstance(shape, RobertaShape)
        return shape.first_position - 1


ARCHITECTURE = Roberta()
