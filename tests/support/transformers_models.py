"""References for our models: small ones of transformers, in folders and beside ours, and a BERT in plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from support.pretraining_reference import SMALL, gradients, pad_batch, random_rows, their_config
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from pretraining.huggingface.folders import read_folder
from pretraining.huggingface.weights import import_weights, list_weights
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.encoder import PretrainingModel
from pretraining.model.rows import Rows
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model, find_objective

SHAPE = Shape(layers=2, hidden=32, heads=2, intermediate=48, vocabulary=99, positions=40)
LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
PIECES = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *(f"word{number}" for number in range(42)))

# A small BERT in both worlds, with weights that all matter to the logits.


def our_weights(seed: int = 0, shape: Shape = SHAPE) -> dict[str, Tensor]:
    model = build_model(shape).initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    state = model.state_dict()
    for name in ("embeddings.word.weight", "masked_head.bias"):
        state[name][shape.vocabulary :] = 0
    return state


def their_model(kind: Any = transformers.BertForPreTraining, **settings: Any) -> Any:
    model = kind(their_config(SHAPE, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the weights of a folder, and saves them as programs of others do: without checksums of other files."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def leave_out_checksums(folder: Path) -> None:
    change_weights(folder, lambda _: None)


def change_config(folder: Path, **values: Any) -> None:
    """Changes a config, of which no checksum is left; None takes a value away."""
    leave_out_checksums(folder)
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


# Models that transformers has too, a row each: ours, made of a folder that transformers wrote, must equal theirs.

LENGTHS = (5, 70, 96, 17, 64, 1, 33)
MARKS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
"""The ids of our vocabularies; what pads is the first piece."""


def write_wordpiece(folder: Path, count: int) -> None:
    """Writes a vocabulary of this number of pieces, as shard.py does."""
    words = (f"word{number}" for number in range(count - len(SPECIAL)))
    WordPiece((*SPECIAL, *words), cased=False).write(folder)


def adapt_config(kind: Any, own: dict[str, Any], more: dict[str, Any], shape: Shape = SMALL) -> Any:
    """Makes a config of another class with these sizes."""
    sizes = their_config(shape).to_diff_dict() | own | more
    del sizes["model_type"]
    return kind(**sizes)


def roberta_config(**more: Any) -> Any:
    own = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": SMALL.positions + 1, **MARKS}
    return adapt_config(transformers.RobertaConfig, own, more)


def electra_config(shape: Shape = SMALL, **more: Any) -> Any:
    return adapt_config(transformers.ElectraConfig, {"embedding_size": SMALL.hidden}, more, shape)


def gpt_config() -> transformers.GPT2Config:
    """The sizes of `SMALL`."""
    sizes: dict[str, Any] = {"n_layer": SMALL.layers, "n_embd": SMALL.hidden, "n_head": SMALL.heads}
    sizes |= {"n_positions": SMALL.positions, "n_inner": SMALL.intermediate, "vocab_size": SMALL.vocabulary}
    return transformers.GPT2Config(**sizes, **MARKS)


def modern_config(**more: Any) -> transformers.ModernBertConfig:
    """The sizes of `SMALL`, with four layers, two of them local, a narrow window, and dropout."""
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": SMALL.hidden, "num_attention_heads": SMALL.heads}
    sizes |= {"vocab_size": SMALL.vocabulary, "intermediate_size": 72, "max_position_embeddings": SMALL.positions}
    sizes |= {"mlp_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1, "classifier_pooling": "mean"}
    sizes |= {**MARKS, **more}
    return transformers.ModernBertConfig(**sizes, cls_token_id=2, sep_token_id=3, local_attention=24)


BERT = partial(their_config, SMALL)
ONE_WAY: dict[str, Any] = {"is_decoder": True, "bos_token_id": 2, "eos_token_id": 3}
COUNTERPARTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bert": ("BertForPreTraining", BERT),
    "bert without pairs": ("BertForMaskedLM", BERT),
    "bert, left to right": ("BertLMHeadModel", partial(BERT, **ONE_WAY)),
    "roberta": ("RobertaForMaskedLM", roberta_config),
    "roberta, left to right": ("RobertaForCausalLM", partial(roberta_config, is_decoder=True)),
    "electra": ("ElectraForMaskedLM", electra_config),
    "electra, left to right": ("ElectraForCausalLM", partial(electra_config, **ONE_WAY)),
    "gpt": ("GPT2LMHeadModel", gpt_config),
    "modern": ("ModernBertForMaskedLM", modern_config),
}
"""Every architecture with every objective that transformers computes too: the class, and what makes its config."""
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
        (kind, make_config), generator = COUNTERPARTS[name], torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            theirs = getattr(transformers, kind)(make_config()).eval()
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


# A BERT in plain PyTorch, sequence by sequence, for models that read in one direction.

CLS, SEP, MASK = 2, 3, 4


def random_texts(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> tuple[Rows, list[list[int]]]:
    """Examples as they stand in shards, with masks; and the texts that they hide."""
    draw = np.random.default_rng(seed)
    texts = [[CLS, *draw.integers(5, vocabulary, length - 2), SEP] for length in lengths]
    places = [np.sort(draw.choice(length - 2, max(1, length // 6), replace=False)) + 1 for length in lengths]
    hidden = [np.array(text) for text in texts]
    for pieces, masked in zip(hidden, places, strict=True):
        pieces[masked] = draw.choice([MASK, 7, 9], len(masked))
    rows = Rows(
        where=np.stack([np.zeros(len(lengths), np.int64), np.arange(len(lengths))], axis=1),
        lengths=np.array(lengths),
        pieces=np.concatenate(hidden),
        boundaries=np.array([draw.integers(2, length + 1) for length in lengths]),
        random_next=draw.integers(0, 2, len(lengths)),
        predictions=np.array([len(masked) for masked in places]),
        positions=np.concatenate(places),
        labels=np.concatenate([np.array(text)[masked] for text, masked in zip(texts, places, strict=True)]),
    )
    return rows, [[int(piece) for piece in text] for text in texts]


def reference_states(weights: Mapping[str, Tensor], shape: Shape, text: Sequence[int], boundary: int) -> Tensor:
    """The last hidden states of one sequence whose second segment begins at `boundary`: no dropout."""
    pieces, places = torch.tensor(text), torch.arange(len(text))
    seen = {"both": places == places, "before": places <= places[:, None], "after": places >= places[:, None]}
    x = weights["embeddings.word.weight"][pieces] + weights["embeddings.position.weight"][places]
    x = x + weights["embeddings.segment.weight"][(places >= boundary).long()]
    x = _norm(weights, "embeddings.norm", x, shape)
    for layer in range(shape.layers):
        x = _layer(weights, f"layers.{layer}", x, shape, seen[shape.learns.sees])
    return x


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor, shape: Shape) -> Tensor:
    return F.layer_norm(x, (shape.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"], shape.epsilon)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _layer(weights: Mapping[str, Tensor], name: str, x: Tensor, shape: Shape, seen: Tensor) -> Tensor:
    heads = _linear(weights, f"{name}.attention.qkv", x).view(len(x), 3, shape.heads, -1)
    query, key, value = heads.permute(1, 2, 0, 3)
    scores = query @ key.transpose(1, 2) / (shape.hidden / shape.heads) ** 0.5
    context = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1).flatten(1)
    x = _norm(weights, f"{name}.attention.norm", x + _linear(weights, f"{name}.attention.output", context), shape)
    inner = F.gelu(_linear(weights, f"{name}.feed_forward.inner", x))
    x = x + _linear(weights, f"{name}.feed_forward.output", inner)
    return _norm(weights, f"{name}.feed_forward.norm", x, shape)


def head_logits(weights: Mapping[str, Tensor], shape: Shape, asked: Tensor) -> Tensor:
    """The logits of the head that predicts pieces, (m, vocabulary)."""
    transformed = F.gelu(_linear(weights, "masked_head.transform", asked))
    decoder = weights["embeddings.word.weight"], weights["masked_head.bias"]
    return F.linear(_norm(weights, "masked_head.norm", transformed, shape), *decoder)[:, : shape.vocabulary]


def next_logits(weights: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """The logits of whether B follows A, (2,), from the states of one sequence."""
    return _linear(weights, "next_head", torch.tanh(_linear(weights, "pooler", states[0])))
