"""The record of a plan, which train.py --check --json and planner.py --json print: arithmetic, files, and the text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.commands import run_main
from support.processes import run_program
from support.training import Place

from benchmarks import planner
from data_prep.common.progress import duration
from data_prep.shards import Manifest
from pretraining import train
from pretraining.architectures.weights import count_parameters
from pretraining.checkpoint.record import list_finished
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.huggingface.weights import list_weights
from pretraining.planning import cost, plan, record

pytestmark = pytest.mark.usefixtures("leaves_group")
RESULTS = ROOT / "benchmarks" / "results"
LARGE = "--recipe bert_large_lamb --price-per-gpu-hour 2.5"
CHECK = f"--check {LARGE} --gpu a100-80 --ranks 64"
PLANNER = f"{LARGE} --gpu a100-80 --nodes 8"


def check(words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_main(train.main, *words.split(), "--json"))
    return found


@pytest.mark.parametrize(("entry", "words"), [("pretraining/train.py", CHECK), ("benchmarks/planner.py", PLANNER)])
def test_a_command_prints_one_json_object_of_the_hours_and_what_follows_from_them(entry: str, words: str) -> None:
    """64 A100 of 400 W at 2.5 for an hour of each."""
    done = run_program(str(ROOT / entry), [*words.split(), "--json"], ROOT)
    assert (done.code, done.errors) == (0, "")
    found = json.loads(done.output)
    estimates = (found["stages"][0] if "stages" in found else found)["estimates"]
    hours = estimates["hours"]
    assert 0 < hours["low"] < hours["planned"] < hours["high"]
    assert estimates["energy_kWh"] == pytest.approx({name: 0.4 * 64 * value for name, value in hours.items()})
    assert estimates["cost"] == pytest.approx({name: 2.5 * 64 * value for name, value in hours.items()})
    for size in found.get("sizes", []):
        own = size["estimates"]
        assert own["cost"]["planned"] == pytest.approx(2.5 * size["all_ranks"] * own["hours"]["planned"])


def walk(value: Any) -> Iterator[Any]:
    """Yields all numbers and texts of what JSON has."""
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from walk(each)
    elif isinstance(value, (int, float, str)):
        yield value


def find_strange_numbers(text: str, found: dict[str, Any]) -> list[str]:
    """Finds the numbers in a text that are none of JSON's, whole, rounded, as percent, in millions or in billions."""
    values = [*walk(found)]
    numbers = [value for value in values if not isinstance(value, str)]
    scales = (1, 100, 1e-6, 1e-9, 1000, 3600)  # the last two for smaller units
    known = {f"{scale * n:{form}}" for n in numbers for scale in scales for form in FORMS}
    left = " ".join(text.split())
    said = {" ".join(value.split()) for value in values if isinstance(value, str)} | {*map(duration, numbers)}
    for each in sorted(said, key=len, reverse=True):
        left = left.replace(each, " ") if re.search(r"\d", each) else left
    return [number for number in re.findall(r"(?<![\w.])\d[\d.,e+-]*(?<=\d)", left) if number not in known]


FORMS = (".0f", ",.0f", ",.1f", ",.2f", ".4f", ".3g", ".2g")


@pytest.mark.parametrize("more", ["", "--precision.dtype fp32", "--model.size base --parallel.zero 3"])
def test_every_number_of_the_text_is_in_the_json(more: str) -> None:
    for main, words in ((train.main, CHECK), (planner.main, PLANNER)):
        command = [*words.split(), *more.split()]
        found, text = json.loads(run_main(main, *command, "--json")), run_main(main, *command)
        assert find_strange_numbers(text, found) == []
        estimates = (found["stages"][0] if "stages" in found else found)["estimates"]
        assert all(
            f"{values['planned']:.3g}" in text for values in estimates.values() if 0 < values.get("planned", 0) < 99
        )
        assert find_strange_numbers(text.replace("3", "7"), found), "the comparison could fail"


def test_zero_0_is_there_in_fp32_alone() -> None:
    for dtype, least in (("bf16", 1), ("fp32", 0)):
        words = f"--parallel.zero 0 --precision.dtype {dtype}"
        found = check(f"{CHECK} {words}")
        assert found["zero"] == least
        assert [each["zero"] for each in found["memory"]] == [*range(least, 4)]
        stages = json.loads(run_main(planner.main, *f"{PLANNER} {words} --json".split()))["stages"]
        assert sorted(each["zero"] for each in stages) == [*range(least, 4)]
        assert stages[0]["zero"] == least


def test_without_data_full_sequences_are_said_to_be_assumed() -> None:
    """And the range is that of published software, as the note on it says."""
    for recipe in ("bert_large_lamb", "roberta_base"):
        found = check(f"--check --recipe {recipe} --gpu a100-80 --ranks 64")
        assert any("full sequences are assumed" in note for note in found["notes"])
        hours = found["estimates"]["hours"]
        assert [hours[name] / hours["planned"] for name in ("low", "high")] == pytest.approx(cost.PUBLISHED)
        assert "shards_GB" not in found["estimates"]


def test_by_the_clock_the_steps_have_a_range() -> None:
    found = check("--check --recipe bert_large_budget --ranks 8 --gpu a100-80")
    steps = found["estimates"]["steps"]
    assert steps["planned"] == found["steps"]
    assert [steps["planned"] / steps[name] for name in ("high", "low")] == pytest.approx(cost.PUBLISHED)
    assert {*found["estimates"]["hours"].values()} == {24}
    assert "clock" in " ".join(found["notes"])


