"""Scores of sentences and shards are those of plain scorers, and continuations those of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.base_models import write_bert
from support.commands import assert_refusal, run_main
from support.training import Place
from support.transformers_models import PIECES, SHAPE, our_weights, their_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BertForMaskedLM, BertForSequenceClassification

from data_prep.vocabulary.kinds.bytelevel import KIND
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from pretraining import evaluate
from pretraining.architectures.bert import Bert
from pretraining.checkpoint.models import StoredModel
from pretraining.data.batches import validation_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.model.batch import pack
from pretraining.objectives.declaration import build_model, find_objective, objectives
from pretraining.scoring.pairs import Asked, Pair, are_right, list_sentences
from pretraining.scoring.sentences import Scorer, Sentences, fill_masks

CPU = torch.device("cpu")
VOCABULARY = WordPiece(PIECES, cased=False)
WORDS = st.sampled_from(["word1", "word2", "word41", "a", "abc", "xyz", "queue", "?", "word1x", "[MASK]"])
TEXTS = st.lists(st.lists(WORDS, max_size=9).map(" ".join), min_size=1, max_size=6)


def our_scorer(**changed: Tensor) -> Scorer:
    model = build_model(SHAPE)
    model.load_state_dict(our_weights() | changed)
    return Scorer(model, VOCABULARY, CPU)


@torch.no_grad()
def their_score(model: Any, tokenizer: Any, text: str) -> float:
    """One copy after another, in plain PyTorch."""
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    starts = [not tokenizer.convert_ids_to_tokens(piece).startswith("##") for piece in ids]
    total = 0.0
    model.train(False)
    for place in range(1, len(ids) - 1):
        end = next(later for later in range(place + 1, len(ids)) if starts[later])
        copy = [tokenizer.mask_token_id if place <= at < end else piece for at, piece in enumerate(ids)]
        logits = model(input_ids=torch.tensor([copy])).logits[0, place]
        total += float(logits.log_softmax(0)[ids[place]])
    return total


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bert")
    their_model().save_pretrained(found)
    VOCABULARY.write(found)
    return found


def test_every_pair_is_scored_as_by_a_plain_scorer_on_transformers(folder: Path) -> None:
    draw = np.random.default_rng(0)
    words = ["word1", "word7", "word33", "abc", "q", "xyzzy", "?", "é", "Word2", "unknown9"]
    texts = [" ".join(draw.choice(words, draw.integers(1, 10))) for _ in range(14)]
    theirs, tokenizer = BertForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model = StoredModel.open(str(folder))
    found = Scorer(model.build_pretrained(), model.vocabulary, CPU).score(texts)
    expected = [their_score(theirs, tokenizer, text) for text in texts]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert len({*np.sign(found[::2] - found[1::2])}) > 1


@settings(max_examples=12)
@given(TEXTS)
def test_the_score_of_a_sentence_does_not_depend_on_its_neighbours(texts: list[str]) -> None:
    together = SCORER.score(texts)
    alone = [float(SCORER.score([text])[0]) for text in texts]
    np.testing.assert_allclose(together, alone, atol=1e-4)


SCORER = our_scorer()


@pytest.mark.parametrize("name", [name for name, each in objectives().items() if each.sees != "both"])
def test_a_model_of_one_direction_is_asked_once_for_all_pieces(name: str) -> None:
    """What stands at a piece and on its other side may be anything."""
    objective = objectives()[name]
    shape = SHAPE.change_learning(objective=name, pairs=False, sees=objective.sees)
    model = build_model(shape).initialize(3)
    text = "word1 abc word2 ?"
    found = Scorer(model, VOCABULARY, CPU).score([text, "word3", text])
    assert found[0] == found[2]
    pieces, draw = SCORER.cut_texts([text]).pieces, np.random.default_rng(0)
    decoder, total, before = model.embeddings.word.weight, 0.0, objective.sees == "before"
    for place in range(1, len(pieces) - 1):
        noise = draw.integers(5, SHAPE.vocabulary, len(pieces))
        is_seen = np.arange(len(pieces)) < place if before else np.arange(len(pieces)) > place
        states = encode(model, np.where(is_seen, pieces, noise))
        logits = model.head("masked_head").logits(states[[place - 1 if before else place + 1]], decoder)[0]
        total += float(logits.log_softmax(0)[pieces[place]])
    assert found[0] == pytest.approx(total, abs=1e-4)


@torch.no_grad()
def encode(model: Any, pieces: Any) -> Any:
    """The hidden states of a sentence in pieces."""
    none = np.empty(0, np.int64)
    return model.encode(pack(Sentences(pieces, np.array([len(pieces)])).rows(), pieces, none, none))


def test_a_long_sentence_is_asked_in_parts_and_one_that_is_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(["word1", "word2", "abc"] * 6)
    whole = SCORER.score([text])
    monkeypatch.setattr(SCORER, "_together", 100)
    parts = SCORER.parts(SCORER.cut_texts([text]))
    assert len(parts) > 5
    np.testing.assert_allclose(SCORER.score([text]), whole, atol=1e-4)
    found = SCORER.score([text, " ".join(["word1"] * 39), "word1"])
    assert np.isnan(found).tolist() == [False, True, False]


def test_a_sentence_of_which_no_piece_is_left_has_no_score() -> None:
    """It would be the likeliest of all: nothing is asked of it."""
    one_way = build_model(SHAPE.change_learning(objective="ltr", pairs=False, sees="before")).initialize(0)
    for scorer in (SCORER, Scorer(one_way, VOCABULARY, CPU)):
        assert np.isnan(scorer.score(["\u200b", "word1", "\x01\x02"])).tolist() == [True, False, True]


def test_what_says_nothing_of_a_model_is_counted_and_a_tie_is_wrong() -> None:
    long = "word1 " * 39
    pairs = [Pair("a", "b"), Pair("a", "a"), Pair(long, "\u200b"), Pair("\u200b", "a"), Pair(long, long)]
    asked = Asked.from_pairs(pairs, SCORER.cut_texts(list_sentences(pairs)), SHAPE.positions)
    assert are_right(np.array([[-1.0, -2.0], [-2.0, -1.0], [-1.5, -1.5]])).tolist() == [True, False, False]
    assert (asked.equal, asked.too_long, asked.without_pieces, asked.telling) == (2, 2, 1, 1)
    asked.require_telling("pairs.tsv")
    untelling = Asked.from_pairs(pairs[1:], SCORER.cut_texts(list_sentences(pairs[1:])), SHAPE.positions)
    assert_refusal("none of its 4 pairs", untelling.require_telling, "pairs.tsv")


def test_a_folder_without_the_heads_of_pretraining_is_refused(tmp_path: Path) -> None:
    their_model(BertForSequenceClassification).save_pretrained(tmp_path)
    VOCABULARY.write(tmp_path)
    assert_refusal("was fine-tuned, so", StoredModel.open(str(tmp_path)).build_pretrained)
    kept = {name: each for name, each in their_model().state_dict().items() if not name.startswith("cls.")}
    their_model().save_pretrained(tmp_path, state_dict=kept)
    assert_refusal("has no masked_head, next_head", StoredModel.open(str(tmp_path)).build_pretrained)


def test_a_model_that_says_no_numbers_is_refused() -> None:
    none = {"masked_head.norm.bias": torch.full((SHAPE.hidden,), torch.nan)}
    assert_refusal("no numbers", our_scorer(**none).score, ["word1"])


def test_a_model_of_one_direction_fills_in_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StoredModel.open(str(folder))
    [best] = fill_masks(model, "word1 [MASK]", CPU)
    assert len(best) == 5
    one_way = build_model(SHAPE.change_learning(objective="rtl", pairs=False, sees="after")).initialize(0)
    monkeypatch.setattr(StoredModel, "build_pretrained", lambda *_, **__: one_way)
    assert_refusal("has never seen a", fill_masks, model, "word1 [MASK]", CPU)


def test_an_architecture_without_faster_layers_scores_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its last layer all pieces attend, and one row goes on."""
    monkeypatch.setattr(Bert, "find_server", lambda _: None)
    scorer, texts = our_scorer(), ["word1", "abc word2 xyz"]
    np.testing.assert_allclose(scorer.score(texts), SCORER.score(texts), atol=1e-4)


