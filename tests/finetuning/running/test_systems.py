"""The systems that BERT is compared with, by the real commands: trained, stopped and continued, and asked again; and
numbers on a scale of their own."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support import finetuning as tuning
from support.base_models import write_bert
from support.commands import refusal
from support.finetuning import Toy, Tune, fine_tune, launch, metrics, outcome, read_column, results
from support.tasks import VOCABULARY
from support.training import assert_ended, assert_well

from finetuning import predict
from finetuning.prediction import load
from finetuning.running import outputs

BILSTM = ["--bilstm.hidden", "16", "--bilstm.depth", "1"]
MIX = ["--features.layers", "mix", "--features.hidden", "16"]
SENTENCES = "Paris B-LOC\nis O\nin O\nFrance B-LOC\n\nAnna B-PER\nSmith I-PER\nsleeps O\n\n"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_group")]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A task, and models that see on both sides of a piece, `model`, and on one side of it, `ltr` and `rtl`."""
    folder = tmp_path_factory.mktemp("systems")
    write_bert(folder / "ltr", VOCABULARY, objective="ltr")
    write_bert(folder / "rtl", VOCABULARY, hidden=16, objective="rtl")
    return tuning.write_toy(folder)


@pytest.fixture
def one_way(toy: Toy) -> Toy:
    return replace(toy, model=toy.folder / "ltr")


def assert_answers_again(toy: Toy, out: Path) -> None:
    """predict.py says of dev what the model said when it was trained, to the last decimal that is written."""
    said = [float(share) for share in read_column(out / "toy" / "predictions" / "predictions_dev.tsv", -1)]
    assert len({*said}) > 1, "the same of every text would say little"
    asked, answers = out / "asked.txt", out / "answers.jsonl"
    asked.write_text("".join(f"{text}\n" for text in read_column(toy.data / "dev.tsv", 0)))
    assert predict.main([str(out / "toy"), str(asked), "--out", str(answers), "--dtype", "fp32"]) == 0
    found = [json.loads(line)["probabilities"] for line in answers.read_text().splitlines()]
    assert [[*each.values()][-1] for each in found] == pytest.approx(said, abs=2e-6)


def assert_continues_and_answers(toy: Toy, name: str, *flags: str) -> tuple[Path, str]:
    """A run that is stopped is the straight one, on two ranks nearly so, and its model answers; where the straight one
    lies, and what it said."""
    straight, stopped, two = (toy.folder / f"{name}-{kind}" for kind in ("straight", "stopped", "two"))
    first, to_stop = launch(toy.command(straight, *flags)), toy.command(stopped, *flags)
    halted, of_two = launch(to_stop, fault=partial(tuning.stop_at, 4)), launch(toy.command(two, *flags), ranks=2)
    said = assert_well(first.wait())
    assert_ended(halted, 75, "after step 4, and saved")
    assert_well(of_two.wait())
    assert_well(fine_tune(to_stop))
    assert outcome(stopped) == outcome(straight)
    assert_answers_again(toy, straight)
    assert losses(straight) == pytest.approx(losses(two), rel=1e-4)
    return straight, said


def losses(out: Path) -> list[float]:
    """All losses that a run has told."""
    (path,) = (out / "toy").glob("*/metrics.jsonl")
    steps = [record for record in metrics(path) if record["kind"] == "step"]
    return [record[name] for record in steps for name in ("loss", "language_loss") if name in record]


def test_a_bilstm_on_top_is_stopped_continued_and_asked(toy: Toy) -> None:
    out, _ = assert_continues_and_answers(toy, "bilstm", *BILSTM)
    with pytest.raises((OSError, ValueError)):  # rather than an ordinary BERT
        transformers.AutoModel.from_pretrained(out / "toy" / "model")


def test_gpt_learns_its_language_too(one_way: Toy) -> None:
    without = launch(one_way.command("gpt-without"))
    out, _ = assert_continues_and_answers(one_way, "gpt", "--language_loss", "0.5")
    assert_well(without.wait())
    assert losses(one_way.folder / "gpt-without")[0] != losses(out)[0]


def keep_nothing() -> None:
    """A fault: there is no room for activations."""
    outputs.KEPT_GB = 0


