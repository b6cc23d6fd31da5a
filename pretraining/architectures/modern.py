"""ModernBERT: rotary positions, gated feed-forward blocks, local attention in most layers, norms before the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from data_prep.common.errors import UserError
from data_prep.common.sections import Positive
from pretraining.architectures.declaration import USUAL_NAMES, Architecture, LayerMemory, ModelSettings, name_classes
from pretraining.architectures.weights import TaskHead, Weight, declare_linear, declare_norm, declare_table
from pretraining.model.shape import BIAS, HEAD, MATRIX, PIECE_HEAD, Role, Sees, Shape

if TYPE_CHECKING:
    from torch import nn

    from pretraining.model.encoder import Embeddings, Sight

Base = Annotated[float, Field(gt=1)]
INNER = {"base": 1152, "large": 2624}
"""The widths of the feed-forward blocks of the published sizes."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class ModernShape(Shape):
    """The sizes of ModernBERT."""

    window: int = 128
    """pieces that a piece sees in a layer of local attention, half of them on each side"""
    global_every: int = 3
    """every how many layers, from the first on, attention is global"""
    global_base: float = 160_000.0
    """the base of rotary positions in layers of global attention"""
    local_base: float = 10_000.0
    """the same in the others"""

    def __post_init__(self) -> None:
        # in few layers the first one alone is global, whatever the number says: folders do not have it
        object.__setattr__(self, "global_every", min(self.global_every, self.layers))


class ModernSettings(ModelSettings):
    """Settings that ModernBERT alone has."""

    window: Positive = 128
    """modern: pieces that a piece sees in a layer of local attention, half of them on each side."""
    global_every: Positive = 3
    """modern: attention is global in every n-th layer, from the first on."""
    global_base: Base = 160_000.0
    """modern: base of rotary positions in layers of global attention."""
    local_base: Base = 10_000.0
    """modern: base of rotary positions in layers of local attention."""


