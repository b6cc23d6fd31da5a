"""A model that a run begins with: its weights in a new model, with new pieces and positions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.base_models import swapped, write_bert
from support.commands import assert_refusal
from support.transformers_models import PIECES
from transformers import AutoModelForPreTraining, AutoTokenizer, BertForMaskedLM, BertModel

from data_prep.vocabulary.kinds.bytelevel import KIND, make_vocabulary
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.state import RunState
from pretraining.config.overrides import list_sizes
from pretraining.huggingface.folders import write_folder
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model, objectives
from pretraining.training.origin import begin_with, find_difference

BASE = WordPiece(PIECES, cased=False)
MORE = WordPiece((*PIECES, "river", "中", "é"), cased=False)


def begun(folder: Path, vocabulary: Vocabulary, positions: int = 64) -> tuple[PretrainingModel, str]:
    """A new model with the weights of a folder, and what was said of it."""
    origin = StoredModel.open(str(folder))
    sizes: dict[str, Any] = {**list_sizes(origin.shape), "vocabulary": len(vocabulary), "positions": positions}
    shape = Shape(**sizes)
    model = build_model(shape).initialize(1)
    return model, begin_with(model, RunState(), origin, vocabulary)


def test_text_without_new_words_has_the_logits_that_it_had(tmp_path: Path) -> None:
    """Exported and loaded in transformers: embeddings and biases of new pieces are the means of those they replace."""
    bert = write_bert(tmp_path / "bert", BASE)
    model, said = begun(bert, MORE, positions=80)
    begins = f"begins with {bert}: 2 layers of 32, {len(PIECES)} pieces"
    assert said == f"{begins}; anew: positions 64 to 79, 3 pieces, each the mean of those that it replaces"
    MORE.write(tmp_path / "more")
    write_folder(tmp_path / "out", model.shape, model.state_dict(), tmp_path / "more", "a card\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    old, new = (AutoModelForPreTraining.from_pretrained(folder).eval() for folder in (bert, tmp_path / "out"))
    given = tokenizer("the word1 is a ##b", return_tensors="pt")
    assert given["input_ids"][0].tolist() == AutoTokenizer.from_pretrained(bert)("the word1 is a ##b")["input_ids"]
    with torch.no_grad():
        before, after = (each(**given) for each in (old, new))
    assert torch.allclose(after.prediction_logits[..., : len(PIECES)], before.prediction_logits, atol=1e-5)
    assert torch.allclose(after.seq_relationship_logits, before.seq_relationship_logits, atol=1e-5)
    was, now = (each.get_input_embeddings().weight.detach() for each in (old, new))
    assert torch.equal(now[: len(PIECES)], was)
    letters = [PIECES.index(piece) for piece in ("r", "##i", "##v", "##e", "##r")]
    means = was[letters].mean(0), was.mean(0), was[PIECES.index("e")]  # of the second, no piece has its character
    assert torch.allclose(now[len(PIECES) : len(MORE)], torch.stack(means), atol=1e-6)
    bias = new.cls.predictions.bias.detach()
    assert torch.allclose(bias[len(PIECES)], old.cls.predictions.bias[letters].mean())


def test_rows_without_a_piece_and_the_padding_are_left_out(tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert", BASE)
    few = WordPiece(PIECES[:-7], cased=False)
    few.write(bert)
    model, said = begun(bert, WordPiece((*few.pieces, "river"), cased=False))
    assert f"{len(PIECES) - 7} pieces; anew: 1 pieces" in said
    rows = model.embeddings.word.weight.detach()
    assert not rows[len(few) + 1 :].any()
    assert not model.head("masked_head").bias[len(few) + 1 :].any()


def test_an_encoder_without_heads(tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert", BASE)
    BertModel.from_pretrained(bert).save_pretrained(tmp_path / "encoder")
    told = r"neither vocab.txt nor tokenizer.json: copy them from where the model comes"
    assert_refusal(told, StoredModel.open, str(tmp_path / "encoder"))
    BASE.write(tmp_path / "encoder")
    model, said = begun(tmp_path / "encoder", MORE)
    assert "anew: masked head, next-sentence head, 3 pieces" in said
    assert not model.head("masked_head").bias.any()


def test_text_was_as_long_as_the_tokenizer_lets_through_and_more_pieces_than_rows_are_refused(tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert", BASE)
    assert StoredModel.open(str(bert)).trained == 64
    config = bert / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"model_max_length": 64', '"model_max_length": 48'))
    assert (StoredModel.open(str(bert)).trained, StoredModel.open(str(bert)).known) == (48, 64)
    MORE.write(bert)
    assert_refusal("102 pieces, but the model has only 99", StoredModel.open, str(bert))


def test_the_first_piece_that_differs_is_named(tmp_path: Path) -> None:
    origin, pieces = StoredModel.open(str(write_bert(tmp_path / "bert", BASE))), KIND.make_up(300, cased=True)
    theirs, table = replace(origin, vocabulary=pieces), json.loads(pieces.list_contents()["tokenizer.json"])
    table["pre_tokenizer"]["add_prefix_space"] = True
    for base, vocabulary, said in (
        (origin, BASE, None),
        (origin, MORE, None),
        (theirs, pieces, None),
        (origin, swapped(BASE, 20, 30), f"piece 20 is {PIECES[20]!r} in NAME and {PIECES[30]!r} in the data"),
        (replace(origin, vocabulary=MORE), BASE, "NAME has 102 pieces, the data only the first 99 of them"),
        (origin, pieces, "the vocabulary of NAME is WordPiece, uncased, that of the data byte-level BPE, cased"),
        (origin, WordPiece(PIECES, cased=True), "NAME is WordPiece, uncased, that of the data WordPiece, cased"),
        (theirs, make_vocabulary(table, {}, tmp_path), "the data cuts text with the pieces of NAME in another way"),
    ):
        found = find_difference(base, vocabulary)
        assert (found is None) == (said is None)
        assert str(said).replace("NAME", origin.name) in str(found)


@pytest.mark.parametrize("name", [name for name, objective in objectives().items() if objective.sees != "both"])
@pytest.mark.parametrize("pairs", [True, False])
def test_what_saw_both_sides_may_learn_one_way_and_that_is_said(tmp_path: Path, name: str, pairs: bool) -> None:
    bert = write_bert(tmp_path / "bert", BASE)
    if not pairs:
        BertForMaskedLM.from_pretrained(bert).save_pretrained(bert)
    origin, sees = StoredModel.open(str(bert)), objectives()[name].sees
    model = build_model(origin.shape.change_learning(objective=name, sees=sees, pairs=False)).initialize(1)
    said = begin_with(model, RunState(), origin, BASE)
    assert ("; left out: pooler, next-sentence head" in said) == pairs
    weights = origin.read_weights()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
