"""Models that read one way (`ltr`, `rtl`) or either way (`hybrid`), by their commands: trained, gone on with, exported,
read by transformers, scored, asked and fine-tuned."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.base_models import write_bert
from support.commands import run_main
from support.finetuning import Toy, fine_tune, results
from support.training import CUT, Place, assert_goes_on, assert_refused, assert_well, records

from finetuning import prediction, run_pairs
from pretraining import evaluate, export
from pretraining.huggingface.folders import read_shape
from pretraining.model.shape import Learning

SHARE = 0.3
HYBRID = ["--objective.name", "hybrid", "--objective.causal_share", "0.3", "--phases.0.learning_rate", "1e-2"]
SAVES = ["--checkpoints.every", "1", "--checkpoints.keep", "9"]
ZERO_3 = ["--parallel.zero", "3", *CUT]
WAYS = {
    "pairs, ZeRO 3": ZERO_3,
    "modern, masks drawn anew": "--model.architecture modern --model.window 8 --objective.masks dynamic".split(),
    "roberta, bf16": "--model.architecture roberta --precision.dtype bf16".split(),
}
SEES = {"ltr": "before", "rtl": "after"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_learns_both_and_goes_on_bit_for_bit(way: str, place: Place, unpaired_data: Path) -> None:
    """And on one rank from a step of two: the same sequences are read left to right. Its share stays."""
    more, pairs = [*HYBRID, *SAVES, *WAYS[way]], "pairs" in way
    place = place if pairs else dataclasses.replace(place, data=unpaired_data)
    straight = place.folder / "straight"
    assert "logits read back by Cloze and transformers agree to" in place.train(straight, *more)
    lines, scores = records(straight), records(straight, "evaluation")
    for figure in ("masked_loss", "piece_loss"):
        assert scores[-1][figure] < scores[0][figure]
    assert {"next_loss" in line for line in (*lines, *scores)} == {pairs}
    for line in lines:
        of_masked = line["masked_loss"] + line.get("next_loss", 0.0)
        assert line["loss"] == pytest.approx((1 - SHARE) * of_masked + SHARE * line["piece_loss"])
    assert_goes_on(place, more, straight, 3e-3 if "bf16" in way else 1e-4)
    changed = place.command(straight, *more, "--objective.causal_share", "0.5", "--phases.1.steps", "6")
    assert_refused(changed, "objective.causal_share was 0.3, now 0.5")


@pytest.fixture(scope="module")
def model(shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model that learned both."""
    return write_bert(tmp_path_factory.mktemp("models") / "both", shared.data, objective="hybrid", causal_share=SHARE)


def test_it_is_exported_to_be_read_either_way(model: Path, tmp_path: Path) -> None:
    """By transformers: with masks the logits before one are those of what it hides, and left to right all are."""
    for sees in ("both", "before"):
        assert export.main([str(model), "--out", str(tmp_path / sees), "--sees", sees]) == 0
    assert export.main([str(model), "--out", str(tmp_path / "either")]) == 0
    found = {name: read_shape(tmp_path / name).learns for name in ("both", "before", "either")}
    assert found == {
        "both": Learning("hybrid", pairs=True, settings=(("causal_share", 0.0),)),
        "before": Learning("ltr", pairs=False, sees="before"),
        "either": Learning("hybrid", pairs=True, settings=(("causal_share", SHARE),)),
    }
    assert "fill-mask pipeline of transformers reads them at the `[MASK]`" in (tmp_path / "both/README.md").read_text()
    assert "AutoModelForCausalLM" in (tmp_path / "before/README.md").read_text()
    for source, sees in (("both", "before"), ("before", "both")):
        said = run_main(export.main, tmp_path / source, "--out", tmp_path / "no", "--sees", sees, code=2)
        assert f"--sees {sees}: a BERT of {tmp_path / source} predicts" in " ".join(said.split())
    content = json.loads((tmp_path / "either/config.json").read_text())
    (tmp_path / "either/config.json").write_text(json.dumps({**content, "cloze": {"objective": "gone"}}))
    assert "export it anew" in run_main(evaluate.main, tmp_path / "either", "--fill", "a [MASK]", code=2)