def test_two_encoders_of_elmo_stand_side_by_side(one_way: Toy) -> None:
    other_way = one_way.folder / "rtl"
    mix = [*MIX, "--backward", str(other_way)]
    again = launch(one_way.command("elmo-again", *mix), fault=keep_nothing)
    out, said = assert_continues_and_answers(one_way, "elmo", *mix)
    assert "and are computed once" in said
    assert "more than 0: they are computed again in every epoch" in assert_well(again.wait())
    assert losses(one_way.folder / "elmo-again") == pytest.approx(losses(out), rel=1e-5)
    write_bert(other_way, VOCABULARY, objective="rtl")
    assert "is not the model that it learned on" in refusal(load, out / "toy")


def test_features_of_a_frozen_bert_tag_words(tmp_path: Path, tune: Tune) -> None:
    """Its folder names the model that it stands on."""
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text(SENTENCES * 6)
    model, folder = write_bert(tmp_path / "model", VOCABULARY), tmp_path / "out" / "ner"
    settings = "--features.layers weighted-all --length 48 --epochs 20 --batch 4 --features.hidden 16".split()
    settings += "--precision.dtype fp32 --patience 0 --tags.document_context false --learning_rate 0.02".split()
    tune(["--data", tmp_path, "--model", model, "--out", tmp_path / "out", *settings], "run_ner")
    lines = (folder / "predictions" / "predictions_dev.txt").read_text().splitlines()
    said = [line.split()[-1] for line in lines if line.strip()]
    answers = load(folder, "fp32")([line.split() for line in ("Paris is in France", "Anna Smith sleeps")] * 6)
    assert len({*said}) > 1, "a tag alone would say little"
    assert [tag for answer in answers for tag in answer["tags"]] == said  # what it said of the same words then
    assert not (folder / "model" / "config.json").exists()
    model.rename(tmp_path / "elsewhere")
    assert "stands on a model that is not there; put it back" in refusal(load, folder)


def test_runs_one_after_another_share_what_is_kept(toy: Toy) -> None:
    both, alone = (toy.command(out, *MIX, "--search.jobs", "1") for out in ("kept-both", "kept-alone"))
    assert assert_well(fine_tune([*both, "--seeds", "2"])).count("and are computed once") == 1
    assert_well(fine_tune([*alone, "--seed", "2"]))
    second = [results(toy.folder / out)["runs"]["lr0.003-seed2"]["score"] for out in ("kept-both", "kept-alone")]
    assert second[0] == second[1]


# Numbers on a scale of their own


YEARS = {word: year for kind, year in (("good", 1912), ("bad", 1776)) for word in tuning.WORDS[kind]}


def write_years(folder: Path) -> Toy:
    """The toy task with the year of a text, which its words tell but for some noise."""
    toy, draw = tuning.write_toy(folder), random.Random(2)
    (folder / "toy.toml").write_text((folder / "toy.toml").read_text().replace("classes", "score"))
    for name, count in (("train", 160), ("dev", 24)):
        texts = [text for text, _ in tuning.sentences(draw, count)]
        years = [next(YEARS[word] for word in text.split() if word in YEARS) + draw.randint(-9, 9) for text in texts]
        tuning.write_rows(folder / f"{name}.tsv", zip(texts, map(str, years), strict=True))
    return toy


def test_years_are_learned_and_exported_as_years(tmp_path: Path, tune: Tune) -> None:
    toy = write_years(tmp_path / "toy")
    tune(toy.command("out", "--epochs", "20"))
    told, folder = results(toy.folder / "out"), toy.folder / "out" / "toy" / "model"
    assert told["scores"]["dev"]["pearson"] > 0.9
    assert not told["degenerate"]
    texts, right = read_column(toy.data / "dev.tsv", 0), np.array(read_column(toy.data / "dev.tsv", 1), float)
    ours, in_bf16 = (
        np.array([answer["score"] for answer in load(folder, dtype, "cpu")(texts)]) for dtype in ("fp32", "bf16")
    )
    assert np.abs(ours - right).mean() < 30
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert logits.tolist() == pytest.approx(ours, abs=0.01)
    assert in_bf16 == pytest.approx(ours, abs=3)
    assert (in_bf16 % 1 != 0).any()  # where the head is in 16 bits, too, there are no such years
