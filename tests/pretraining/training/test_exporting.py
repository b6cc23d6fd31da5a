"""From a run to a folder of transformers: what is checked before the word "exported" is printed."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support.base_models import MNLI, task_weights, write_bert
from support.commands import refusal, run_main
from support.training import Place
from support.transformers_models import PIECES, SHAPE, change_config, change_weights, our_weights, same, their_model
from support.watches import MemoryWatch
from transformers import AutoModelForPreTraining, AutoTokenizer, BertForMaskedLM

from data_prep.common.toml_text import read_toml
from data_prep.shards import Manifest
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.source import read_vocabulary
from pretraining.architectures.declaration import make_shape, read_shape
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.state import RunRecord, RunState
from pretraining.config.settings import Recipe
from pretraining.data.corpora import Corpora
from pretraining.export import main
from pretraining.flags import Export
from pretraining.huggingface import model_card
from pretraining.huggingface.folders import read_folder, write_fine_tuned, write_folder
from pretraining.huggingface.model_card import DataSummary, Provenance, make_model_card
from pretraining.model.shape import Shape
from pretraining.objectives import declaration, ltr
from pretraining.objectives.declaration import build_model, num_parameters
from pretraining.training import exporting
from pretraining.training.exporting import Exportable, describe_training, export
from pretraining.training.finishing import describe_loading


@pytest.fixture(scope="module")
def data(shared: Place) -> Path:
    """A folder of shards."""
    return shared.data


@pytest.fixture
def shape(data: Path) -> Shape:
    return replace(SHAPE, vocabulary=Manifest.read(data).vocabulary_size, positions=64)


@pytest.fixture
def run(data: Path, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, whose checkpoint is of the weights that are usual here."""
    summary, state = DataSummary.from_corpora(Corpora.one(data)), our_weights(shape=shape)

    def read_run(run: Path, average: int | None) -> Exportable:
        made = Provenance(summary, "seed = 1\n", None, 8601, examples_seen=0, dtype="bf16", optimizer="AdamW")
        return Exportable(shape, state, data, 32, "mit", made=made)

    monkeypatch.setattr(exporting, "_read_run", read_run)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def read_config(folder: Path, name: str) -> Any:
    return json.loads((folder / "config.json").read_text())[name]


@pytest.mark.parametrize(("objective", "warns"), [("ltr", True), ("rtl", False), ("mlm", False)])
def test_who_exports_what_transformers_would_classify_with_is_warned(
    objective: str, warns: bool, data: Path, tmp_path: Path
) -> None:
    """Of a model that looks back alone transformers would read [CLS], which sees itself: one answer for all texts."""
    source, out = write_bert(tmp_path / "source", data, objective=objective), tmp_path / "out"
    for text in (run_main(main, source, "--out", out), (out / "README.md").read_text()):
        assert ("AutoModelForSequenceClassification" in text) == warns
    if warns:
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
        tokenizer = AutoTokenizer.from_pretrained(out)
        one, other = (classifier(**tokenizer(text, return_tensors="pt")).logits for text in ("a", "the river is"))
        assert torch.allclose(one, other, atol=1e-6)


def test_the_last_line_of_a_hybrid_model_says_whose_logits_they_are(data: Path, tmp_path: Path) -> None:
    source = write_bert(tmp_path / "source", data, objective="hybrid", causal_share=0.25)
    told = "The logits at a piece predict the next one: for a `[MASK]`, read those at the piece before it."
    assert str(export(Export(source, tmp_path / "out"))).endswith(f". {told}")
    assert told not in str(export(Export(source, tmp_path / "before", sees="before")))
    assert describe_loading(read_folder(source)[0], source).endswith('")  # the logits at a piece predict the next one')


def test_an_objective_says_nothing_of_loading_that_its_parent_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AfterNext(ltr.LeftToRight):
        learns = "predicts the piece after the next"

    shape = make_shape("tiny", 50).change_learning(objective="ltr", sees="before")
    assert ltr.OBJECTIVE.loading_remark(shape)
    assert (AfterNext.tag, AfterNext.reading, ltr.OBJECTIVE.tag) == ("feature-extraction", "", "text-generation")
    assert describe_loading(shape, tmp_path).endswith('")')
    for module in (declaration, model_card):
        monkeypatch.setattr(module, "find_objective", lambda shape: AfterNext())
    assert "this one predicts the piece after the next." in make_model_card(shape, tmp_path, 32, None, None)
    assert describe_loading(shape, tmp_path).endswith('")  # a model that predicts the piece after the next')


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for step in (2, 4):
        (checkpoint := tmp_path / f"run/checkpoints/step-{step:08}").mkdir(parents=True)
        (checkpoint / "checkpoint.json").touch()
    told = refusal(export, Export(tmp_path / "run@999", tmp_path / "out"))
    assert told == f"{tmp_path}/run: no checkpoint step-00000999; there are step-00000002, step-00000004"


