"""Models that transformers has too, a row each: ours, made of a folder that transformers wrote, must equal theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.pretraining_reference import SMALL, gradients, pad_batch, random_rows, their_config
from torch import Tensor
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertLMHeadModel,
    ElectraConfig,
    ElectraForCausalLM,
    ElectraForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
)

from data_prep.common.arrays import Array
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from pretraining.huggingface.folders import read_folder
from pretraining.huggingface.weights import import_weights, list_weights
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.encoder import PretrainingModel
from pretraining.objectives.declaration import build_model, find_objective

LENGTHS = (5, 70, 96, 17, 64, 1, 33)


def write_wordpiece(folder: Path, count: int) -> None:
    """Writes a vocabulary of this number of pieces, as shard.py does."""
    words = (f"word{number}" for number in range(count - len(SPECIAL)))
    WordPiece((*SPECIAL, *words), cased=False).write(folder)


@dataclass(frozen=True)
class Counterpart:
    """A model of transformers, small enough for tests."""

    kind: Any
    """its class"""
    config: Callable[..., Any]
    """makes its config, perhaps with more settings"""
    write_vocabulary: Callable[[Path, int], None] = write_wordpiece
    """writes the files of a vocabulary of so many pieces, with which our model is exported"""
    exact: float = 1e-10
    """the relative difference of logits in fp64"""


MARKS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
"""The ids of our vocabularies; what pads is the first piece."""


def roberta_config(**more: Any) -> RobertaConfig:
    """The sizes of `SMALL`."""
    sizes = {**their_config(SMALL).to_diff_dict(), "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    sizes |= {"max_position_embeddings": SMALL.positions + 1, **MARKS, **more}
    del sizes["model_type"]
    return RobertaConfig(**sizes)


def electra_config(**more: Any) -> ElectraConfig:
    """The sizes of `SMALL`."""
    sizes = {**their_config(SMALL).to_diff_dict(), "embedding_size": SMALL.hidden, **more}
    del sizes["model_type"]
    return ElectraConfig(**sizes)


def gpt_config() -> GPT2Config:
    """The sizes of `SMALL`."""
    sizes: dict[str, Any] = {"n_layer": SMALL.layers, "n_embd": SMALL.hidden, "n_head": SMALL.heads}
    sizes |= {"n_positions": SMALL.positions, "n_inner": SMALL.intermediate, "vocab_size": SMALL.vocabulary}
    return GPT2Config(**sizes, **MARKS)


def modern_config(**more: Any) -> ModernBertConfig:
    """The sizes of `SMALL`, with four layers, two of them local, a narrow window, and dropout."""
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": SMALL.hidden, "num_attention_heads": SMALL.heads}
    sizes |= {"vocab_size": SMALL.vocabulary, "intermediate_size": 72, "max_position_embeddings": SMALL.positions}
    sizes |= {"mlp_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}
    return ModernBertConfig(**sizes, **MARKS, cls_token_id=2, sep_token_id=3, local_attention=24, **more)


COUNTERPARTS = {
    "bert": Counterpart(BertForPreTraining, partial(their_config, SMALL)),
    "bert without pairs": Counterpart(BertForMaskedLM, partial(their_config, SMALL)),
    "bert, left to right": Counterpart(
        BertLMHeadModel, partial(their_config, SMALL, is_decoder=True, bos_token_id=2, eos_token_id=3)
    ),
    "roberta": Counterpart(RobertaForMaskedLM, roberta_config),
    "roberta, left to right": Counterpart(RobertaForCausalLM, partial(roberta_config, is_decoder=True)),
    "electra": Counterpart(ElectraForMaskedLM, electra_config),
    "electra, left to right": Counterpart(
        ElectraForCausalLM, partial(electra_config, is_decoder=True, bos_token_id=2, eos_token_id=3)
    ),
    "gpt": Counterpart(GPT2LMHeadModel, gpt_config),
    "modern": Counterpart(ModernBertForMaskedLM, modern_config, exact=1e-6),
}
"""Every architecture with every objective that transformers computes too; in ModernBERT it rounds queries and keys to
fp32."""
ENCODERS = ("bert", "roberta", "electra", "modern")
"""Those of other encoders, on which transformers has the heads of tasks that we have."""


def replace_padding(pieces: Array, config: Any) -> Array:
    """Replaces the piece that pads by the one after it."""
    return np.where(pieces == getattr(config, "pad_token_id", None), pieces + 1, pieces)


def tells_segments(config: Any) -> bool:
    """Whether segments have embeddings of their own."""
    return getattr(config, "type_vocab_size", 1) > 1


@dataclass(frozen=True)
class Pair:
    """Our model and that of transformers, with the same weights, which all matter to the logits; without dropout."""

    ours: PretrainingModel
    theirs: Any

    @classmethod
    def make(cls, name: str, folder: Path) -> Pair:
        """Makes a pair of a row of `COUNTERPARTS`; ours is read from a folder that theirs writes."""
        row, generator = COUNTERPARTS[name], torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            theirs = row.kind(row.config()).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        theirs.save_pretrained(folder)
        shape, state, missing = read_folder(folder)
        assert not missing
        for weight in list_weights(shape):
            theirs.get_parameter(weight.theirs[0]).data[: weight.before] = 0  # nothing reads these rows
        ours = build_model(shape)
        ours.load_state_dict(state)
        return cls(ours.eval(), theirs)

    def to(self, dtype: torch.dtype) -> Pair:
        """Converts both models."""
        return Pair(self.ours.to(dtype), self.theirs.to(dtype))

    def batch(self, seed: int = 0) -> PretrainingBatch:
        """Makes sequences of many lengths, up to the longest that the model reads. No piece is the one that pads:
        transformers gives no gradient to its embedding, and RoBERTa no position."""
        shape, config = self.ours.shape, self.theirs.config
        rows = random_rows([min(length, shape.positions) for length in LENGTHS], shape.vocabulary, seed)
        pieces, labels = (replace_padding(pieces, config) for pieces in (rows.pieces, rows.labels))
        rows = replace(rows, pieces=pieces, labels=labels)
        if not tells_segments(config):
            rows = replace(rows, boundaries=rows.lengths)
        return find_objective(shape).batch(rows)

    def our_logits(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Computes our logits, by the display names of heads."""
        model = self.ours
        return find_objective(model.shape).logits(model, model.states_for_heads(batch), batch)

    def their_logits(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Computes the same logits by transformers, of sequences that are padded to the longest."""
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if tells_segments(self.theirs.config) else [])]
        given, objective = pad_batch(batch), find_objective(self.ours.shape)
        output, found = self.theirs(**{name: given[name] for name in names}), []
        for number, (start, end) in enumerate(pairwise(batch.starts.tolist())):
            own = {name: each[number : number + 1] for name, each in output.items() if isinstance(each, Tensor)}
            chosen = batch.chosen[(batch.chosen >= start) & (batch.chosen < end)] - start
            found.append(objective.pick_their_logits(type(output)(**own), chosen))
        return {name: torch.cat([logits[name] for logits in found]) for name in found[0]}

    def their_gradients(self, batch: PretrainingBatch) -> dict[str, Tensor]:
        """Computes the gradients by transformers of the loss that our model is trained by, under our names."""
        theirs = zip(self.their_logits(batch).values(), (batch.labels, batch.random_next), strict=False)
        torch.autograd.backward([F.cross_entropy(logits, labels) for logits, labels in theirs])
        return import_weights(gradients(self.theirs), self.ours.shape)[0]


def train(model: PretrainingModel, batch: PretrainingBatch) -> dict[str, Tensor]:
    """Computes the gradients of the loss of a model's objective."""
    batches = PretrainingBatches((batch,), len(batch.lengths), len(batch.labels))
    model.zero_grad()
    torch.autograd.backward(find_objective(model.shape).loss(model(batch), batches))
    return gradients(model)


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], within: float) -> None:
    """Asserts that tensors of the same names differ by at most `within`, anywhere."""
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert each.shape == found[name].shape, name
        difference = float((found[name] - each).detach().abs().max())
        assert difference <= within, f"{name}: {difference}"
