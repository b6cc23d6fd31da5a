"""What a recipe gives: the commands that find it, and what is kept of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import assert_refusal

from benchmarks import recipe_scores
from benchmarks.measure import read_results
from benchmarks.recipe_scores import RecipeScores, measure, summarise_training
from data_prep.common.files import write_json

SHARE = {"accuracy": 0.61, "spread": 0.002, "pairs": 67_000}


def step(number: int, phase: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "phase": phase, "seconds_per_step": seconds, **more}


STEPS = [
    step(50, 1, 9.0),  # as it went before a stop, after which the same steps were made again
    *(step(number, 1, seconds) for number, seconds in ((50, 0.5), (100, 0.5), (150, 3.0), (160, 1.0))),
    {"kind": "evaluation", "step": 160, "masked_loss": 3.0, "next_loss": 0.2, "time": 1.0},
]


def write_log(run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in STEPS))


class StandIn:
    """Leaves what the commands would, and notes their words."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.words = fails, dict[str, str]()

    def __call__(self, command: Sequence[str], log: Path, say: Callable[[str], None], *_: object) -> int:
        script, out = Path(command[1]).name, Path(command[command.index("--out") + 1])
        self.words[script] = " ".join(command[2:])
        if script == self.fails:
            say("error: no room")
            return 2
        if script == "train.py":
            write_log(out)
        if script == "export.py":
            out.mkdir(parents=True)
            (out / "model.safetensors").write_text("weights")
        if script == "run_pairs.py":
            about = {"data_sha256": "s", "chance": 0.5, "phenomena": {"binding": SHARE}}
            write_json(out / "results.json", SHARE | about)
        if script == "run_glue.py":
            runs = {f"seed{number}": {"score": 0.6 + number / 10} for number in (1, 2, 3)} | {"lost": {"score": None}}
            write_json(out / "results.json", {"stsb": {"metric": "spearman", "runs": runs}})
        return 0


Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Runs the command with a stand-in for those that it runs itself; returns what it has kept."""

    def run(stand_in: StandIn, recipe: str = "bert_mini", **flags: Any) -> dict[str, Any]:
        monkeypatch.setattr(recipe_scores, "follow", stand_in)
        monkeypatch.setattr(recipe_scores, "ROOT", tmp_path)
        settings = RecipeScores(recipe, out=tmp_path / "kept.json", **flags)
        measure(settings, Console(width=200))
        return read_results(tmp_path / "kept.json")

    return run


def test_what_a_recipe_gives_is_kept(make: Make) -> None:
    stand_in = StandIn()
    found = make(stand_in)
    assert [*stand_in.words] == ["shard.py", "train.py", "export.py", "run_pairs.py", "run_glue.py"]
    assert "--lengths 32 128 512" in stand_in.words["shard.py"]
    assert (found["pairs"]["accuracy"], found["stsb"]["median"]) == (0.61, pytest.approx(0.8))
    assert found["training"]["steps"] == 160
    assert found["training"]["held_out"] == {"masked_loss": 3.0, "next_loss": 0.2}


def test_a_command_that_fails_is_named_with_its_error(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refusal("run_pairs has ended with code 2", make, StandIn(fails="run_pairs.py"))
    assert "error: no room" in capsys.readouterr().out
    assert not (tmp_path / "kept.json").exists()


def test_the_time_of_a_training_is_that_of_all_its_steps(tmp_path: Path) -> None:
    """As it went, and at the usual speed of each phase: a machine that does something else makes some steps slow."""
    write_log(tmp_path)
    found = summarise_training(tmp_path)
    assert found["minutes"] == pytest.approx((50 * 0.5 + 50 * 0.5 + 50 * 3.0 + 10 * 1.0) / 60, abs=0.05)
    assert found["minutes_at_the_median_speed_of_each_phase"] == pytest.approx(160 * 0.75 / 60, abs=0.05)


def test_a_run_without_validation_is_told_without_one_and_one_without_steps_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEPS[1]) + "\n")
    assert summarise_training(tmp_path)["held_out"] == {}
    (tmp_path / "metrics.jsonl").write_text("")
    assert_refusal("has no steps", summarise_training, tmp_path)
