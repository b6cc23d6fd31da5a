"""Weights and folders of transformers: out, in, and every kind of damage."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import SPECIAL, Vocabulary
from pretraining.huggingface.folders import read_folder, write_folder
from pretraining.huggingface.weights import LISTED, _padded, from_transformers, list_weights, to_transformers
from pretraining.model.batch import Batch
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape

SHAPE = Shape(layers=2, hidden=32, heads=2, intermediate=48, vocabulary=99, positions=40)
LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
PIECES = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *(f"word{number}" for number in range(42)))


def fill(parameters: Iterator[Tensor], seed: int = 0) -> None:
    """Weights so large that every one of them matters to the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def our_weights(seed: int = 0) -> dict[str, Tensor]:
    model = Bert(SHAPE)
    fill(model.parameters(), seed)
    state = model.state_dict()
    for name in ("embeddings.word.weight", "masked_head.bias"):
        state[name][SHAPE.vocabulary :] = 0
    return state


def their_config(**settings: Any) -> BertConfig:
    return BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
        **settings,
    )


def their_model(kind: Any = BertForPreTraining, **settings: Any) -> Any:
    model = kind(their_config(**settings))
    fill(model.parameters())
    return model.eval()


def their_weights(kind: Any = BertForPreTraining) -> dict[str, Tensor]:
    """As they would be saved: without the copy of the decoder."""
    state = {name: weight.detach().clone() for name, weight in their_model(kind).state_dict().items()}
    return {name: weight for name, weight in state.items() if not name.startswith("cls.predictions.decoder.")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A folder with a vocabulary, as shard.py writes it."""
    Vocabulary(PIECES, cased=False).write(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def exported(tmp_path: Path, vocabulary: Path) -> Path:
    """A folder that we wrote."""
    write_folder(tmp_path / "exported", SHAPE, our_weights(), vocabulary, "a card\n")
    return tmp_path / "exported"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that transformers wrote."""
    their_model().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What transformers has to say."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(listener)
    yield found
    logger.removeHandler(listener)


# ---- names and sizes


def test_the_list_is_that_of_our_model() -> None:
    sizes = {weight.ours: _padded(weight, SHAPE) for weight in list_weights(SHAPE)}
    assert sizes == {name: tuple(weight.shape) for name, weight in Bert(SHAPE).state_dict().items()}


def test_we_write_the_weights_that_transformers_writes(folder: Path) -> None:
    theirs = load_file(folder / "model.safetensors")
    ours = to_transformers(our_weights(), SHAPE)
    assert {name: weight.shape for name, weight in ours.items()} == {name: each.shape for name, each in theirs.items()}


def test_there_and_back_keeps_every_bit() -> None:
    state = our_weights()
    back, missing = from_transformers(to_transformers(state, SHAPE), SHAPE)
    assert same(back, state)
    assert missing == ()


def test_query_key_and_value_are_taken_in_this_order() -> None:
    state = our_weights()
    theirs = to_transformers(state, SHAPE)
    for name, rows in (("query", slice(0, 32)), ("key", slice(32, 64)), ("value", slice(64, 96))):
        for end in ("weight", "bias"):
            found = theirs[f"bert.encoder.layer.1.attention.self.{name}.{end}"]
            assert torch.equal(found, state[f"layers.1.attention.qkv.{end}"][rows])


def test_what_is_made_shares_no_memory_with_the_model() -> None:
    state = our_weights()
    theirs = to_transformers(state, SHAPE)
    state["next_head.weight"].zero_()
    assert theirs["cls.seq_relationship.weight"].abs().sum() > 0


# ---- in


@torch.no_grad()
def test_weights_of_transformers_give_its_logits(folder: Path) -> None:
    shape, state, missing = read_folder(folder)
    assert shape == SHAPE
    assert missing == ()
    model = Bert(shape)
    model.load_state_dict(state)
    model.eval()
    lengths = [40, 7, 23]
    pieces = torch.randint(0, 99, (3, 40), generator=torch.Generator().manual_seed(1))
    segments = (torch.arange(40) >= torch.tensor([[20], [3], [11]])).long()
    real = torch.arange(40) < torch.tensor(lengths)[:, None]
    theirs = BertForPreTraining.from_pretrained(folder).eval()(
        input_ids=pieces, token_type_ids=segments, attention_mask=real.long()
    )
    batch = Batch(
        pieces=pieces[real],
        segments=segments[real],
        positions=torch.arange(40).expand(3, 40)[real],
        starts=torch.tensor([0, 40, 47, 70], dtype=torch.int32),
        chosen=torch.arange(70),
        labels=torch.zeros(70, dtype=torch.int64),
        random_next=torch.zeros(3, dtype=torch.int64),
        lengths=tuple(lengths),
        examples=torch.zeros(3, 2, dtype=torch.int64).numpy(),
    )
    masked, next_sentence = model.heads(model.encode(batch), batch)
    torch.testing.assert_close(masked, theirs.prediction_logits[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(next_sentence, theirs.seq_relationship_logits, atol=1e-5, rtol=1e-5)


def old(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as they were in 2018, with the buffer and the copy that checkpoints of that time have."""
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in state.items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
    return state


def with_copy_alone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    state["cls.predictions.decoder.bias"] = state.pop("cls.predictions.bias")
    return state


def without_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("bert."): weight for name, weight in state.items()}


def in_half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.bfloat16() for name, weight in state.items()}


@pytest.mark.parametrize("change", [old, without_prefix, with_copy_alone, lambda state: without_prefix(old(state))])
def test_old_names_are_understood(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    state = their_weights()
    assert same(from_transformers(change(dict(state)), SHAPE)[0], from_transformers(state, SHAPE)[0])


def test_half_precision_becomes_single() -> None:
    state, _ = from_transformers(in_half(their_weights()), SHAPE)
    assert {weight.dtype for weight in state.values()} == {torch.float32}


POOLER = ["pooler.weight", "pooler.bias"]
MASKED_HEAD = [
    *("masked_head.transform.weight", "masked_head.transform.bias"),
    *("masked_head.norm.weight", "masked_head.norm.bias", "masked_head.bias"),
]
NEXT_HEAD = ["next_head.weight", "next_head.bias"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: their_model(BertModel), MASKED_HEAD + NEXT_HEAD),
        (lambda: BertModel(their_config(), add_pooling_layer=False), POOLER + MASKED_HEAD + NEXT_HEAD),
        (lambda: their_model(BertForMaskedLM), POOLER + NEXT_HEAD),
    ],
    ids=["encoder", "encoder without pooler", "masked language model"],
)
def test_heads_that_are_missing_are_named(model: Callable[[], Any], expected: list[str], tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    _, state, missing = read_folder(tmp_path)
    assert list(missing) == expected
    assert state.keys() == Bert(SHAPE).state_dict().keys() - set(missing)


def write_bin(folder: Path) -> None:
    torch.save(old(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def write_parts(folder: Path, ending: str) -> None:
    """In two files with an index."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, _, end = ending.partition(".")
    places = {name: f"{stem}-0000{1 + number % 2}-of-00002.{end}" for number, name in enumerate(sorted(state))}
    for file in set(places.values()):
        part = {name: state[name] for name, place in places.items() if place == file}
        save_file(part, folder / file) if end == "safetensors" else torch.save(part, folder / file)
    (folder / f"{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_parts_of_transformers(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    their_model().save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    "write",
    [
        write_bin,
        lambda folder: write_parts(folder, "model.safetensors"),
        lambda folder: write_parts(folder, "pytorch_model.bin"),
        write_parts_of_transformers,
    ],
    ids=["bin", "parts", "bin in parts", "parts of transformers"],
)
def test_weights_are_read_from_every_kind_of_file(write: Callable[[Path], None], folder: Path) -> None:
    _, expected, _ = read_folder(folder)
    write(folder)
    assert same(read_folder(folder)[1], expected)


# ---- strict


def rename(old_name: str, new_name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[new_name] = state.pop(old_name)

    return change


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
        (rename(DENSE, DENSE + "s"), rf"(?s){DENSE}s .*no place.*{DENSE} is missing"),
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
    with pytest.raises(UserError, match=message):
        from_transformers(state, SHAPE, "folder")


def test_weights_of_a_finished_task_are_refused(tmp_path: Path) -> None:
    their_model(BertForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"classifier\.weight \(2, 32\) has no place"):
        read_folder(tmp_path)


def test_another_model_names_its_first_weights_only() -> None:
    with pytest.raises(UserError) as caught:
        from_transformers({f"decoder.{number}": torch.zeros(3) for number in range(1000)}, SHAPE, "folder")
    assert len(str(caught.value).splitlines()) == LISTED + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta'; only 'bert'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"is_decoder": True, "hidden_act": "relu"}, r"(?s)hidden_act.*is_decoder"),
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
    with pytest.raises(UserError, match=message):
        read_folder(folder)


def test_a_config_without_what_is_usual_means_the_usual(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in config.items() if name.endswith(("size", "num_hidden_layers", "heads"))}
    (folder / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 40}))
    assert read_folder(folder)[0] == SHAPE
    del sizes["hidden_size"]
    (folder / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UserError, match="hidden_size is None"):
        read_folder(folder)


# ---- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


class Hostile:
    """What runs a command where a pickle of it is loaded without care."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def in_bin(content: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content(folder), folder / "pytorch_model.bin")

    return change


def cut_bin(folder: Path) -> None:
    write_bin(folder)
    cut(folder / "pytorch_model.bin")


def in_parts(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        write_parts(folder, "model.safetensors")
        change(folder)

    return both


def point_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json: not a table"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: cut(folder / "model.safetensors"), "not a whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
        (in_bin(lambda folder: {"x": Hostile(folder / "mark")}), "more than tensors, which is never executed"),
        (in_bin(lambda folder: [torch.zeros(3)]), "not a dictionary of weights"),
        (in_bin(lambda folder: {"bert.pooler.dense.bias": 3}), "not a dictionary of weights"),
        (cut_bin, r"pytorch_model\.bin: cannot be read"),
        (in_parts(lambda folder: (folder / "model-00002-of-00002.safetensors").unlink()), "00002.safetensors: missing"),
        (in_parts(lambda folder: cut(folder / "model-00002-of-00002.safetensors")), "not a whole safetensors file"),
        (
            in_parts(lambda folder: save_file({}, folder / "model-00002-of-00002.safetensors")),
            "does not hold what the index says",
        ),
        (in_parts(point_outside), "not a file beside it"),
    ],
)
def test_damage_is_named(change: Callable[[Path], Any], message: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(UserError, match=message):
        read_folder(folder)
    assert not (folder / "mark").exists()


# ---- out


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForPreTraining, AutoModelForMaskedLM])
def test_transformers_loads_an_exported_folder_like_one_of_its_own(
    kind: Any, exported: Path, folder: Path, messages: list[str]
) -> None:
    """Newer versions list the heads that a class leaves out, in their own folders too; there is nothing else."""
    _, found = kind.from_pretrained(exported, output_loading_info=True)
    ours = [message.replace(str(exported), "") for message in messages]
    messages.clear()
    _, wanted = kind.from_pretrained(folder, output_loading_info=True)
    theirs = [message.replace(str(folder), "") for message in messages]
    assert found == wanted
    assert [sorted(message.splitlines()) for message in ours] == [sorted(message.splitlines()) for message in theirs]
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]
    if kind is AutoModelForPreTraining:
        assert not any(found.values())
        assert not ours


def test_transformers_takes_every_weight_bit_for_bit(exported: Path) -> None:
    model = AutoModelForPreTraining.from_pretrained(exported)
    state = to_transformers(our_weights(), SHAPE)
    found = model.state_dict()
    assert found.pop("cls.predictions.decoder.weight").equal(state["bert.embeddings.word_embeddings.weight"])
    assert found.pop("cls.predictions.decoder.bias").equal(state["cls.predictions.bias"])
    assert same(dict(found), state)
    assert model.dtype == torch.float32


def test_the_file_says_whose_tensors_it_holds(exported: Path) -> None:
    """Older versions of transformers refuse a file that does not."""
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_config_is_the_one_of_transformers(exported: Path, folder: Path) -> None:
    ours, theirs = (BertConfig.from_pretrained(each).to_dict() for each in (exported, folder))
    differ = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert differ <= {"transformers_version", "_name_or_path"}


def test_the_tokenizer_loads_in_silence(exported: Path, messages: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = AutoTokenizer.from_pretrained(exported)
    assert messages == []
    assert tokenizer("Ab c [MASK]")["input_ids"] == [PIECES.index(p) for p in "[CLS] a ##b c [MASK] [SEP]".split()]
    assert tokenizer.model_max_length == SHAPE.positions
    assert tokenizer.mask_token == "[MASK]"


def test_other_types_of_numbers(tmp_path: Path, vocabulary: Path) -> None:
    write_folder(tmp_path / "half", SHAPE, our_weights(), vocabulary, "", torch.bfloat16)
    assert {weight.dtype for weight in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    _, state, _ = read_folder(tmp_path / "half")
    assert torch.equal(state["pooler.weight"], our_weights()["pooler.weight"].bfloat16().float())


def test_the_vocabulary_of_an_export_serves_the_next(exported: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "again", SHAPE, our_weights(), exported, "a card\n")
    for path in exported.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_a_new_export_replaces_the_old(exported: Path, vocabulary: Path) -> None:
    write_folder(exported, SHAPE, our_weights(1), vocabulary, "")
    assert same(read_folder(exported)[1], our_weights(1))
    assert sorted(path.name for path in exported.parent.iterdir()) == ["data", "exported"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, UserError, OSError])
def test_an_interrupted_export_leaves_the_old_one(
    interruption: type[BaseException], exported: Path, vocabulary: Path
) -> None:
    def interrupt(unfinished: Path) -> None:
        assert same(read_folder(unfinished)[1], our_weights(1))
        raise interruption("stop")

    with pytest.raises(UserError if interruption is OSError else interruption):
        write_folder(exported, SHAPE, our_weights(1), vocabulary, "", check=interrupt)
    assert same(read_folder(exported)[1], our_weights())
    assert sorted(path.name for path in exported.parent.iterdir()) == ["data", "exported"]


def test_the_old_export_comes_back_where_the_new_cannot_take_its_name(
    exported: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proper = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "exported.tmp":
            raise OSError("no more names")
        return proper(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match="no more names"):
        write_folder(exported, SHAPE, our_weights(1), vocabulary, "")
    assert same(read_folder(exported)[1], our_weights())


def test_what_a_killed_run_left_is_cleared_away(exported: Path, vocabulary: Path) -> None:
    """Killed between the two renames: the old export waits under its other name, and comes back before anything."""
    exported.rename(exported.with_name("exported.old"))
    unfinished = exported.with_name("exported.tmp")
    unfinished.mkdir()
    (unfinished / "config.json.tmp").write_text("{")

    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(exported, SHAPE, our_weights(1), vocabulary, "", check=interrupt)
    assert same(read_folder(exported)[1], our_weights())
    write_folder(exported, SHAPE, our_weights(1), vocabulary, "")
    assert sorted(path.name for path in exported.parent.iterdir()) == ["data", "exported"]


@pytest.mark.parametrize("name", ["exported", "exported.tmp", "exported.old"])
def test_folders_of_others_are_left_alone(name: str, tmp_path: Path, vocabulary: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=rf"{name}: would be replaced, but holds thesis\.tex"):
        write_folder(tmp_path / "exported", SHAPE, our_weights(), vocabulary, "")
    assert (tmp_path / name / "thesis.tex").exists()


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path, vocabulary: Path) -> None:
    (tmp_path / "exported").write_text("notes")
    with pytest.raises(UserError, match="a file; name a folder"):
        write_folder(tmp_path / "exported", SHAPE, our_weights(), vocabulary, "")


def test_values_that_are_no_numbers_are_refused(tmp_path: Path, vocabulary: Path) -> None:
    state = our_weights()
    state["layers.1.attention.qkv.bias"][40] = float("nan")
    with pytest.raises(UserError, match=r"layer\.1\.attention\.self\.key\.bias has values that are no numbers"):
        write_folder(tmp_path / "exported", SHAPE, state, vocabulary, "")
    assert not (tmp_path / "exported").exists()


def test_a_vocabulary_that_disagrees_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    Vocabulary(PIECES[:-1], cased=False).write(vocabulary)
    with pytest.raises(UserError, match="98 pieces, but the model has 99"):
        write_folder(tmp_path / "exported", SHAPE, our_weights(), vocabulary, "")
    (vocabulary / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        write_folder(tmp_path / "exported", SHAPE, our_weights(), vocabulary, "")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, vocabulary: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_folder(tmp_path / "file" / "exported", SHAPE, our_weights(), vocabulary, "")


def test_transformers_is_not_needed() -> None:
    code = "import sys, pretraining.huggingface.folders, pretraining.export; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