EXAMPLES, LENGTH = 24, 32


@torch.no_grad()
def nats_of(model: StoredModel, data: Path) -> list[tuple[str, float]]:
    """The pieces that a model is asked for, with what each costs, from its logits in plain PyTorch."""
    bert, found = model.build_pretrained(), []
    dataset = Dataset(Corpora.one(data), LENGTH, validation=True, objective=find_objective(bert.shape))
    for batch, _ in validation_batches(dataset, 0, 1, 1, EXAMPLES):
        logits = bert.head("masked_head").logits(bert.encode(batch)[batch.chosen], bert.embeddings.word.weight)
        nats = -logits.double().log_softmax(1).gather(1, batch.labels[:, None])[:, 0]
        found += list(zip((model.vocabulary.pieces[label] for label in batch.labels), nats.tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", [name for name, each in objectives().items() if each.sum_of_pieces])
def test_every_objective_is_scored(name: str, shared: Place, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model", shared.data, objective=name)
    words = "--length", LENGTH, "--examples", EXAMPLES, "--json"
    found = json.loads(run_main(evaluate.main, folder, "--data", shared.data, *words))
    asked = nats_of(StoredModel.open(str(folder)), shared.data)
    loss = found["figures"]["masked_loss" if "masked_loss" in found["figures"] else "piece_loss"]
    assert found["predictions"] == len(asked)
    assert loss == pytest.approx(sum(nats for _, nats in asked) / len(asked), rel=1e-5)
    plain = [(piece.removeprefix("##"), nats) for piece, nats in asked if piece not in SPECIAL]
    assert found["characters"] == sum(len(piece) for piece, _ in plain)
    bits = sum(nats for _, nats in plain) / math.log(2) / found["characters"]
    assert found["bits_per_character"] == pytest.approx(bits, rel=1e-5)
    assert sum(found["left_out"].values()) == len(asked) - len(plain)
    assert ("[SEP]" in found["left_out"]) == (objectives()[name].sees != "both")


@pytest.mark.parametrize("words", [["--fill", "a [MASK]"], ["--data", "shards"]])
def test_a_gpu_that_is_not_there_is_told(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "a GPU was asked for" in run_main(evaluate.main, tmp_path, *words, "--device", "cuda", code=2)


def test_masks_of_byte_level_pieces_are_filled_in_as_by_transformers(tmp_path: Path) -> None:
    """The blank before a mask belongs to it, and pieces are shown as text."""
    vocabulary = KIND.train(dict.fromkeys(("The", " river", " bank", "."), 5), 300, cased=True)
    folder = write_bert(tmp_path / "bert", vocabulary)
    [found] = fill_masks(StoredModel.open(str(folder)), "The <mask> bank.", CPU)
    theirs, tokenizer = BertForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    theirs.train(False)
    inputs = tokenizer("The <mask> bank.", return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    best = theirs(**inputs).logits[0, place].softmax(0).topk(5)
    assert [piece for piece, _ in found] == [vocabulary.spellings[id] for id in best.indices.tolist()]
    assert [share for _, share in found] == pytest.approx(best.values.tolist(), rel=1e-5)


TEXT = "word1 Word7 xyz"


def test_a_text_is_continued_as_by_transformers(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "ltr", VOCABULARY, objective="ltr")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :-1]
    found = json.loads(run_main(evaluate.main, folder, "--continue", TEXT, "--json"))["continuation"]
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    expected = theirs[0, 1:].tolist()
    expected = expected[: expected.index(tokenizer.sep_token_id)] if tokenizer.sep_token_id in expected else expected
    assert len(expected) > ids.shape[1]
    assert found == VOCABULARY.spell(expected)


AFTER = "name one that predicts the piece after"


@pytest.mark.parametrize(
    ("objective", "text", "reason"),
    [("mlm", TEXT, AFTER), ("rtl", TEXT, AFTER), ("ltr", "word1 " * 70, "71 pieces, and")],
)
def test_what_cannot_be_continued_is_refused(objective: str, text: str, reason: str, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model", VOCABULARY, objective=objective)
    assert reason in run_main(evaluate.main, folder, "--continue", text, code=2)
