"""Phases with objectives of their own, such as left to right first and masks afterwards, by the real command."""

from pathlib import Path

import pytest
import torch
from support.marks import slow
from support.training import (
    CUT,
    SAVES,
    SEED,
    Place,
    assert_refused,
    assert_same,
    assert_same_curve,
    records,
    state,
    stopped_at,
    train_straight,
)
from torch import Tensor
from transformers import AutoConfig

from pretraining import export as exporting
from pretraining.checkpoint.reading import StoredTensors, list_parameter_sizes
from pretraining.checkpoint.record import FOLDER, RECORD, WEIGHT, read_record
from pretraining.objectives.declaration import build_model

LTR_FIRST = [*SAVES, "--phases.0.objective", "ltr"]
MASKS_FIRST = [*SAVES, "--phases.1.objective", "rtl"]


def read_kind(run: Path, step: int, kind: str) -> dict[str, Tensor]:
    """The tensors of one kind in a checkpoint, by the names of the weights."""
    checkpoint = run / FOLDER / f"step-{step:08}"
    record = read_record(checkpoint)
    stored, found = StoredTensors(checkpoint, record, kind), {}
    for name, size in list_parameter_sizes(record.shape).items():
        found[name] = torch.empty(size)
        stored.read(name, found[name].view(-1))
    return found


FROM_HERE = "from here on the model predicts"
CASES = [
    (LTR_FIRST, f"{FROM_HERE} masked pieces; anew: pooler, next-sentence head", "piece masked", (5,)),
    slow(MASKS_FIRST, f"{FROM_HERE} the piece before; left out: pooler, next-sentence head", "masked piece", (3, 5, 6)),
]


@pytest.mark.parametrize(("words", "said", "losses", "steps"), CASES)
def test_a_run_learns_otherwise_from_a_phase_on(
    place: Place, words: list[str], said: str, losses: str, steps: tuple[int, ...]
) -> None:
    """It logs, scores and keeps what each phase has, and goes on with the same bits from each place in it."""
    run, figures = place.folder / "run", [f"{loss}_loss" for loss in losses.split()]
    assert place.train(run, *words, ranks=1).count(f"continues after step 5\n{said}\n") == 1
    for kind in ("step", "evaluation"):
        there = [(record["phase"], *(name for name in figures if name in record)) for record in records(run, kind)]
        assert {*there} == {(1, figures[0]), (2, figures[1])}
    for step in steps:
        again = stopped_at(run, place.folder / f"again {step}", step)
        assert (said in place.train(again, *words, ranks=1)) == (step < 6)
        assert_same(again, run)
    drawn = build_model(read_record(run / FOLDER / "step-00000006").shape).initialize(SEED).state_dict()
    before, after = read_kind(run, 5, WEIGHT), read_kind(run, 6, WEIGHT)
    [rate] = [record["learning_rate"] for record in records(run) if record["step"] == 6]
    for name in after.keys() - before.keys():  # Adam's first change is the rate, whatever the run has done before
        assert (after[name] - drawn[name]).abs().median() == pytest.approx(rate, rel=0.05)


@pytest.mark.slow
def test_weights_and_state_that_stay_go_on_and_new_heads_begin_by_the_seed(place: Place) -> None:
    """At a rate that changes no weight; both phases before and after the change have Adam's averages."""
    still = ["--phases.1.learning_rate", "1e-30"]
    run = train_straight(place, "run", *LTR_FIRST, *still)
    ltr = train_straight(place, "ltr", *SAVES, "--objective.name", "ltr", "--stop-after", "short", *still)
    for kind in (WEIGHT, "exp_avg", "exp_avg_sq"):
        ours, theirs = read_kind(run, 5, kind), read_kind(ltr, 5, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    record = read_record(run / FOLDER / "step-00000006")
    drawn = build_model(record.shape).initialize(SEED).state_dict()
    before, after = read_kind(run, 5, WEIGHT), read_kind(run, 6, WEIGHT)
    anew = after.keys() - before.keys()
    assert {name.partition(".")[0] for name in anew} == {"pooler", "next_head"}
    assert record.late_weights == dict.fromkeys(anew, 5.0)
    assert "late_weights" not in (ltr / FOLDER / "step-00000005" / RECORD).read_text()
    for name, weight in after.items():
        torch.testing.assert_close(weight, drawn[name] if name in anew else before[name], rtol=0, atol=1e-20)
    average, square, earlier = (read_kind(run, *at) for at in ((6, "exp_avg"), (6, "exp_avg_sq"), (5, "exp_avg_sq")))
    for name in anew:
        torch.testing.assert_close(square[name] / (1 - 0.999), (average[name] / (1 - 0.9)) ** 2, rtol=1e-3, atol=0)
    assert all(bool((square[name] >= 0.999 * earlier[name] * (1 - 1e-6)).all()) for name in earlier)
    assert all(bool(earlier[name].any()) for name in ("masked_head.bias", "embeddings.word.weight"))


@pytest.mark.slow
def test_ranks_and_stages_and_branches_may_change_where_the_objective_does(place: Place) -> None:
    """And each phase is exported as what it is."""
    straight = train_straight(place, "straight", *LTR_FIRST)
    stopped_at(straight, place.folder / "one", 5)
    place.train("one", *LTR_FIRST, "--parallel.zero", "3", *CUT, ranks=1)
    assert_same_curve(place.folder / "one", straight, 1e-5)
    ltr = train_straight(place, "ltr", *SAVES, "--phases.0.objective", "ltr", "--phases.1.objective", "ltr")
    place.train("branch", *LTR_FIRST, "--branch", f"{ltr}@5")
    assert all(torch.equal(value, state(straight)[name]) for name, value in state(place.folder / "branch").items())
    for step, name, causal in ((5, "BertLMHeadModel", True), (8, "BertForPreTraining", False)):
        out = place.folder / f"step {step}"
        assert exporting.main([str(straight / "checkpoints" / f"step-{step:08}"), "--out", str(out)]) == 0
        config = AutoConfig.from_pretrained(out)
        assert (config.architectures, config.is_decoder) == ([name], causal)
        assert 'objective = "ltr"' in (out / "README.md").read_text()


def test_a_phase_that_is_begun_keeps_its_objective(place: Place, straight: Path) -> None:
    for step, number, then in ((3, 0, "mlm"), (5, 0, "mlm"), (6, 1, "mlm")):
        run = stopped_at(straight, place.folder / f"run {step}", step)
        changed = place.command(run, *SAVES, f"--phases.{number}.objective", "ltr")
        assert_refused(changed, f"--out {run}: cannot go on with this recipe", f"the objective was {then}, now ltr")
    assert_refused(place.command("new", "--phases.1.objective", "mmm"), "--phases.1.objective = ")


def test_a_plan_counts_the_predictions_of_each_phase(place: Place) -> None:
    """And settings of an objective that only a phase has are no fault."""
    words = ["--objective.name", "ltr", "--phases.1.objective", "mlm", "--objective.masks", "dynamic"]
    said = place.train("new", *words, "--objective.rate", "0.3", "--check", ranks=1)
    assert "\nlong (mlm)  " in said
    assert said.count("masks are drawn anew in every epoch, a share of 0.3 of the pieces") == 1
