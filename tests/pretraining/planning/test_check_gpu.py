"""`train.py --check --gpu` on a login node: a plan that does not fit is a mistake, which says what would fit."""

from __future__ import annotations

import re

import pytest

from pretraining import train

GIVEN = "--gpu v100-32 --ranks 8 --phases.0.micro_batch"
HUGE = "--gpu v100-32 --model.hidden 4096 --model.heads 64 --ranks 8"


def check(words: str, said: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and what was printed."""
    code = train.main(["--check", "--recipe", "bert_large_lamb", *words.split()])
    return code, "".join(said.readouterr())


def test_hours_are_those_of_the_gpu_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check("--ranks 64 --gpu h100-80", capsys)
    assert code == 0, text
    assert "8 nodes of 8 h100-80" in text
    assert re.search(r"from \d+ h \d+ m to \d+ h \d+ m: published runs", " ".join(text.split()))


def test_what_does_not_fit_is_a_mistake_with_its_cures(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(HUGE, capsys)
    assert code == 2
    assert re.search(r"needs \d+\.\d GB a rank under ZeRO 1 with .*, and may take ..\.. of 32.0 GB; ", text)
    for cure in re.findall(r"(--\S+ \S+) fits", text):
        assert check(f"{HUGE} {cure}", capsys)[0] == 0, "what is said to fit does"


def test_a_given_micro_batch_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(f"{GIVEN} 8192", capsys)
    assert code == 2
    assert text.endswith("; --phases.0.micro_batch auto fits\n"), "nothing else makes room for so many"
    assert check(f"{GIVEN} auto", capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            "--gpu h1000 --network ndr4000 --optimizer.nam x",
            ["--gpu h1000", "--network ndr4000", "--optimizer.nam"],
        ),
        ("--network hdr200x8", ["--network and --gpus-per-node"]),
    ],
)
def test_what_is_unknown_or_missing_is_named(words: str, faults: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(words, capsys)
    assert code == 2
    assert all(f"{fault}: " in text for fault in faults)
