"""What `--model` names: folders, runs, checkpoints, names on the hub, nothing; and labels in another order."""

import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.base_models import HEADS, MNLI, compute_logits, task_weights, write_bert
from support.commands import refusal
from support.processes import start, take_part
from support.transformers_models import PIECES, SHAPE, modern_config, same, their_model
from support.website import Site, downloads, publish_model, read_settings_anew
from transformers import BertForQuestionAnswering, BertForSequenceClassification, ModernBertForMaskedLM

from data_prep.common.launchers import World
from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning.running import base
from finetuning.running.base import find_model
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import list_checkpoints, read_record, write_record
from pretraining.huggingface.folders import read_encoder, write_fine_tuned
from pretraining.huggingface.model_card import BaseSummary
from pretraining.huggingface.verify import make_probe
from pretraining.huggingface.weights import name_class

pytest_plugins = ["support.website"]

VOCABULARY = WordPiece((*PIECES[:-1], "Word"), cased=True)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "bert", VOCABULARY)


def write_task(folder: Path, head: TaskHead) -> Path:
    write_fine_tuned(folder, SHAPE, head, task_weights(head), VOCABULARY, "a card\n", {}, 16)
    return folder


def test_a_folder_of_transformers(bert: Path) -> None:
    model = find_model(str(bert))
    assert (model.folder, model.vocabulary, model.head, base.list_casing_doubts(model)) == (bert, VOCABULARY, None, [])
    assert model.shape == replace(SHAPE, positions=64).encoder
    assert "pooler.weight" in model.encoder
    assert same(model.encoder, read_encoder(bert)[1])
    assert f"{bert}: not fine-tuned for a task" in refusal(base.read_fine_tuned, model, MNLI)


@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForQuestionAnswering])
def test_a_folder_that_others_have_fine_tuned(kind: type, tmp_path: Path) -> None:
    """Its encoder begins another task; its head serves its own."""
    their_model(kind).save_pretrained(tmp_path)
    assert "neither vocab.txt nor tokenizer.json: copy them" in refusal(find_model, str(tmp_path))
    VOCABULARY.write(tmp_path)
    model = find_model(str(tmp_path))
    assert model.head is not None
    assert name_class(model.shape, model.head) == kind.__name__
    assert ("pooler.weight" in model.encoder) == model.head.has_pooler
    weights, notes = base.read_fine_tuned(model, model.head)
    assert same({name: value for name, value in weights.items() if not name.startswith("head.")}, model.encoder)
    assert notes == ()


def test_heads_of_sequences_learn_by_the_mean_on_a_modernbert_alone(bert: Path, tmp_path: Path) -> None:
    ModernBertForMaskedLM(modern_config()).save_pretrained(tmp_path / "modern")
    VOCABULARY.write(tmp_path / "modern")
    for name, heads in (("bert", []), ("modern", ["classes", "labels", "one label", "score", "choice"])):
        on = base.Base(find_model(str(tmp_path / name)))
        assert [kind for kind, head in HEADS.items() if on.fit_head(head).averages] == heads


def test_a_run_and_its_checkpoints(straight: Path) -> None:
    """The newest checkpoint of a run, or the one that is named; heads of pre-training are left out."""
    model = find_model(str(straight))
    saved, weights = load_checkpoint(straight)
    assert model.shape == saved.record.shape.change_learning(pairs=False)
    assert same(model.encoder, {name: value for name, value in weights.items() if "_head." not in name})
    assert same(model.encoder, find_model(str(straight / "export")).encoder)
    assert "pooler.weight" in model.encoder
    assert model.head is None
    assert (model.summary().name, model.trained) == (straight.name, 64)
    first = list_checkpoints(straight)[0]
    assert not same(find_model(str(first)).encoder, model.encoder)


def test_a_damaged_checkpoint_is_named_and_a_run_without_pairs_has_no_pooler(straight: Path, tmp_path: Path) -> None:
    """Earlier versions gave such a run one, which nothing has trained, nor the second segment."""
    run = shutil.copytree(straight, tmp_path / "run")
    newest = list_checkpoints(run)[-1]
    record = read_record(newest)
    record.caller["progress"]["trained_segments"] = 1
    write_record(newest, record)
    encoder = find_model(str(run)).encoder
    assert "pooler.weight" not in encoder
    assert torch.equal(*encoder["embeddings.segment.weight"])
    file = next(newest.glob("weight-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    told = refusal(lambda: find_model(str(run)).encoder)
    assert f"{file.name}: its SHA-256 is not that of its record" in told
    (newest / "DAMAGED").touch()
    assert find_model(str(run)).folder == list_checkpoints(run)[-2]


def test_rows_that_belong_to_no_piece_are_left_out(bert: Path) -> None:
    whole = find_model(str(bert)).encoder["embeddings.word.weight"]
    WordPiece((*VOCABULARY.pieces[:60], "Word"), cased=True).write(bert)
    model = find_model(str(bert))
    assert model.shape.vocabulary == 61
    rows = model.encoder["embeddings.word.weight"]
    assert rows.shape == (64, 32)
    assert torch.equal(rows[:61], whole[:61])
    assert not rows[61:].any()


CASINGS = [
    ("bert-base-cased", True, True, None),
    ("bert-base-uncased", False, False, None),
    ("bert", False, False, None),
    ("bert", False, True, "text is not put into lower case, and the pieces suggest otherwise"),
    ("bert", True, False, "text is put into lower case, and the pieces suggest otherwise"),
]


@pytest.mark.parametrize(("name", "capital", "cased", "note"), CASINGS)
def test_doubts_about_case_are_told(name: str, capital: bool, cased: bool, note: str | None, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / name, VOCABULARY if capital else WordPiece(PIECES, cased=False))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "do_lower_case": not cased}))
    notes = base.list_casing_doubts(find_model(str(folder)))
    assert len(notes) == (note is not None)
    assert all(line.startswith(f"{folder}: {note}") for line in notes)