@pytest.mark.slow
def test_a_step_and_a_folder_whose_name_has_an_at_are_exported(place: Place, tmp_path: Path) -> None:
    place.train("run", "--checkpoints.every", "2", "--checkpoints.keep", "9")
    run = place.folder / "run"
    export(Export(Path(f"{run}@2"), tmp_path / "two"))
    export(Export(run / "checkpoints" / "step-00000002", tmp_path / "same"))
    (tmp_path / "two").rename(tmp_path / "two@5")
    export(Export(tmp_path / "two@5", tmp_path / "again"))
    names = ("two@5", "same", "again")
    one, *others = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert all(torch.equal(each, other[name]) for other in others for name, each in one.items())


def test_the_spread_of_new_weights_that_a_folder_names_is_kept(data: Path, tmp_path: Path) -> None:
    """transformers draws new heads with it. Checkpoints keep it; those without it have the default."""
    source, out = write_bert(tmp_path / "source", data), tmp_path / "out"
    assert not {"initializer_range"} & read_folder(source)[0].values().keys()
    change_config(source, initializer_range=1.5)
    export(Export(source, out))
    assert read_config(out, "initializer_range") == 1.5
    shape = StoredModel.open(str(out)).shape
    assert read_shape(shape.values()).initializer_range == 1.5
    tuned: Any = shape, MNLI, task_weights(MNLI, shape=shape), read_vocabulary(data), "a card\n", {}, 16
    write_fine_tuned(tmp_path / "tuned", *tuned)
    assert read_config(tmp_path / "tuned", "initializer_range") == 1.5


