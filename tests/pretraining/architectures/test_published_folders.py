"""Folders in the forms in which models were published, which older versions of transformers wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import transformers_models
from support.commands import assert_refusal
from support.pretraining_reference import SMALL
from support.transformers_models import change_config, change_weights, gpt_config, modern_config, roberta_config
from transformers import AutoTokenizer, GPT2LMHeadModel, ModernBertForMaskedLM, RobertaForMaskedLM

from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from finetuning import prediction
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.models import StoredModel
from pretraining.flags import Export
from pretraining.huggingface.folders import read_folder, read_head
from pretraining.training.exporting import export


def test_gpt_2_without_a_prefix_and_with_masks_among_its_weights(tmp_path: Path) -> None:
    transformers.GPT2Model(gpt_config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "wte.weight" in weights
    masks = {"h.0.attn.bias": torch.ones(1, 1, 96, 96), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    change_weights(tmp_path, lambda state: state.update(masks))
    shape, state, missing = read_folder(tmp_path)
    assert (shape.architecture, shape.learns.objective, missing) == ("gpt", "ltr", ())
    assert torch.equal(state["layers.1.qkv.weight"], weights["h.1.attn.c_attn.weight"].T)


def test_roberta_with_a_pooler_that_nothing_trained(tmp_path: Path) -> None:
    transformers.RobertaModel(roberta_config()).save_pretrained(tmp_path)
    shape, state, missing = read_folder(tmp_path)
    assert (shape.architecture, shape.learns.pairs, shape.positions) == ("roberta", False, 96)
    assert {name.partition(".")[0] for name in missing} == {"masked_head"}
    assert not any(name.startswith("pooler") for name in state)


def load(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder).eval()


def write_roberta(folder: Path, kind: Any = RobertaForMaskedLM, **more: Any) -> Any:
    """Writes a RoBERTa whose embeddings of positions matter, as transformers does, with the default padding: 1."""
    torch.manual_seed(0)
    model = kind(roberta_config(pad_token_id=1, max_position_embeddings=SMALL.positions + 2, **more)).eval()
    with torch.no_grad():
        model.roberta.embeddings.position_embeddings.weight.normal_()
    model.save_pretrained(folder)
    transformers_models.write_wordpiece(folder, SMALL.vocabulary)
    return model


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("RobertaForMaskedLM", lambda folder: export(Export(folder, folder.with_name("out")))),
        ("RobertaForMaskedLM", lambda folder: StoredModel.open(str(folder))),
        ("RobertaForSequenceClassification", prediction.load),
    ],
    ids=["export", "init", "predict"],
)
def test_a_roberta_that_gives_unknown_words_no_position_is_refused(kind: str, read: Any, tmp_path: Path) -> None:
    """Its config has the default pad_token_id, and its tokenizer pads with another piece."""
    write_roberta(tmp_path / "in", getattr(transformers, kind))
    told = r"in: pad_token_id is 1 in config\.json, .*'\[UNK\]', .*'\[PAD\]', 0; .*pad_token_id 0"
    assert_refusal(told, read, tmp_path / "in")


@torch.no_grad()
@pytest.mark.parametrize("where", ["spare", "beyond"])
def test_a_roberta_that_pads_with_what_no_text_has_is_read(where: str, tmp_path: Path) -> None:
    """A spare piece of BERT's vocabulary, or a row without a piece: texts have the same logits."""
    words = tuple(f"word{number}" for number in range(SMALL.vocabulary - len(SPECIAL) - 1))
    pieces = (SPECIAL[0], "[unused0]", *SPECIAL[1:], *words)
    theirs = write_roberta(tmp_path / "in")
    if where == "beyond":
        last = SMALL.vocabulary - 1
        change_config(tmp_path / "in", pad_token_id=last, max_position_embeddings=last + 1 + SMALL.positions)
        name, before = "roberta.embeddings.position_embeddings.weight", torch.zeros(last - 1, SMALL.hidden)
        change_weights(tmp_path / "in", lambda state: state.update({name: torch.cat([before, state[name]])}))
        theirs, pieces = load(RobertaForMaskedLM, tmp_path / "in"), pieces[:-1]
    WordPiece(pieces, cased=False).write(tmp_path / "in")
    export(Export(tmp_path / "in", tmp_path / "out"))
    given = AutoTokenizer.from_pretrained(tmp_path / "out")("word3 nobody word5", return_tensors="pt")
    ours = load(RobertaForMaskedLM, tmp_path / "out")
    assert ours.config.pad_token_id == 0
    torch.testing.assert_close(ours(**given).logits, theirs(**given).logits[..., : len(pieces)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "kind", "name", "given", "written"),
    [
        (roberta_config, RobertaForMaskedLM, "hidden_act", "gelu_python", "gelu"),
        (gpt_config, GPT2LMHeadModel, "activation_function", "gelu_pytorch_tanh", "gelu_new"),
    ],
)
def test_other_names_of_the_same_activation_are_read(
    config: Any, kind: Any, name: str, given: str, written: str, tmp_path: Path
) -> None:
    """An export has the usual name; in transformers it computes the same as the model with the other name."""
    torch.manual_seed(0)
    settings = config()
    setattr(settings, name, given)
    theirs = kind(settings).eval()
    theirs.save_pretrained(tmp_path / "in")
    transformers_models.write_wordpiece(tmp_path / "in", SMALL.vocabulary)
    export(Export(tmp_path / "in", tmp_path / "out"))
    ours, pieces = load(kind, tmp_path / "out"), torch.arange(2, 60)[None]
    assert getattr(ours.config, name) == written
    with torch.no_grad():
        torch.testing.assert_close(ours(pieces).logits, theirs(pieces).logits, atol=1e-6, rtol=1e-5)
    changes: dict[str, Any] = {name: "relu"}
    change_config(tmp_path / "in", **changes)
    assert_refusal(f"{name} is 'relu'; only {written!r}", read_folder, tmp_path / "in")


def test_electra_with_embeddings_that_are_narrower_than_its_layers(tmp_path: Path) -> None:
    transformers.ElectraModel(transformers_models.electra_config(embedding_size=16)).save_pretrained(tmp_path)
    assert_refusal("embedding_size is 16; only that of the layers, 48, is supported", read_folder, tmp_path)


def test_modernbert_with_its_first_names_of_settings(tmp_path: Path) -> None:
    ModernBertForMaskedLM(modern_config()).save_pretrained(tmp_path)
    wanted = read_folder(tmp_path)[0]
    old = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    change_config(tmp_path, layer_types=None, rope_parameters=None, **old)
    assert read_folder(tmp_path)[0] == wanted
    change_config(tmp_path, architectures=["ModernBertForSequenceClassification"])
    assert read_head(tmp_path) == TaskHead("classes", ("LABEL_0", "LABEL_1"), averages=True)
    change_config(tmp_path, classifier_pooling="max")
    assert_refusal("classifier_pooling is 'max'; only 'cls' or 'mean' is supported", read_head, tmp_path)
    change_config(tmp_path, architectures=["ModernBertForTokenClassification"])
    assert read_head(tmp_path) == TaskHead("tags", ("LABEL_0", "LABEL_1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 16}, "heads of 3: .*even width"),
        ({"local_attention": 25}, "a window of 25: .*even number"),
        ({"layer_types": [*["full_attention"] * 2, "sliding_attention", "full_attention"]}, "layer_types is"),
        ({"norm_bias": True}, "norm_bias is True; only False"),
    ],
)
def test_modernberts_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    ModernBertForMaskedLM(modern_config()).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert_refusal(message, read_folder, tmp_path)
