"""Weights and configs of transformers: there and back bit for bit; what does not fit or has changed is refused."""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import assert_refusal
from support.pretraining_reference import their_config
from support.transformers_models import (
    PIECES,
    SHAPE,
    change_config,
    change_weights,
    our_weights,
    same,
    their_model,
    their_weights,
    with_old_names,
)
from torch import Tensor
from transformers import BertForMaskedLM, BertModel

from data_prep.common.errors import UserError
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.vocabulary import Special
from pretraining.huggingface import config, verify
from pretraining.huggingface.config import make_config, parse_shape
from pretraining.huggingface.folders import read_folder, write_folder
from pretraining.huggingface.verify import compute_probe, make_probe, verify_export
from pretraining.huggingface.weights import LISTED, import_weights
from pretraining.model.shape import Sees, Shape
from pretraining.objectives.declaration import build_model, objectives
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.training.finishing import describe_loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that transformers wrote."""
    their_model().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def without_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("bert."): weight for name, weight in state.items()}


BIAS = "cls.predictions.bias"


@pytest.mark.parametrize(
    "change",
    [
        with_old_names,
        without_prefix,
        lambda state: {("cls.predictions.decoder.bias" if name == BIAS else name): state[name] for name in state},
        lambda state: without_prefix(with_old_names(state)),
    ],
)
def test_old_names_are_understood(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    state = their_weights()
    assert same(import_weights(change(dict(state)), SHAPE)[0], import_weights(state, SHAPE)[0])


def test_half_precision_becomes_single() -> None:
    state, _ = import_weights({name: each.bfloat16() for name, each in their_weights().items()}, SHAPE)
    assert {weight.dtype for weight in state.values()} == {torch.float32}


SPECIAL = Special(0, 1, 2, 3, 4)
MASKED_HEAD = [
    *("masked_head.bias", "masked_head.transform.weight", "masked_head.transform.bias"),
    *("masked_head.norm.weight", "masked_head.norm.bias"),
]
NEXT_HEAD = ["next_head.weight", "next_head.bias"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: their_model(BertModel), MASKED_HEAD + NEXT_HEAD),
        (lambda: BertModel(their_config(SHAPE), add_pooling_layer=False), MASKED_HEAD),
        (lambda: their_model(BertForMaskedLM), []),
    ],
    ids=["encoder", "encoder without pooler", "masked language model"],
)
def test_heads_that_are_missing_are_named(model: Callable[[], Any], expected: list[str], tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    shape, state, missing = read_folder(tmp_path)
    assert list(missing) == expected
    assert shape == SHAPE.change_learning(pairs="pooler.weight" in state)
    assert state.keys() == build_model(shape).state_dict().keys() - set(missing)


def add(name: str, weight: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({name: weight})


def remove(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(name)


DENSE = "bert.encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add("classifier.weight", torch.zeros(3, 32)), r"classifier.weight \(3, 32\) has no place"),
        (add("bert.encoder.layer.2.output.dense.bias", torch.zeros(32)), r"layer\.2\.output\.dense\.bias .* 2 layers"),
        (lambda state: state.update({DENSE + "s": state.pop(DENSE)}), rf"(?s){DENSE}s .*no place.*{DENSE} is missing"),
        (add(DENSE, torch.zeros(48, 32)), rf"{DENSE} is \(48, 32\); by the config it should be \(32, 48\)"),
        (remove(DENSE), f"{DENSE} is missing"),
        (remove("bert.encoder.layer.0.attention.self.key.bias"), r"self\.key\.bias is missing$"),
        (remove("cls.predictions.transform.dense.bias"), r"cls\.predictions\.transform\.dense\.bias is missing$"),
        (remove("bert.pooler.dense.weight"), r"bert\.pooler\.dense\.weight is missing$"),
        (add("bert.embeddings.LayerNorm.gamma", torch.ones(32)), "are the same weight"),
        (add("cls.predictions.decoder.weight", torch.ones(99, 32)), "decoder of its own"),
        (add("cls.predictions.decoder.weight", torch.ones(104, 32)), r"\(104, 32\) differs .*\(99, 32\)"),
        (add("cls.predictions.bias", torch.zeros(99, dtype=torch.int8)), "torch.int8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    state = their_weights()
    change(state)
    assert_refusal(message, import_weights, state, SHAPE, "folder")


def test_another_model_names_its_first_weights_only() -> None:
    with pytest.raises(UserError) as caught:
        import_weights({f"decoder.{number}": torch.zeros(3) for number in range(1000)}, SHAPE, "folder")
    assert len(str(caught.value).splitlines()) == LISTED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "distilbert"}, "model_type is 'distilbert'; only 'bert'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": "yes"}, "is_decoder is 'yes'"),
        ({"is_decoder": "yes", "hidden_act": "relu"}, r"(?s)is_decoder.*hidden_act"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 5}, "hidden_size 32 cannot be divided among 5"),
        ({"layer_norm_eps": None}, "layer_norm_eps is None"),
        ({"vocab_size": 98}, r"word_embeddings\.weight is \(99, 32\); by the config it should be \(98, 32\)"),
        ({"max_position_embeddings": 64}, r"position_embeddings\.weight is \(40, 32\)"),
    ],
)
def test_configs_of_other_models_are_refused(settings: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert_refusal(message, read_folder, folder)


def test_a_config_without_what_is_usual_means_the_usual(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in config.items() if name.endswith(("size", "num_hidden_layers", "heads"))}
    (folder / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 40}))
    assert read_folder(folder)[0] == SHAPE
    del sizes["hidden_size"]
    (folder / "config.json").write_text(json.dumps(sizes))
    assert_refusal("hidden_size is None", read_folder, folder)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    WordPiece(PIECES, cased=False).write(tmp_path / "data")
    write_folder(tmp_path / "exported", SHAPE, our_weights(), tmp_path / "data", "a card\n")
    return tmp_path / "exported"


def our_probe() -> dict[str, Tensor]:
    """The logits that are wanted of it."""
    return compute_probe(SHAPE, our_weights(), SPECIAL)


NAMES = [
    "bert.embeddings.position_embeddings.weight",
    "bert.encoder.layer.0.attention.self.query.weight",
    "bert.encoder.layer.1.output.LayerNorm.bias",
    "bert.pooler.dense.weight",
    "cls.predictions.bias",
    "cls.seq_relationship.bias",
]


@pytest.mark.parametrize(("name", "value"), [*((name, 0.01) for name in NAMES), (NAMES[0], float("nan"))])
def test_a_weight_that_changed_on_its_way_is_noticed(name: str, value: float, exported: Path) -> None:
    change_weights(exported, lambda state: state[name].add_(value * torch.randn(state[name].shape)))
    with pytest.raises(UserError, match=r"not exported: .* logits read back by Cloze differ|no numbers"):
        verify_export(exported, SHAPE, our_probe(), SPECIAL)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_transformers_has_its_say(name: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that we make in writing and again in reading: only transformers can notice it."""
    change_weights(exported, lambda state: state[f"bert.encoder.layer.0.attention.self.{name}.weight"].mul_(1.01))
    monkeypatch.setattr(verify, "read_folder", lambda _: (SHAPE, our_weights(), ()))
    assert_refusal("read back by transformers differ", verify_export, exported, SHAPE, our_probe(), SPECIAL)
    change_weights(exported, lambda state: state.pop("bert.pooler.dense.bias"))
    assert_refusal(
        r"transformers reports .*bert\.pooler\.dense\.bias",
        verify_export,
        exported,
        SHAPE,
        our_probe(),
        SPECIAL,
    )


