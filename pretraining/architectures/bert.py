"""BERT: learned positions and segments, and layers that end with a norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pretraining.architectures.declaration import USUAL_NAMES, Architecture, LayerMemory, name_classes
from pretraining.architectures.weights import Weight, declare_linear, declare_norm, declare_table
from pretraining.model.shape import BIAS, HEAD, PIECE_HEAD, Role, Shape

if TYPE_CHECKING:
    from torch import nn

    from pretraining.answering.serving import ServeLayers
    from pretraining.model.encoder import Embeddings


class Bert(Architecture):
    """BERT as published."""

    title = "BERT"
    sizes: ClassVar = {
        "tiny": (2, 128),
        "mini": (4, 256),
        "small": (4, 512),
        "medium": (8, 512),
        "base": (12, 768),
        "large": (24, 1024),
    }
    model_type, class_prefix, trunk = "bert", "Bert", "bert."
    classes: ClassVar = {**name_classes("Bert", "PreTraining", "MaskedLM"), "AutoModelForCausalLM": "BertLMHeadModel"}
    config_names: ClassVar = {
        **USUAL_NAMES,
        "segments": "type_vocab_size",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "epsilon": "layer_norm_eps",
    }
    config_constants: ClassVar = {"hidden_act": "gelu"}
    config_values: ClassVar = {
        "is_decoder": (False, True),
        "position_embedding_type": ("absolute",),
        "add_cross_attention": (False,),
    }
    head_prefixes: ClassVar[tuple[str, ...]] = (
        "bert.pooler.",
        "cls.predictions.",
        "cls.seq_relationship.",
        "classifier.",
        "qa_outputs.",
    )
    old_ends: ClassVar = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    piece_names = ("cls.predictions.bias", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
    """the bias, the linear layer and the norm of the head that predicts pieces, in transformers"""
    copies: ClassVar = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def embeddings(self, shape: Shape) -> list[Weight]:
        h, theirs = shape.hidden, f"{self.trunk}embeddings"
        return [
            declare_table("embeddings.word", f"{theirs}.word_embeddings", shape.vocabulary, h, "pieces"),
            declare_table("embeddings.position", f"{theirs}.position_embeddings", shape.positions, h, "positions"),
            declare_table("embeddings.segment", f"{theirs}.token_type_embeddings", shape.segments, h, "segments"),
            *declare_norm("embeddings.norm", f"{theirs}.LayerNorm", h),
        ]

    def layer(self, shape: Shape, number: int) -> list[Weight]:
        h, inner = shape.hidden, shape.intermediate
        ours, theirs = f"layers.{number}", f"{self.trunk}encoder.layer.{number}"
        attention = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
        return [
            *declare_linear(f"{ours}.attention.qkv", attention, 3 * h, h, Role("matrix", 3), "columns"),
            *declare_linear(f"{ours}.attention.output", [f"{theirs}.attention.output.dense"], h, h, cut="rows"),
            *declare_norm(f"{ours}.attention.norm", f"{theirs}.attention.output.LayerNorm", h),
            *declare_linear(f"{ours}.feed_forward.inner", [f"{theirs}.intermediate.dense"], inner, h, cut="columns"),
            *declare_linear(f"{ours}.feed_forward.output", [f"{theirs}.output.dense"], h, inner, cut="rows"),
            *declare_norm(f"{ours}.feed_forward.norm", f"{theirs}.output.LayerNorm", h),
        ]

    def heads(self, shape: Shape) -> dict[str, list[Weight]]:
        h, (bias, dense, norm) = shape.hidden, self.piece_names
        return {
            "pooler": declare_linear("pooler", [f"{self.trunk}pooler.dense"], h, h, HEAD),
            PIECE_HEAD: [
                Weight(f"{PIECE_HEAD}.bias", (bias,), (shape.vocabulary,), BIAS, "vocabulary", "pieces"),
                *declare_linear(f"{PIECE_HEAD}.transform", [dense], h, h, HEAD),
                *declare_norm(f"{PIECE_HEAD}.norm", norm, h),
            ],
            "next_head": declare_linear("next_head", ["cls.seq_relationship"], 2, h, HEAD),
        }

    def layer_memory(self, shape: Shape) -> LayerMemory:
        # a layer keeps its input, q k v and attention's result; then the sum before and the output of the first norm,
        # the sum before the second, and the inner layer before and after GELU
        h = shape.hidden
        return LayerMemory(3 * h, 5 * h, 2 * h, 3 * h + 2 * shape.intermediate, 2 * h, (4 * h, 2 * shape.intermediate))

    def build(self, shape: Shape) -> tuple[Embeddings, list[nn.Module]]:
        from pretraining.model.bert import BertEmbeddings, Layer

        return BertEmbeddings(shape), [Layer(shape) for _ in range(shape.layers)]

    def build_head(self, name: str, shape: Shape, at_once: int | None = None) -> nn.Module:
        from torch import nn

        from pretraining.model.bert import BertPieceHead, Pooler

        if name == "next_head":
            return nn.Linear(shape.hidden, 2)
        return BertPieceHead(shape, at_once) if name == PIECE_HEAD else Pooler(shape.hidden)

    def find_server(self) -> ServeLayers:
        from pretraining.answering.layers import serve_layers

        return serve_layers


ARCHITECTURE = Bert()
