"""GPT-2: learned positions, norms before the blocks, and a piece sees those before it.

transformers stores its matrices with the inputs first. OpenAI's first GPT has BERT's layer: it is the objective `ltr`
on `bert`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pretraining.architectures.declaration import Architecture, LayerMemory, name_classes
from pretraining.architectures.weights import Weight, declare_linear, declare_norm, declare_table
from pretraining.model.shape import HEAD, MATRIX, PIECE_HEAD, Role, Sees, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from pretraining.model.encoder import Embeddings


class Gpt(Architecture):
    """GPT-2 as published."""

    title = "GPT-2"
    defaults: ClassVar = {"segments": 1, "epsilon": 1e-5, "positions": 1024}
    sizes: ClassVar = {"small": (12, 768), "medium": (24, 1024), "large": (36, 1280), "8b": (72, 3072)}
    sees: ClassVar[tuple[Sees, ...]] = ("before", "after")
    vocabulary = 50257
    model_type, class_prefix, trunk = "gpt2", "GPT2", "transformer."
    classes: ClassVar = {
        **name_classes("GPT2", tasks=("QuestionAnswering", "TokenClassification")),
        "AutoModelForCausalLM": "GPT2LMHeadModel",
    }
    config_names: ClassVar = {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "intermediate": "n_inner",
        "vocabulary": "vocab_size",
        "positions": "n_positions",
        "dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "epsilon": "layer_norm_epsilon",
    }
    embedding_dropout = "embd_pdrop"
    config_defaults: ClassVar = {"segments": 1, "epsilon": 1e-5, "positions": 1024}
    config_constants: ClassVar = {"activation_function": "gelu_new"}
    config_values: ClassVar = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    head_prefixes = ("lm_head.", "score.", "classifier.", "qa_outputs.", "pooler.")
    buffers = ("position_ids", ".attn.bias", ".attn.masked_bias")
    copies: ClassVar = {"lm_head.weight": "transformer.wte.weight"}

    def embeddings(self, shape: Shape) -> list[Weight]:
        return [
            declare_table("embeddings.word", "transformer.wte", shape.vocabulary, shape.hidden, "pieces"),
            declare_table("embeddings.position", "transformer.wpe", shape.positions, shape.hidden, "positions"),
        ]

    def layer(self, shape: Shape, number: int) -> list[Weight]:
        h, inner, ours, theirs = shape.hidden, shape.intermediate, f"layers.{number}", f"transformer.h.{number}"
        out = Role("matrix", initial_range=MATRIX.initial_range / math.sqrt(2 * shape.layers))
        weights = [
            *declare_norm(f"{ours}.first_norm", f"{theirs}.ln_1", h),
            *declare_linear(f"{ours}.qkv", [f"{theirs}.attn.c_attn"], 3 * h, h, Role("matrix", 3), "columns", True),
            *declare_linear(f"{ours}.output", [f"{theirs}.attn.c_proj"], h, h, out, "rows", True),
            *declare_norm(f"{ours}.second_norm", f"{theirs}.ln_2", h),
            *declare_linear(f"{ours}.inner", [f"{theirs}.mlp.c_fc"], inner, h, MATRIX, "columns", True),
            *declare_linear(f"{ours}.outer", [f"{theirs}.mlp.c_proj"], h, inner, out, "rows", True),
        ]
        is_last = number == shape.layers - 1
        return weights + (declare_norm(f"{ours}.final_norm", "transformer.ln_f", h) if is_last else [])

    def heads(self, shape: Shape) -> dict[str, list[Weight]]:
        return {"pooler": declare_linear("pooler", ["pooler.dense"], shape.hidden, shape.hidden, HEAD), PIECE_HEAD: []}

    def layer_memory(self, shape: Shape) -> LayerMemory:
        # a layer keeps its input and the norm of it, q k v and attention's result; then the sum and its norm, and the
        # inner layer before and after GELU
        h = shape.hidden
        return LayerMemory(h, 6 * h, 2 * h, 2 * h + 2 * shape.intermediate, 2 * h, (4 * h, 2 * shape.intermediate))

    def build(self, shape: Shape) -> tuple[Embeddings, list[nn.Module]]:
        from pretraining.model.gpt import FinalGptLayer, GptEmbeddings, GptLayer

        return GptEmbeddings(shape), [*(GptLayer(shape) for _ in range(shape.layers - 1)), FinalGptLayer(shape)]

    def build_head(self, name: str, shape: Shape, at_once: int | None = None) -> nn.Module:
        from pretraining.model.bert import Pooler
        from pretraining.model.piece_head import PieceHead

        return PieceHead(shape, at_once) if name == PIECE_HEAD else Pooler(shape.hidden)

    def adapt_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        inner, width = config.get("n_inner"), config.get("n_embd")
        return {**config, "n_inner": 4 * width} if inner is None and isinstance(width, int) else config


ARCHITECTURE = Gpt()