@pytest.mark.parametrize(("size", "share"), [(0.001, 1e-5), (30.0, 2e-4)])
def test_the_tolerance_follows_the_size_of_the_logits(size: float, share: float, tmp_path: Path) -> None:
    """A difference of the size of roundings passes, and ten times as much does not."""
    shape = SHAPE.change_learning(pairs=False)
    weights = our_weights(shape=shape)
    for name in ("masked_head.norm.weight", "masked_head.norm.bias", "masked_head.bias"):
        weights[name] *= size
    WordPiece(PIECES, cased=False).write(tmp_path / "data")
    write_folder(tmp_path / "out", shape, weights, tmp_path / "data", "a card\n")
    wanted = compute_probe(shape, weights, SPECIAL)
    part = share * float(wanted["masked"].abs().max())
    change_weights(tmp_path / "out", lambda state: state["cls.predictions.bias"][7].add_(part))
    ours, theirs = verify_export(tmp_path / "out", shape, wanted, SPECIAL).values()
    assert ours == pytest.approx(part, rel=0.1) == theirs
    change_weights(tmp_path / "out", lambda state: state["cls.predictions.bias"][7].add_(9 * part))
    assert_refusal("masked logits read back by Cloze", verify_export, tmp_path / "out", shape, wanted, SPECIAL)