@torch.inference_mode()
def test_masks_are_filled_in_from_the_piece_before(model: Path) -> None:
    said = run_main(evaluate.main, model, "--fill", "the [MASK] of the river", "--json")
    (found,) = json.loads(said)["fillings"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    inputs = tokenizer("the [MASK] of the river", return_tensors="pt")
    at = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    theirs: Any = transformers.AutoModelForMaskedLM.from_pretrained(model)
    best = theirs.eval()(**inputs).logits[0, at - 1].softmax(0).topk(5)
    assert [each["piece"] for each in found] == tokenizer.convert_ids_to_tokens(best.indices.tolist())
    assert [each["probability"] for each in found] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert evaluate.main([str(model), "--fill", "a [MASK]", "--sees", "before"]) == 2


def test_shards_are_scored_either_way(model: Path, shared: Place) -> None:
    """Both at once, and each alone with bits per character; every example counts once."""
    found = {}
    for sees in ("", "both", "before"):
        words = [str(model), "--data", str(shared.data), "--length", "32", "--examples", "24", "--json"]
        found[sees] = json.loads(run_main(evaluate.main, *words, *(["--sees", sees] if sees else [])))
    assert {each["examples"] for each in found.values()} == {24}
    assert found[""]["predictions"] == found["both"]["predictions"] + found["before"]["predictions"]
    for sees, figure in (("both", "masked_loss"), ("before", "piece_loss")):
        assert found[""]["figures"][figure] == pytest.approx(found[sees]["figures"][figure], rel=1e-5)
        assert found[sees]["bits_per_character"] > 0
    assert found[""]["bits_per_character"] is None


@torch.inference_mode()
def test_pairs_are_scored_either_way(model: Path, tmp_path: Path) -> None:
    """As transformers computes it: from the piece before each mask, and of the same weights as a decoder."""
    sentences = ("the river is long", "river the long is")
    (tmp_path / "pairs.tsv").write_text("good\tbad\n" + "\t".join(sentences) + "\n")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    masked: Any = transformers.AutoModelForMaskedLM.from_pretrained(model)
    causal: Any = transformers.AutoModelForCausalLM.from_pretrained(model, is_decoder=True)
    for sees in ("both", "before"):
        out = tmp_path / sees
        words = ["--model", str(model), "--pairs", str(tmp_path / "pairs.tsv"), "--out", str(out), "--sees", sees]
        assert run_pairs.main(words) == 0
        line = json.loads((out / "pairs.jsonl").read_text())
        for text, name in zip(sentences, ("good_score", "bad_score"), strict=True):
            pieces, total = tokenizer(text, return_tensors="pt").input_ids, 0.0
            begins = [not each.startswith("##") for each in tokenizer.convert_ids_to_tokens(pieces[0])]
            for at in range(1, pieces.shape[1] - 1):
                end = begins.index(True, at + 1)
                asked = pieces.clone()
                asked[0, at:end] = tokenizer.mask_token_id
                logits = (masked.eval()(asked) if sees == "both" else causal.eval()(pieces)).logits
                total += float(logits[0, at - 1].log_softmax(0)[pieces[0, at]])
            assert line[name] == pytest.approx(total, abs=1e-4)


@pytest.fixture(scope="module", params=["ltr", "rtl"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(name: str, shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder of "straight", a run of two ranks that learns one way."""
    place = dataclasses.replace(shared, folder=tmp_path_factory.mktemp(name))
    place.train("straight", "--objective.name", name, "--phases.0.learning_rate", "1e-2")
    return place


@pytest.mark.slow
def test_an_export_is_what_it_says(name: str, trained: Place, tmp_path: Path) -> None:
    again = tmp_path / "again"
    run_main(export.main, trained.folder / "straight", "--out", tmp_path / "anew")
    run_main(export.main, tmp_path / "anew", "--out", again)
    config, learns = json.loads((again / "config.json").read_text()), read_shape(again).learns
    assert (learns.objective, learns.pairs, learns.sees) == (name, False, SEES[name])
    if name == "rtl":
        assert config["model_type"] == "cloze-rtl"
        for kind in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM):
            with pytest.raises(ValueError, match="cloze-rtl"):
                kind.from_pretrained(again)
        return
    assert (config["model_type"], config["is_decoder"]) == ("bert", True)
    assert transformers.AutoModelForCausalLM.from_pretrained(again).config.is_decoder


def assert_fine_tuned(toy: Toy, sees: str, *more: str) -> Path:
    """Fine-tuning on two ranks has the scores of one, and the model answers by what it reads. Returns its folder."""
    assert_well(fine_tune(toy.command("tuned", *more)))
    assert_well(fine_tune(toy.command("two", *more), ranks=2))
    assert results(toy.folder / "tuned")["scores"] == results(toy.folder / "two")["scores"]
    folder = toy.folder / "tuned" / "toy" / "model"
    assert read_shape(folder).learns.sees == sees
    answers = prediction.load(folder)([{"text": "a good film the plot"}, {"text": "a poor film the plot"}])
    assert answers[0]["probabilities"] != answers[1]["probabilities"]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("sees", ["both", "before"])
def test_a_hybrid_is_fine_tuned_either_way(sees: str, model: Path, toy: Toy) -> None:
    assert_fine_tuned(dataclasses.replace(toy, model=model), sees, "--sees", sees)


@pytest.mark.slow
def test_it_is_fine_tuned_one_way_without_being_told(name: str, trained: Place, toy: Toy) -> None:
    folder = assert_fine_tuned(dataclasses.replace(toy, model=trained.folder / "straight" / "export"), SEES[name])
    assert json.loads((folder / "config.json").read_text())["model_type"] == f"cloze-{name}"
    with pytest.raises(ValueError, match=f"cloze-{name}"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)