def test_a_run_becomes_a_folder(run: Path, shape: Shape, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer that exports goes on drawing the same random numbers."""
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert torch.equal(torch.rand(3), expected)
    said = capsys.readouterr()
    line = rf"exported {num_parameters(shape):,} parameters; logits read back by Cloze and transformers\s+agree to \de-"
    assert re.search(line, said.out)
    assert said.err == ""
    found, weights, missing = read_folder(tmp_path / "out")
    assert (found, missing) == (shape, ())
    assert same(weights, our_weights(shape=shape))
    card = (tmp_path / "out/README.md").read_text()
    assert "\nlicense: mit\n" in card, "that of the recipe, where no other is given"
    assert "after step 8,601" in card
    assert "| longest text it was trained on | 32 pieces |" in card
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 32
    assert read_config(tmp_path / "out", "max_position_embeddings") == 64


def test_without_transformers_we_check_by_ourselves(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision against the rounded weights."""
    monkeypatch.setitem(sys.modules, "transformers", None)  # so that importing it fails
    done = export(Export(run, tmp_path / "alone", dtype="bfloat16"))
    assert done.differences["Cloze"] < 1e-4, "of the rounded weights"
    assert (*done.differences, "logits read back by Cloze agree" in str(done)) == ("Cloze", True)
    assert {weight.dtype for weight in load_file(tmp_path / "alone/model.safetensors").values()} == {torch.bfloat16}
    assert read_config(tmp_path / "alone", "dtype") == "bfloat16"


def test_another_model_stays_and_mistakes_end_with_2(run: Path, tmp_path: Path) -> None:
    out, other, encoder = tmp_path / "out", tmp_path / "other", tmp_path / "encoder"
    for source, place in ((run, out), (run, out), (out, other)):
        run_main(main, source, "--out", place)
    their_model(transformers.BertModel).save_pretrained(encoder)
    for words, said in [
        ([run, "--out", other], f"{other}: exists"),
        ([out, "--out", out, "--replace"], f"{out}: is what is read"),
        ([tmp_path / "nowhere", "--out", tmp_path / "new"], "nowhere: no such folder"),
        ([encoder, "--out", tmp_path / "new"], "lacks masked_head, next_head"),
    ]:
        assert said in run_main(main, *words, code=2)
    assert not (tmp_path / "new").exists()
    run_main(main, run, "--out", other, "--replace", "--licence", "cc-by-4.0")
    assert ModelCard.load(other / "README.md").data.license == "cc-by-4.0"
    run_main(main, run, "--out", run / "exported")


def test_the_card_has_the_recipe_of_what_was_trained() -> None:
    named = ("short", 32), ("long", 64), ("later", 64)
    phases = [{"name": name, "length": length, "batch": 8, "micro_batch": 4, "steps": 9} for name, length in named]
    recipe = Recipe.model_validate({"phases": phases, "parallel": {"zero": 2}})
    data = DataSummary({}, 100, {"64": 5, "64, held out": 1}, {}, "vocabulary", "fingerprint")
    run = RunRecord(RunState(phase=1, phase_step=3), recipe, data, None, [])
    told = read_toml(describe_training(run, make_shape("tiny", 100)))
    assert told.keys() == {"objective", "seed", "model", "phases"}
    assert told["objective"]["next_sentences"]
    unpaired = make_shape("tiny", 100).change_learning(pairs=False)
    assert "next_sentences" not in read_toml(describe_training(run, unpaired))["objective"]
    short, long = told["phases"]
    assert (short["name"], short["steps"], short["cut_out_of"]) == ("short", 9, 64)
    assert (long["name"], long["steps_done"]) == ("long", 3)
    assert not {"cut_out_of", "micro_batch"} & long.keys()


def test_an_export_is_exported_again(run: Path, tmp_path: Path) -> None:
    export(Export(run, tmp_path / "out"))
    (tmp_path / "out/modules.json").write_text("[]")
    export(Export(tmp_path / "out", tmp_path / "again"))
    assert (tmp_path / "again/modules.json").read_text() != "[]"
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_what_transformers_saves_of_an_export_is_exported(run: Path, tmp_path: Path) -> None:
    """It saves no vocab.txt, and its embeddings may have rows without pieces."""
    out, saved, again = (tmp_path / name for name in ("out", "saved", "again"))
    export(Export(run, out))
    model, tokenizer = AutoModelForPreTraining.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    model.resize_token_embeddings(len(tokenizer) + 8, mean_resizing=False)
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    assert not (saved / "vocab.txt").exists()
    assert "left out: 8 rows of the embeddings, which belong to no piece" in str(export(Export(saved, again)))
    assert same(*(load_file(folder / "model.safetensors") for folder in (out, again)))
    assert (again / "vocab.txt").read_bytes() == (out / "vocab.txt").read_bytes()


@pytest.mark.parametrize(("pooler", "said", "length"), [(False, 24, 24), (True, 10**30, 40), (False, None, 40)])
def test_a_masked_language_model_of_transformers_is_exported(
    pooler: bool, said: int | None, length: int, tmp_path: Path
) -> None:
    """Also with the pooler that older versions saved, and cut where its own tokenizer does and it has positions."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    WordPiece(PIECES, cased=False).write(theirs)
    their_model(BertForMaskedLM).save_pretrained(theirs)
    if pooler:
        unused = {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
        change_weights(theirs, lambda state: state.update(unused))
    config = json.loads((theirs / "tokenizer_config.json").read_text())
    (theirs / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": said}))
    told = run_main(main, theirs, "--out", out)
    assert ("left out: pooler, half of the head for next sentences" in told) == pooler
    kind: Any = BertForMaskedLM
    model, report = kind.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert same(model.state_dict(), their_model(BertForMaskedLM).state_dict())
    assert AutoTokenizer.from_pretrained(out).model_max_length == length
    card = (out / "README.md").read_text()
    assert f"| longest text | {length} pieces |" in card
    assert "AutoModelForMaskedLM.from_pretrained" in card


@pytest.mark.slow
def test_an_export_needs_the_memory_of_one_model(tmp_path: Path) -> None:
    """Our copy is freed before one is read back, and that before transformers reads its own."""
    WordPiece(PIECES, cased=False).write(tmp_path / "vocabulary")
    small = Shape(1, 512, 8, 2048, len(PIECES), positions=64)
    for shape in (small, replace(small, layers=12)):  # the first loads the libraries
        source, out = tmp_path / f"{shape.layers}", tmp_path / f"{shape.layers}-again"
        weights = build_model(shape).initialize(0).state_dict()
        write_folder(source, shape, weights, tmp_path / "vocabulary", "a card\n")
        del weights
        with MemoryWatch() as watch:
            export(Export(source, out))
    assert 0.8 < watch.most / (4 * num_parameters(shape)) < 1.4