def test_a_config_that_changed_is_noticed(exported: Path) -> None:
    change_config(exported, layer_norm_eps=1e-5)
    assert_refusal("not exported", verify_export, exported, SHAPE, our_probe(), SPECIAL)


@pytest.mark.parametrize(("positions", "segments"), [(1, 1), (2, 2), (5, 1), (512, 2)])
def test_the_test_sequences_fit_any_model(positions: int, segments: int) -> None:
    small = replace(SHAPE, positions=positions, segments=segments)
    batch = make_probe(small, SPECIAL)
    assert sum(batch.lengths) == len(batch.pieces) == int(batch.starts[-1])
    assert max(batch.lengths) == positions
    assert {*SPECIAL[:positions]} <= {*batch.pieces.tolist()}
    assert int(batch.segments.max()) <= segments - 1
    model = build_model(small).initialize(1).eval()
    masked, next_sentence = MLM.logits(model, model.states_for_heads(batch), batch).values()
    assert masked.shape == (len(batch.chosen), small.vocabulary)
    assert next_sentence is not None
    assert next_sentence.shape == (3, 2)


SHAPES: dict[Sees, Shape] = {
    objective.sees: SHAPE.change_learning(objective=name, sees=objective.sees, pairs=objective.uses_pairs)
    for name, objective in objectives().items()
    if name in ("mlm", "ltr", "rtl")
}
"""The first objective of each direction."""


@pytest.mark.parametrize("sees", SHAPES)
def test_a_folder_of_an_objective_that_is_gone_is_refused(sees: Sees, monkeypatch: pytest.MonkeyPatch) -> None:
    written = make_config(SHAPES[sees], SPECIAL, torch.float32)
    assert parse_shape(written, "folder") == SHAPES[sees]
    left = {name: objective for name, objective in objectives().items() if objective.sees != sees}
    monkeypatch.setattr(config, "objectives", lambda: left)
    assert_refusal(rf"^folder: .*{', '.join(left)}; put back .*pretraining/objectives/", parse_shape, written, "folder")


@pytest.mark.parametrize(
    ("sees", "kind"), [("both", "AutoModelForMaskedLM"), ("before", "AutoModelForCausalLM"), ("after", None)]
)
def test_nobody_is_told_to_load_what_transformers_refuses(sees: Sees, kind: str | None) -> None:
    told = describe_loading(SHAPES[sees], Path("run/export"))
    wanted = f'transformers.{kind}.from_pretrained("run/export")' if kind else "finetuning/run_task.py TASK.toml"
    assert wanted in told
    assert (kind is None) == ("transformers." not in told)
    folder = Path('my "own" run/d\'été 😀\\')
    told = describe_loading(SHAPES[sees], folder).partition(";")[0]
    call = ast.parse(told, mode="eval").body if kind else None
    assert (ast.literal_eval(call.args[0]) if isinstance(call, ast.Call) else shlex.split(told)[-1]) == str(folder)