# Nothing is named.


def test_the_newest_export_is_taken_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fine-tuned is none, nor what is half written, nor a folder of shards."""
    monkeypatch.chdir(tmp_path)
    places = ["runs/mini/export", "exported/old", "build/demo-run/export", "build/older"]
    for age, folder in enumerate(map(Path, places)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_bert(folder, VOCABULARY)
        os.utime(folder / "model.safetensors", (1e9 - age, 1e9 - age))
    write_task(Path("exported/answers"), HEADS["spans"])
    shutil.copytree("build/older", "exported/.newer.tmp")
    for wanted in places:
        assert (base.find_newest_export(), find_model().name) == (Path(wanted), wanted)
        shutil.rmtree(wanted)
    assert "there is no exported model here" in refusal(find_model)
    Path("empty").mkdir()
    assert "empty: no config.json and no finished checkpoint" in refusal(find_model, "empty")
    assert "runs/none/export: no such folder, and not the name of a model" in refusal(find_model, "runs/none/export")


def find_together(folder: Path, name: str | None, world: World) -> None:
    """A rank that says what it has found in a folder, or on the hub, whose settings it reads anew."""
    read_settings_anew(folder)
    model = find_model(name)
    sys.stdout.write(f"{world.rank} {model.name} {len(model.encoder)} {model.summary().hub_model}\n")


FOLDERS = [
    ("/runs/mini/glue/sst2/model", "mini-sst2"),
    ("runs/seeds/sst2/model", "seeds-sst2"),
    ("/data/sst2/model", "data-sst2"),
    ("/model", "x"),
]


@pytest.mark.parametrize(("folder", "name"), FOLDERS)
def test_a_fine_tuned_model_is_named_after_its_task_wherever_it_lies(folder: str, name: str) -> None:
    own = BaseSummary("x", False, None, None, 0, [])
    model: Any = SimpleNamespace(summary=lambda: own, folder=Path(folder), head=MNLI, on_hub=False)
    assert base.summarize_model(model).name == name


def test_ranks_find_the_same(straight: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mini").symlink_to(straight)
    done = start(2, take_part, partial(find_together, tmp_path, None)).wait(60)
    assert [(rank.errors, rank.output) for rank in done] == [
        ("", f"{each} runs/mini/export 31 None\n") for each in (0, 1)
    ]
    (tmp_path / "runs" / "mini").unlink()
    done = start(2, take_part, partial(find_together, tmp_path, None)).wait(60)
    assert [rank.code for rank in done] == [2, 2]
    assert done[0].errors.count("there is no exported model here") == 1


@pytest.mark.usefixtures("surroundings")
def test_a_name_on_the_hub(bert: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_model(site, "owner/bert", bert)
    monkeypatch.setenv("HF_ENDPOINT", site.url)
    [done] = start(1, take_part, partial(find_together, Path.cwd(), "owner/bert")).wait(60)
    assert (done.errors, done.output) == ("", "0 owner/bert 31 owner/bert\n")
    assert downloads(site, "model.safetensors") == 1


# Labels.


@pytest.mark.parametrize("upper", [False, True])
def test_labels_are_taken_by_their_names(upper: bool, tmp_path: Path) -> None:
    """MNLI in the order of another program: the logits are in the order of ours."""
    names = [label.upper() if upper else label for label in ("entailment", "neutral", "contradiction")]
    theirs = their_model(BertForSequenceClassification, id2label=dict(enumerate(names)))
    theirs.save_pretrained(tmp_path)
    VOCABULARY.write(tmp_path)
    model = find_model(str(tmp_path))
    weights, notes = base.read_fine_tuned(model, MNLI)
    assert notes == ()
    batch = make_probe(model.shape, VOCABULARY.special)
    ours = compute_logits(model.shape, MNLI, weights, batch)[0]
    longest = slice(0, batch.lengths[0])
    with torch.no_grad():
        given = theirs(input_ids=batch.pieces[None, longest], token_type_ids=batch.segments[None, longest]).logits[0]
    assert torch.allclose(ours, given[[2, 0, 1]], atol=1e-5)


def order_of(head: TaskHead, task: TaskHead = MNLI) -> Any:
    """In which order the task's labels are those of a model with this head, and what is said of it."""
    model: Any = SimpleNamespace(name="a/model", head=head)
    return base.find_order(task, model)


def test_names_that_nobody_has_given_are_taken_in_order() -> None:
    order, (note,) = order_of(replace(MNLI, labels=("LABEL_0", "LABEL_1", "LABEL_2")))
    assert order is None
    assert note.startswith("a/model has the labels LABEL_0, LABEL_1, LABEL_2, the task has contradiction, entailment, ")
    assert note.endswith("neutral: taken in this order")
    assert [order_of(HEADS[kind], HEADS[kind]) for kind in ("score", "choice", "spans")] == [(None, ())] * 3


OTHER_HEADS = [
    (replace(MNLI, labels=("no", "entailment", "neutral")), "labels no, entailment, neutral, the task has contrad"),
    (replace(MNLI, labels=("LABEL_0", "LABEL_1")), "a/model has the labels LABEL_0, LABEL_1, the task has contrad"),
    (replace(MNLI, labels=MNLI.labels[:2]), "only those of the same names can be used"),
    (HEADS["tags"], "was fine-tuned for tags, but this task asks for classes"),
]


@pytest.mark.parametrize(("has", "message"), OTHER_HEADS)
def test_other_labels_are_refused(has: TaskHead, message: str) -> None:
    assert message in refusal(order_of, has)
