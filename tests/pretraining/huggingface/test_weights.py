"""Weights and configs of transformers: there and back bit for bit; what does not fit or has changed is refused."""

import ast
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import assert_refusal, refusal
from support.pretraining_reference import their_config
from support.transformers_models import PIECES, SHAPE, change_config, change_weights, our_weights, same, their_model
from torch import Tensor
from transformers import BertForMaskedLM, BertModel

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


def their_weights() -> dict[str, Tensor]:
    """As they would be saved: without the copy of the decoder."""
    return {name: each for name, each in their_model().state_dict().items() if ".predictions.decoder." not in name}


def with_old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as they were in 2018, with the buffer and the copy that checkpoints of that time have."""
    places = {"bert.embeddings.position_ids": torch.arange(40)[None], DECODER: state[WORDS].clone()}
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        state = {each.replace(new, name): weight for each, weight in state.items()}
    return state | places


def without_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("bert."): weight for name, weight in state.items()}


BIAS, DECODER = "cls.predictions.bias", "cls.predictions.decoder.weight"
WORDS, DENSE = "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.output.dense.weight"


def test_old_names_are_understood_and_half_precision_becomes_single() -> None:
    state = their_weights()
    renamed = {("cls.predictions.decoder.bias" if name == BIAS else name): state[name] for name in state}
    old = with_old_names(dict(state))
    for other in (old, without_prefix(state), renamed, without_prefix(old)):
        assert same(import_weights(other, SHAPE)[0], import_weights(state, SHAPE)[0])
    half, _ = import_weights({name: each.bfloat16() for name, each in state.items()}, SHAPE)
    assert {weight.dtype for weight in half.values()} == {torch.float32}


SPECIAL = Special(0, 1, 2, 3, 4)
MASKED_HEAD = [
    f"masked_head.{name}" for name in ("bias", "transform.weight", "transform.bias", "norm.weight", "norm.bias")
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


ONE, OTHER = torch.zeros(48, 32), torch.ones(104, 32)


@pytest.mark.parametrize(
    ("gone", "added", "message"),
    [
        (None, {"classifier.weight": ONE}, r"classifier.weight \(48, 32\) has no place"),
        (None, {"bert.encoder.layer.2.output.dense.bias": ONE[0]}, r"layer\.2\.output\.dense\.bias .* 2 layers"),
        (DENSE, {DENSE + "s": ONE.T}, rf"(?s){DENSE}s .*no place.*{DENSE} is missing"),
        (None, {DENSE: ONE}, rf"{DENSE} is \(48, 32\); by the config it should be \(32, 48\)"),
        (DENSE, {}, f"{DENSE} is missing"),
        ("bert.encoder.layer.0.attention.self.key.bias", {}, r"self\.key\.bias is missing$"),
        ("cls.predictions.transform.dense.bias", {}, r"cls\.predictions\.transform\.dense\.bias is missing$"),
        ("bert.pooler.dense.weight", {}, r"bert\.pooler\.dense\.weight is missing$"),
        (None, {"bert.embeddings.LayerNorm.gamma": OTHER[0]}, "are the same weight"),
        (None, {DECODER: OTHER[:99]}, "decoder of its own"),
        (None, {DECODER: OTHER}, r"\(104, 32\) differs .*\(99, 32\)"),
        (None, {"cls.predictions.bias": torch.zeros(99, dtype=torch.int8)}, "torch.int8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(gone: str | None, added: dict[str, Tensor], message: str) -> None:
    state = {name: each for name, each in their_weights().items() if name != gone} | added
    assert_refusal(message, import_weights, state, SHAPE, "folder")


def test_another_model_names_its_first_weights_only() -> None:
    told = refusal(import_weights, {f"decoder.{number}": torch.zeros(3) for number in range(1000)}, SHAPE, "folder")
    assert len(told.splitlines()) == LISTED


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


def verify_exported(folder: Path) -> None:
    verify_export(folder, SHAPE, compute_probe(SHAPE, our_weights(), SPECIAL), SPECIAL)


NAMES = """bert.embeddings.position_embeddings.weight bert.encoder.layer.0.attention.self.query.weight
bert.encoder.layer.1.output.LayerNorm.bias bert.pooler.dense.weight cls.predictions.bias cls.seq_relationship.bias"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_weight_that_changed_on_its_way_is_noticed(name: str, exported: Path) -> None:
    change_weights(exported, lambda state: state[name].add_(0.01 * torch.randn(state[name].shape)))
    assert_refusal("not exported: .* logits read back by Cloze differ", verify_exported, exported)


def test_numbers_that_are_none_and_a_config_that_changed_are_noticed(exported: Path) -> None:
    change_config(exported, layer_norm_eps=1e-5)
    assert_refusal("not exported", verify_exported, exported)
    change_weights(exported, lambda state: state["cls.predictions.bias"].mul_(torch.nan))
    assert_refusal("no numbers", verify_exported, exported)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_transformers_has_its_say(name: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that we make in writing and again in reading: only transformers can notice it."""
    change_weights(exported, lambda state: state[f"bert.encoder.layer.0.attention.self.{name}.weight"].mul_(1.01))
    monkeypatch.setattr(verify, "read_folder", lambda _: (SHAPE, our_weights(), ()))
    assert_refusal("read back by transformers differ", verify_exported, exported)
    change_weights(exported, lambda state: state.pop("bert.pooler.dense.bias"))
    assert_refusal(r"transformers reports .*bert\.pooler\.dense\.bias", verify_exported, exported)


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


@pytest.mark.parametrize(("positions", "segments"), [(1, 1), (2, 2), (5, 1), (512, 2)])
def test_the_test_sequences_fit_any_model(positions: int, segments: int) -> None:
    small = replace(SHAPE, positions=positions, segments=segments)
    batch = make_probe(small, SPECIAL)
    assert sum(batch.lengths) == len(batch.pieces) == int(batch.starts[-1])
    assert (max(batch.lengths), int(batch.segments.max()) < segments) == (positions, True)
    assert {*SPECIAL[:positions]} <= {*batch.pieces.tolist()}
    model = build_model(small).initialize(1).eval()
    shapes = [tuple(each.shape) for each in MLM.logits(model, model.states_for_heads(batch), batch).values()]
    assert shapes == [(len(batch.chosen), small.vocabulary), (3, 2)]


def learn_by(name: str) -> Shape:
    objective = objectives()[name]
    return SHAPE.change_learning(objective=name, sees=objective.sees, pairs=objective.uses_pairs)


SHAPES: dict[Sees, Shape] = {"both": learn_by("mlm"), "before": learn_by("ltr"), "after": learn_by("rtl")}


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
    folder = Path('my "own" run/d\'été 😀\\')
    told = describe_loading(SHAPES[sees], folder).partition(";")[0]
    assert (f"transformers.{kind}.from_pretrained(" if kind else "finetuning/run_task.py TASK.toml") in told
    assert (kind is None) == ("transformers." not in told)
    call = ast.parse(told, mode="eval").body if kind else None
    assert (ast.literal_eval(call.args[0]) if isinstance(call, ast.Call) else shlex.split(told)[-1]) == str(folder)
