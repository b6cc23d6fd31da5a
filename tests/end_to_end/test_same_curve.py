"""The same curve however the work is shared; and what the exported model is worth."""

from functools import partial
from pathlib import Path

import pytest
import transformers
from support.marks import slow
from support.training import CUT, Place, assert_same_curve, distance, records, their_losses

from pretraining.flags import Export
from pretraining.model import cpu_kernels
from pretraining.training.exporting import export

BF16 = ["--precision.dtype", "bf16"]
NO_DROPOUT = ["--model.dropout", "0", "--model.attention-dropout", "0"]
PLAIN = "1 plain operations"
"""Without our kernels."""
WAYS = {
    "1 straight": ["--parallel.zero", "0"],
    "1 without dropout": ["--parallel.zero", "0", *NO_DROPOUT],
    PLAIN: ["--parallel.zero", "1", *NO_DROPOUT],
    "1 all at once": ["--parallel.zero", "1", "--phases.0.micro-batch", "24", "--phases.1.micro-batch", "12"],
    "1 checkpointed": ["--parallel.zero", "1", "--compute.checkpoint-activations", "true"],
    "1 bf16": ["--parallel.zero", "1", *BF16],
    "1 two parts": ["--stop-after", "short"],
    "2 ZeRO 0": ["--parallel.zero", "0"],
    "2 ZeRO 1": ["--parallel.zero", "1", "--phases.0.micro-batch", "12"],
    "2 ZeRO 2": ["--parallel.zero", "2", "--phases.0.micro-batch", "6", "--phases.1.micro-batch", "3"],
    "2 bf16 ZeRO 2": ["--parallel.zero", "2", *BF16],
    "2 bf16 ZeRO 3": ["--parallel.zero", "3", "--phases.0.micro-batch", "12", *BF16, *CUT],
    "3 ZeRO 3": ["--parallel.zero", "3", "--phases.0.micro-batch", "8", "--phases.1.micro-batch", "2", *CUT],
}
"""Ranks, and how they share the work."""
DAILY = (PLAIN, "3 ZeRO 3")
CASES = [way if way in DAILY else slow(way) for way in WAYS if way not in ("1 straight", "1 without dropout")]


class Runs:
    """The same run in every way, each made when it is first asked for."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.data = place.data

    def __getitem__(self, name: str) -> Path:
        """The folder of a run, by its ranks and its way."""
        folder = self._place.folder / name
        if not folder.exists():
            fault = partial(cpu_kernels.allow, False) if name == PLAIN else None
            self._place.train(name, *WAYS[name], ranks=int(name[0]), fault=fault)
            if name == "1 two parts":
                self._place.train(name, "--parallel.zero", "1", ranks=1)
        return folder


@pytest.fixture(scope="module")
def runs(shared: Place) -> Runs:
    """The runs of this module."""
    return Runs(shared)


@pytest.mark.parametrize("way", CASES)
def test_the_same_curve_however_the_work_is_shared(runs: Runs, way: str) -> None:
    reference = runs["1 without dropout" if NO_DROPOUT[0] in WAYS[way] else "1 straight"]
    run, rounding = runs[way], "bf16" in way
    assert_same_curve(run, reference, 0.02 if rounding else 1e-5)
    assert distance(run, reference) < (0.01 if rounding else 1e-5)


def test_two_ranks_have_the_curve_of_one(runs: Runs, straight: Path) -> None:
    """And the loss falls."""
    assert_same_curve(straight, runs["1 straight"], 1e-5)
    assert distance(straight, runs["1 straight"]) < 1e-5
    curve = [record["masked_loss"] for record in records(straight)]
    assert curve[-1] < curve[0] - 0.1


def test_dropout_is_on(runs: Runs) -> None:
    """So the test above can fail."""
    ours, without = (records(runs[f"1 {way}"])[0]["loss"] for way in ("straight", "without dropout"))
    assert abs(ours - without) > 1e-4


@pytest.mark.slow
def test_bf16_ranks_agree_among_themselves(runs: Runs) -> None:
    assert_same_curve(runs["2 bf16 ZeRO 2"], runs["1 bf16"], 2e-3)
    assert_same_curve(runs["2 bf16 ZeRO 3"], runs["1 bf16"], 2e-3)


def test_the_exported_model_scores_in_transformers_what_the_run_said(runs: Runs, tmp_path: Path) -> None:
    """As the run has exported it, and from ZeRO 3 by the command."""
    export(Export(runs["3 ZeRO 3"], tmp_path / "again"))
    for run, folder in (("1 straight", runs["1 straight"] / "export"), ("3 ZeRO 3", tmp_path / "again")):
        last = records(runs[run], "evaluation")[-1]
        theirs = their_losses(transformers.BertForPreTraining.from_pretrained(folder), runs.data)
        assert theirs == pytest.approx([last["masked_loss"], last["next_loss"]], abs=1e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer("the river").input_ids[0] == tokenizer.cls_token_id


def test_any_number_of_ranks_scores_the_same(runs: Runs) -> None:
    first = records(runs["1 straight"], "evaluation")
    for ours, theirs in zip(records(runs["3 ZeRO 3"], "evaluation"), first, strict=True):
        assert (ours["step"], ours["scored_examples"]) == (theirs["step"], theirs["scored_examples"])
        assert ours["masked_loss"] == pytest.approx(theirs["masked_loss"], rel=1e-5)
        assert ours["next_accuracy"] == pytest.approx(theirs["next_accuracy"], abs=1.5 / 25)
