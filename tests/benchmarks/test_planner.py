"""planner.py end to end: what it says for clusters that fit, and for those that do not."""

import re

import pytest
from conftest import ROOT
from support.commands import refusal
from support.processes import run_program
from support.published import read_published

from benchmarks import planner

HUGE = "--model.hidden 5120 --model.heads 80"


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert planner.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def fault(*words: str) -> str:
    return refusal(planner.main, [*words])


def hours_of(text: str) -> float:
    """The first time in a text, in hours."""
    found = re.search(r"(?:(\d+) h )?(\d+) m(?: (\d+) s)?", text)
    assert found
    whole, minutes, seconds = (int(each or 0) for each in found.groups())
    return whole + minutes / 60 + seconds / 3600


def hours(shown: str) -> float:
    """The hours of the first stage."""
    [line] = [line for line in shown.splitlines() if re.match(r"ZeRO 1.* x ", line)]
    return hours_of(line)


def test_the_command_plans_a_node_and_ends_with_2_for_a_mistake() -> None:
    command = str(ROOT / "benchmarks" / "planner.py")
    done = run_program(command, [], ROOT)
    assert (done.code, done.errors) == (0, "")
    assert done.output.startswith("bert_large_lamb on 1 node of 8 h100-80 with 80 GB; bf16; 53% of a GPU")
    done = run_program(command, ["--gpu", "abacus"], ROOT)
    [line] = done.errors.splitlines()
    assert (done.code, line[:56]) == (2, "error: --gpu abacus: unknown; there is v100-16, v100-32,")


def test_a_large_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--recipe bert_large_lamb --nodes 32 --gpus-per-node 8 --gpu a100-80 --network hdr200x8".split()
    shown = plan(capsys, *words, "--price-per-gpu-hour", 2)
    assert "32 nodes of 8 a100-80 with 80 GB, joined by hdr200x8; bf16" in shown
    assert [f"ZeRO {zero}" in shown for zero in range(4)] == [False, True, True, True]
    assert "ZeRO 1 (this recipe)" in shown
    assert "to take: --parallel.zero 1 --phases.0.micro_batch 256 --phases.1.micro_batch 128" in shown
    assert re.search(r"^phase1 +0\.\d+ +0\.\d+ +0\.\d+ +0\.\d+ +0\.\d+ +0\.\d+ +7,038", shown, re.MULTILINE)
    cost = 2 * 256 * hours(shown)
    [line] = [line for line in shown.splitlines() if line.startswith("ZeRO 1 (this recipe)") and " x " in line]
    assert float(line.split()[-1].replace(",", "")) == pytest.approx(cost, rel=0.02)


def test_the_range_of_the_run_of_53_minutes_has_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    [published] = [row for row in read_published()["hours"] if row["gpus"] == 1472]
    words = [word for name in ("gpu", "network", "gpus_per_node") for word in (f"--{name}", published[name])]
    shown = " ".join(plan(capsys, "--recipe", "bert_large_1472_gpus", "--nodes", 92, *words).split())
    found = re.search(r"- from ([\w ]+) to ([\w ]+): published runs", shown)
    assert found
    assert hours_of(found[1]) < published["hours"] < hours_of(found[2])


def test_a_plan_says_what_the_host_costs_where_it_bounds_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """24 layers of 0.7, 1.1 or 4 ms for each phase, with the little besides."""
    words = ["--nodes", 64, "--phases.0.batch", 4096, "--phases.1.batch", 2048]
    shown = " ".join(plan(capsys, *words).split())
    told = re.search(r"steps take ([\d.]+) to ([\d.]+) s by the speed of the host, here ([\d.]+)", shown)
    assert told
    least, most, planned = map(float, told.groups())
    assert 2 * 24 * 0.7e-3 < least < planned < most < 2 * 24 * 4e-3 * 1.5
    assert "the speed of the host" not in " ".join(plan(capsys).split())


def test_faster_networks_gpus_and_numbers_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (hours(plan(capsys, "--nodes", 16, "--network", name)) for name in ("10gbe", "ndr400x8"))
    assert slow > fast
    old, new = (hours(plan(capsys, "--gpu", name)) for name in ("a100-40", "h200"))
    assert old > 2 * new
    exact, rounded = (hours(plan(capsys, "--gpu", "a100-80", "--precision.dtype", name)) for name in ("fp32", "bf16"))
    assert exact > 3 * rounded


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    huge = "--model.size large --model.hidden 4096 --model.heads 64 --gpus-per-node 1".split()
    said = fault("--gpu", "v100-16", *huge)
    assert re.search(r"phase1 needs \d+\.\d GB a rank under ZeRO 1 with a micro-batch of 1, and may take 15.2", said)
    name = re.findall(r"--gpu (\S+) fits", said)[0]
    assert "GPUs" in plan(capsys, "--gpu", name, *huge)
    many = "--model.hidden 4096 --model.heads 64 --nodes 8 --deepspeed.zero_optimization.reduce_bucket_size 1e7".split()
    said = fault("--gpu", "v100-32", *many, "--deepspeed.zero_optimization.stage3_max_live_parameters", "1e7")
    assert "--parallel.zero 2 fits; --parallel.zero 3 fits" in said


BATCHES = "--phases.0.batch 80000 --phases.1.batch 40000"


def test_what_is_planned_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in {
        f"--nodes 1250 {BATCHES}": "1,250 nodes of 8",
        "--gpu v100-16": "; fp16;",
        "--gpu v100-16 --phases.0.micro_batch 8192": "GPUs",  # micro-batches are chosen, whatever the recipe says
        "--recipe adapt --model.size base": "seconds of a step",
        "--recipe gpt2_8b": "seconds of a step",
        "--recipe modern_base --gpus-per-node 1": "seconds of a step",
        "--recipe bert_large_budget": "the clock ends it, after as many fewer or more steps",
    }.items():
        assert shown in plan(capsys, *words.split())


FAULTS = {
    "--nodes -3 --price-per-gpu-hour 0": "^--nodes -3: at least 1\n--price-per-gpu-hour 0: a number above 0$",
    "--nodes 0 --gpu h1000 --model.siz base": "^--nodes 0: .*\n--gpu h1000: .*\n--model.siz: ",
    "--network hdr100x4": r"^--network hdr100x4: unknown; there is edr100, hdr200",
    "--gpu v100-16 --precision.dtype bf16": 'precision.dtype = "bf16": v100-16 has none',
    "--nodes 3": "^phases.0.batch = 65536: does not divide by 24 ranks; take batch = 65520\nphases.1.batch = 32768: ",
    "--recipe gpt2_8b --gpus-per-node 4 --parallel.across_nodes true": "does not divide the ranks, 4; start a multiple",
    f"{HUGE} --gpu a100-40": "--parallel.zero 3 fits",
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_told_with_its_cure(words: str) -> None:
    assert re.search(FAULTS[words], fault(*words.split()))


def test_a_stage_that_the_recipe_cannot_have_is_no_cure() -> None:
    assert "--parallel.zero 3" not in fault(*HUGE.split(), "--gpu", "a100-40", "--parallel.tensor", "2")
