"""What cannot be in a recipe: every mistake is named with its cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import PLAIN, faults, write_plain

from pretraining.config.overrides import load_recipe

SIZE = 'a whole number of at least 1 is needed, or "auto"'


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_plain(tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # what does not go together
        ("--model.heads 3", "--model.heads = 3: does not divide model.hidden = 128; 2 does, with 64 a head"),
        (
            "--phases.0.length 1024",
            "--phases.0.length = 1024: the model has 512 positions; take 8 to 512, or model.positions = 1024",
        ),
        ("--phases.0.length 4", "--phases.0.length = 4: the model has 512 positions; take 8 to 512"),
        (
            "--phases.0.warmup_steps 120",
            "--phases.0.warmup_steps = 120: the schedule has 120 steps in all (phases.0.steps and phases.1.steps); "
            "give fewer than these",
        ),
        (
            "--phases.1.power 2",
            "--phases.1.power = 2.0: the phase has no learning_rate of its own, so it follows the schedule of the "
            "phase before; remove it, or give phases.1.learning_rate",
        ),
        ("--phases.1.name one", '--phases.1.name = "one": phases.0.name is the same'),
        (
            "--phases []",
            "--phases: is missing: give at least one [[phases]] with name, length, batch, micro_batch, steps and "
            "learning_rate",
        ),
        (
            "--phases.0.batch 100",
            "--phases.0.batch = 100: does not divide by 1 rank x phases.0.micro_batch = 16; "
            "take batch = 96, or micro_batch = 10",
        ),
        ("--phases.0.micro_batch 0", f"--phases.0.micro_batch = 0: {SIZE}"),
        ("--phases.0.micro_batch 1.5", f"--phases.0.micro_batch = 1.5: {SIZE}"),
        ("--phases.0.micro_batch true", f"--phases.0.micro_batch = true: {SIZE}"),
        ("--phases.0.micro_batch largest", f'--phases.0.micro_batch = "largest": {SIZE}'),
        # hardware
        (
            "--precision.dtype fp16 --parallel.device cpu",
            '--precision.dtype = "fp16": not on a CPU (parallel.device = "cpu"); '
            'take "bf16", "fp32", or "auto" for the best that there is',
        ),
        (
            "--parallel.offload optimizer --parallel.zero 0",
            '--parallel.offload = "optimizer": needs parallel.zero = 1, 2 or 3; it is 0',
        ),
        (
            "--parallel.offload all",
            '--parallel.offload = "all": weights leave the GPU under parallel.zero = 3 alone; it is 1',
        ),
        (
            "--parallel.offload optimizer --parallel.device cpu",
            '--parallel.offload = "optimizer": a CPU has no other memory to move it to (parallel.device = "cpu"); '
            'take "none"',
        ),
        (
            "--precision.tf32 true --precision.dtype fp32 --parallel.device cpu",
            '--precision.tf32 = true: only a GPU has TF32 (parallel.device = "cpu"); take false',
        ),
        (
            "--precision.tf32 true",
            '--precision.tf32 = true: is for products in fp32 (precision.dtype = "auto"); '
            'take false, or precision.dtype = "fp32"',
        ),
        (
            "--compute.compile true --parallel.zero 3",
            "--compute.compile = true: not with parallel.zero = 3, which fetches the weights of a layer by calls that "
            "cannot be compiled; take parallel.zero = 1 or 2, or compute.compile = false",
        ),
        # DeepSpeed's own
        (
            "--deepspeed.train_batch_size 8",
            "--deepspeed.train_batch_size = 8: follows from the recipe: phases.0.batch; remove it",
        ),
        (
            "--deepspeed.zero_optimization.stage 2",
            "--deepspeed.zero_optimization.stage = 2: follows from the recipe: parallel.zero; remove it",
        ),
        (
            "--deepspeed.zero_optimization.round_robin_gradients",
            "--deepspeed.zero_optimization.round_robin_gradients = true: DeepSpeed mixes up parameters under it; "
            "remove it",
        ),
        (
            "--deepspeed.zero_optimization.zenflow",
            "--deepspeed.zero_optimization.zenflow = true: moves weights by gradients of earlier steps, which is no "
            "optimizer of ours; remove it",
        ),
        (
            "--deepspeed.prescale_gradients",
            "--deepspeed.prescale_gradients = true: follows from the recipe: gradients of ranks are added in fp32; "
            "remove it",
        ),
        # LAMB's
        (
            "--optimizer.trust_all",
            '--optimizer.trust_all = true: is for optimizer.name = "lamb"; it is "adamw"',
        ),
        ("--deepspeed.zero_optimization 2", "--deepspeed.zero_optimization = 2: a table is needed"),
        (
            "--deepspeed.wall_clock_break_down",
            "--deepspeed.wall_clock_break_down = true: unknown; did you mean deepspeed.wall_clock_breakdown?",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_cure(plain: Path, words: str, expected: str) -> None:
    assert faults(plain, *words.split()) == [expected]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (
            {"lengths": [64, 256]},
            "phases.1.length = 512: the data has 64, 256; make it with shard.py --lengths 64 256 512, or take less",
        ),
        (
            {"ranks": 8},
            "phases.0.batch = 64: does not divide by 8 ranks x phases.0.micro_batch = 16; "
            "take batch = 128, or micro_batch = 8",
        ),
        (
            {"ranks": 3},
            "phases.1.batch = 32: does not divide by 3 ranks x phases.1.micro_batch = 8; take batch = 24",
        ),
    ],
)
def test_what_is_known_of_the_run_is_checked_too(plain: Path, known: dict[str, Any], expected: str) -> None:
    assert f"{plain}: {expected}" in faults(plain, **known)


def test_a_batch_that_the_ranks_cannot_share_is_named_for_any_micro_batch(plain: Path) -> None:
    words = ["--phases.0.micro_batch", "auto", "--phases.1.micro_batch", "auto"]
    assert load_recipe(plain, words, ranks=16).phases[1].micro_batch == "auto"
    assert faults(plain, *words, ranks=3) == [
        f"{plain}: phases.0.batch = 64: does not divide by 3 ranks; take batch = 63",
        f"{plain}: phases.1.batch = 32: does not divide by 3 ranks; take batch = 33",
    ]


def test_a_missing_gpu_is_named(plain: Path) -> None:
    assert faults(plain, "--parallel.device", "cuda", device="cpu") == [
        '--parallel.device = "cuda": no GPU is found here; take "auto" or "cpu", or look at nvidia-smi'
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate = 1e-3", "phases.0.learning_rate: is missing: the highest learning rate"),
        ("batch = 64", "phases.0.batch: is missing: sequences of a step, over all ranks"),
        ("steps = 100", "phases.0.steps: is missing: how long the phase is"),
        ('name = "one"', "phases.0.name: is missing: what logs and checkpoints call it"),
        (
            'size = "tiny"',
            "model.size: is missing: one of tiny, mini, small, medium, base, large; "
            "or give the numbers, model.layers and model.hidden; or begin with a model that has them: --init FOLDER",
        ),
    ],
)
def test_what_is_missing_is_named(plain: Path, line: str, expected: str) -> None:
    assert line in PLAIN
    plain.write_text(PLAIN.replace(line + "\n", "", 1))
    assert faults(plain) == [f"{plain}: {expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps = 10\n", "phases.0.share: is missing: the recipe gives steps, and each phase its share of them"),
        ("hours = 1.0\n", "phases.1.share: is missing: the recipe gives hours, and each phase its share of them"),
    ],
)
def test_durations_that_do_not_go_together(plain: Path, text: str, expected: str) -> None:
    plain.write_text(text + PLAIN)
    assert f"{plain}: {expected}" in faults(plain)


def test_shares_make_one(plain: Path) -> None:
    plain.write_text(
        "steps = 1000\n" + PLAIN.replace("steps = 100\n", "share = 0.9\n").replace("steps = 20", "share = 0.2")
    )
    assert faults(plain) == [f"{plain}: phases.0.share = 0.9: the shares of the phases make 1.1; they must make 1"]
    assert load_recipe(plain, ["--phases.1.share", "0.1"]).phase_steps() == (900, 100)


def test_a_share_needs_something_to_be_of(plain: Path) -> None:
    expected = "--phases.0.share = 0.5: of what? give the recipe steps or hours"
    assert faults(plain, "--phases.0.share", "0.5") == [expected]


def test_warmup_steps_do_not_go_by_the_clock(plain: Path) -> None:
    plain.write_text(
        "hours = 1.0\n" + PLAIN.replace("steps = 100\n", "share = 0.9\n").replace("steps = 20", "share = 0.1")
    )
    assert faults(plain, "--phases.0.warmup_steps", "5") == [
        "--phases.0.warmup_steps = 5: the recipe goes by the clock (hours); give phases.0.warmup, a share of the time"
    ]
    assert load_recipe(plain).phase_seconds() == (3240.0, 360.0)
    assert load_recipe(plain).phase_steps() is None
