"""ELECTRA: BERT with a head that finds replaced pieces, and with names and task heads of its own in transformers.

Its embeddings are as wide as its layers, as in the published base and large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from data_prep.common.errors import UserError
from pretraining.architectures.bert import Bert
from pretraining.architectures.declaration import name_classes
from pretraining.architectures.weights import TaskHead, Weight, declare_linear
from pretraining.model.shape import DETECTION_HEAD, HEAD, PIECE_HEAD, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

WIDTH, OF_EMBEDDINGS = Bert.config_names["hidden"], "embedding_size"


class Electra(Bert):
    """ELECTRA as published; its named sizes are those of BERT."""

    title = "ELECTRA"
    model_type, class_prefix, trunk = "electra", "Electra", "electra."
    classes: ClassVar = name_classes("Electra", "PreTraining", "MaskedLM", "CausalLM")
    config_values: ClassVar = {
        **Bert.config_values,
        "summary_type": ("first",),
        "summary_use_proj": (True,),
        "summary_activation": ("gelu",),
    }
    head_prefixes: ClassVar[tuple[str, ...]] = (
        "discriminator_predictions.",
        "generator_predictions.",
        "generator_lm_head.",
        "sequence_summary.",
        "classifier.",
        "qa_outputs.",
    )
    piece_names = ("generator_lm_head.bias", "generator_predictions.dense", "generator_predictions.LayerNorm")
    copies: ClassVar = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}

    def heads(self, shape: Shape) -> dict[str, list[Weight]]:
        h, found = shape.hidden, "discriminator_predictions"
        return {
            PIECE_HEAD: super().heads(shape)[PIECE_HEAD],
            DETECTION_HEAD: [
                *declare_linear(f"{DETECTION_HEAD}.dense", [f"{found}.dense"], h, h, HEAD),
                *declare_linear(f"{DETECTION_HEAD}.output", [f"{found}.dense_prediction"], 1, h, HEAD),
            ],
        }

    def task_head(self, shape: Shape, head: TaskHead) -> list[Weight]:
        h, of_choices = shape.hidden, head.kind == "choice"
        dense = "sequence_summary.summary" if of_choices else "classifier.dense"
        pooler = declare_linear("pooler", [dense], h, h, HEAD) if head.has_pooler else []
        theirs = "classifier" if of_choices or head.kind == "tags" else "classifier.out_proj"
        theirs = "qa_outputs" if head.kind == "spans" else theirs
        return [*pooler, *declare_linear("head", [theirs], head.outputs, h, HEAD)]

    def build_head(self, name: str, shape: Shape, at_once: int | None = None) -> nn.Module:
        from pretraining.model.electra import DetectionHead, GeluPooler

        if name == DETECTION_HEAD:
            return DetectionHead(shape.hidden)
        return GeluPooler(shape.hidden) if name == "pooler" else super().build_head(name, shape, at_once)

    def config(self, shape: Shape) -> dict[str, Any]:
        return {**super().config(shape), OF_EMBEDDINGS: shape.hidden}

    def adapt_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        narrow, width = config.get(OF_EMBEDDINGS, 128), config.get(WIDTH)
        if narrow != width:
            raise UserError(f"{OF_EMBEDDINGS} is {narrow!r}; only that of the layers, {width!r}, is supported")
        return config


ARCHITECTURE = Electra()