class Modern(Architecture):
    """ModernBERT as published."""

    title = "ModernBERT"
    shape_type, settings_type = ModernShape, ModernSettings
    defaults: ClassVar = {"segments": 1, "epsilon": 1e-5, "positions": 8192, "dropout": 0.0, "attention_dropout": 0.0}
    sizes: ClassVar = {"base": (22, 768), "large": (28, 1024)}
    sees: ClassVar[tuple[Sees, ...]] = ("both",)
    vocabulary = 50368
    model_type, class_prefix, trunk = "modernbert", "ModernBert", "model."
    classes: ClassVar = name_classes("ModernBert", "MaskedLM")
    config_names: ClassVar = {
        **USUAL_NAMES,
        "dropout": "mlp_dropout",
        "attention_dropout": "attention_dropout",
        "epsilon": "norm_eps",
        "window": "local_attention",
    }
    embedding_dropout = "embedding_dropout"
    config_defaults: ClassVar = {**defaults, "vocabulary": 50368, "hidden": 768, "intermediate": 1152}
    config_marks = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    config_constants: ClassVar = {"hidden_activation": "gelu"}
    pooling_name = "classifier_pooling"
    config_values: ClassVar = {
        "norm_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "decoder_bias": (True,),
        "classifier_bias": (False,),
        "classifier_activation": ("gelu",),
        "rope_scaling": (None,),
    }
    head_prefixes = ("head.", "decoder.", "classifier.")
    copies: ClassVar = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}

    def find_sizes(self, size: str | None, hidden: int | None) -> dict[str, int]:
        sizes = super().find_sizes(size, hidden)
        return {**sizes, "intermediate": INNER[size] if size and not hidden else sizes["hidden"] * 3 // 2}

    def faults(self, shape: Shape) -> Iterator[str]:
        assert isinstance(shape, ModernShape)
        if shape.hidden // shape.heads % 2:
            yield f"heads of {shape.hidden // shape.heads}: rotary positions turn pairs; take an even width of a head"
        if shape.window % 2:
            yield f"a window of {shape.window}: half of it is on each side; take an even number"

    def embeddings(self, shape: Shape) -> list[Weight]:
        theirs = "model.embeddings.tok_embeddings"
        table = declare_table("embeddings.word", theirs, shape.vocabulary, shape.hidden, "pieces")
        return [table, declare_norm("embeddings.norm", "model.embeddings.norm", shape.hidden)[0]]

    def layer(self, shape: Shape, number: int) -> list[Weight]:
        h, inner, ours, theirs = shape.hidden, shape.intermediate, f"layers.{number}", f"model.layers.{number}"
        out = Role("matrix", initial_range=MATRIX.initial_range / math.sqrt(2 * shape.layers))
        weights = [
            declare_norm(f"{ours}.first_norm", f"{theirs}.attn_norm", h)[0],
            declare_linear(f"{ours}.qkv", [f"{theirs}.attn.Wqkv"], 3 * h, h, Role("matrix", 3), "columns")[0],
            declare_linear(f"{ours}.output", [f"{theirs}.attn.Wo"], h, h, out, "rows")[0],
            declare_norm(f"{ours}.second_norm", f"{theirs}.mlp_norm", h)[0],
            declare_linear(f"{ours}.inner", [f"{theirs}.mlp.Wi"], 2 * inner, h, Role("matrix", 2), "columns")[0],
            declare_linear(f"{ours}.outer", [f"{theirs}.mlp.Wo"], h, inner, out, "rows")[0],
        ]
        if number == shape.layers - 1:
            weights.append(declare_norm(f"{ours}.final_norm", "model.final_norm", h)[0])
        return weights[number == 0 :]

    def heads(self, shape: Shape) -> dict[str, list[Weight]]:
        bias = Weight(f"{PIECE_HEAD}.bias", ("decoder.bias",), (shape.vocabulary,), BIAS, "vocabulary", "pieces")
        return {
            "pooler": self._declare_transform("pooler", shape),
            PIECE_HEAD: [bias, *self._declare_transform(f"{PIECE_HEAD}.before", shape)],
        }

    def _declare_transform(self, ours: str, shape: Shape) -> list[Weight]:
        dense = declare_linear(f"{ours}.transform", ["head.dense"], shape.hidden, shape.hidden, HEAD)[0]
        return [dense, declare_norm(f"{ours}.norm", "head.norm", shape.hidden)[0]]

    def task_head(self, shape: Shape, head: TaskHead) -> list[Weight]:
        linear = declare_linear("head", ["classifier"], head.outputs, shape.hidden, HEAD)
        return [*self._declare_transform("pooler", shape), *linear]

    def count_products(self, shape: Shape) -> tuple[float, float]:
        h = shape.hidden
        return 2 * 3 * h * h, 2 * (h * h + 3 * h * shape.intermediate)

    def count_seen(self, shape: Shape, length: float) -> float:
        assert isinstance(shape, ModernShape)
        share = -(-shape.layers // shape.global_every) / shape.layers
        reach = min(shape.window // 2, length - 1)
        local = length * (2 * reach + 1) - reach * (reach + 1)
        both = share * length * length + (1 - share) * local
        return both - shape.one_way_share * (both - length) / 2  # one way, half of the others are seen

    def layer_memory(self, shape: Shape) -> LayerMemory:
        # a layer keeps its input and the norm of it, q k v and attention's result; then the sum and its norm, the inner
        # layer's two halves and their product
        h = shape.hidden
        return LayerMemory(2 * h, 6 * h, 2 * h, 2 * h + 3 * shape.intermediate, 2 * h, (4 * h, 3 * shape.intermediate))

    def build(self, shape: Shape) -> tuple[Embeddings, list[nn.Module]]:
        from pretraining.model import modern

        sights, last = [self._find_sight(shape, number) for number in range(shape.layers)], shape.layers - 1
        layers = [modern.ModernLayer(shape, sights[number], number == 0) for number in range(last)]
        return modern.ModernEmbeddings(shape), [*layers, modern.FinalModernLayer(shape, sights[last], last == 0)]

    def _find_sight(self, shape: Shape, number: int) -> Sight:
        from pretraining.model.encoder import Sight

        assert isinstance(shape, ModernShape)
        is_global = number % shape.global_every == 0
        return Sight(None, shape.global_base) if is_global else Sight(shape.window // 2, shape.local_base)

    def build_head(self, name: str, shape: Shape, at_once: int | None = None) -> nn.Module:
        from pretraining.model.modern import ModernPieceHead, ModernTransform

        return ModernPieceHead(shape, at_once) if name == PIECE_HEAD else ModernTransform(shape)

    def config(self, shape: Shape) -> dict[str, Any]:
        assert isinstance(shape, ModernShape)
        bases = {GLOBAL: shape.global_base, LOCAL: shape.local_base}
        return {
            **super().config(shape),
            "layer_types": [LOCAL if number % shape.global_every else GLOBAL for number in range(shape.layers)],
            "rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()},
        }

    def adapt_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {
            "global_every": config.get("global_attn_every_n_layers", 3),
            "global_base": config.get("global_rope_theta", 160_000.0),
            "local_base": config.get("local_rope_theta", 10_000.0),
        }
        if types := config.get("layer_types"):
            count = config.get("num_hidden_layers")
            if not isinstance(types, list) or count not in (None, len(types)):
                raise UserError(f"layer_types is {types}; it should name the attention of {count} layers")
            found["global_every"] = next((n for n in range(1, len(types)) if types[n] == GLOBAL), len(types))
            if types != [LOCAL if number % found["global_every"] else GLOBAL for number in range(len(types))]:
                raise UserError(f"layer_types is {types}; only global attention in every n-th layer is supported")
        ropes = config.get("rope_parameters") or {}
        for name, base in ((GLOBAL, "global_base"), (LOCAL, "local_base")):
            rope = ropes.get(name) or {} if isinstance(ropes, dict) else None
            if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
                raise UserError(f"rope_parameters is {ropes}; only rope_type 'default' is supported")
            found[base] = rope.get("rope_theta", found[base])
        return {**config, **found}


ARCHITECTURE = Modern()