def test_what_is_kept_and_exported_is_counted() -> None:
    words = "--check --gpu a100-80 --ranks 64 --checkpoints.keep_at [100,200]"
    rtd = "--model.architecture electra --objective.name rtd"
    for more in ("--recipe bert_large_lamb", f"--recipe bert_large_lamb {rtd}"):
        found = check(f"{words} {more}")["estimates"]
        recipe = load_recipe(RECIPES / "bert_large_lamb.toml", more.split()[2:])
        weights = 4 * count_parameters(list_weights(recipe.shape(None))) / 1e9
        assert (found["checkpoints_kept"]["planned"], found["export_GB"]["planned"]) == (5, pytest.approx(weights))


def test_what_is_not_estimated_is_said() -> None:
    """As for ranks of other machines, whose speed is unknown."""
    notes = check("--check --recipe bert_large_lamb --ranks 64 --price-per-gpu-hour 2")["notes"]
    for each in ("cost: unknown", "fine-tuning: not measured"):
        assert any(note.startswith(each) for note in notes)


def test_sizes_are_those_of_the_files(place: Place, straight: Path) -> None:
    """But for what files have besides their tensors, of which so small a model has much."""
    words = f"--check --recipe {place.recipe} --data {place.data}"
    found = check(words)
    estimates, manifest = found["estimates"], Manifest.read(place.data)
    assert not any("no --data" in note for note in found["notes"])
    folder = sum(file.stat().st_size for file in place.data.rglob("*") if file.is_file())
    assert estimates["shards_GB"]["planned"] * 1e9 == pytest.approx(folder, rel=0.02)
    tensors = [*list_finished(straight)[-1].rglob("*.safetensors")]
    written = sum(file.stat().st_size for file in tensors)
    assert estimates["checkpoint_GB"]["planned"] * 1e9 == pytest.approx(written, rel=0.1)
    [exported] = straight.glob("export/*.safetensors")
    assert estimates["export_GB"]["planned"] * 1e9 == pytest.approx(exported.stat().st_size, rel=0.1)
    slow, quick, _ = record.PREPARED
    core_hours = {name: manifest.corpus.text_bytes / speed / 3600 for name, speed in (("low", quick), ("high", slow))}
    assert {name: estimates["preparation_core_hours"][name] for name in core_hours} == pytest.approx(core_hours)


def read(pattern: str) -> Iterator[dict[str, Any]]:
    for path in RESULTS.glob(pattern):
        yield json.loads(path.read_text())


def test_ranges_are_those_of_the_measured_files() -> None:
    for on_cpu, pattern in ((True, "throughput-*-cores.json"), (False, "throughput-nvidia-*.json")):
        contests = [each for found in read(pattern) for each in found["contests"].values()]
        shares = [each["sides"]["cloze"]["share_of_ceiling"]["median"] for each in contests]
        assert (min(shares), max(shares)) == plan.USEFUL_RANGES[on_cpu]
    [runs] = [found["whole_runs"] for found in read(Path(record.PREPARED[2]).name)]
    speeds = [run[name] for run in runs for name in ("mb_per_s_of_a_core", "with_5_duplicates")]
    assert (min(speeds), max(speeds)) == tuple(pytest.approx(speed / 1e6) for speed in record.PREPARED[:2])
    tuned = []
    for found in read(Path(record.TUNED[2]).name):
        model = found["models"]["mini"]
        assert (model["layers"], model["hidden"]) == record.TUNED_MODEL
        training = model["contests"]["sst2-dynamic"]["against"]["autocast"]["training"]
        tuned.append(training.get("cloze_items_per_second", training.get("cloze")))
    assert (min(tuned), max(tuned)) == record.TUNED[:2]


def test_fine_tuning_is_estimated_where_it_was_measured() -> None:
    def find(words: str) -> dict[str, Any] | None:
        estimates: dict[str, Any] = check(f"--check --recipe bert_mini {words}")["estimates"]
        return estimates.get("fine_tuning_hours_per_million_sentences")

    (slow, quick, source), found = record.TUNED, find("--parallel.device cpu --ranks 2")
    assert found == {
        "low": pytest.approx(1e6 / quick / 3600),
        "high": pytest.approx(1e6 / slow / 3600),
        "source": source,
    }
    assert find("--gpu h200 --ranks 1") is None


def test_what_does_not_fit_is_said_in_json_too() -> None:
    words = "--gpu v100-16 --model.hidden 4096 --model.heads 64"
    for command, entry in ((f"--check {LARGE} --ranks 1", "pretraining/train.py"), (LARGE, "benchmarks/planner.py")):
        done = run_program(str(ROOT / entry), f"{command} {words} --json".split(), ROOT)
        found = json.loads(done.output)
        assert done.code == 2
        assert "--gpu" in done.errors
        assert not any(each["fits"] or "hours" in each["estimates"] for each in found.get("stages", [found]))


def test_options_of_plans_are_refused_where_none_is_asked_for() -> None:
    said = run_main(train.main, *"--recipe demo --json --ranks 0 --price-per-gpu-hour 0".split(), code=2)
    assert [f"--{name}: only with --check" in said for name in ("ranks", "price-per-gpu-hour", "json")] == [True] * 3
    assert "--price-per-gpu-hour 0: a number above 0" in run_main(
        train.main, *"--check --recipe demo --price-per-gpu-hour 0".split(), code=2
    )
