"""The benchmark of inference: everybody says the same, whoever does not or cannot is told, and the table is kept."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import inference, peer
from benchmarks.answerers import ON_CPU, ON_GPU, SIDES, Replies
from benchmarks.inference import InferenceContest, count_repeats, find_deviations, summarise
from data_prep.common.errors import UserError


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(UserError, match="not installed: onnxruntime"):
        SIDES["onnxruntime int8"].make(tmp_path)
    assert {*ON_CPU, *ON_GPU} == SIDES.keys()


def test_whoever_says_something_else_is_named() -> None:
    right = np.array([[1.0, 2.0]])
    assert find_deviations({"cloze fp32": right, "cloze bf16": right + 0.01}) == {}
    wrong = find_deviations({"cloze fp32": right + 0.01, "onnxruntime fp32": right, "transformers fp32": right})
    assert wrong == {"cloze fp32": "logits of cloze fp32 are 0.01 away from those of onnxruntime fp32; 0.0002 may be"}
    assert "nan away" in find_deviations({"cloze fp32": right, "cloze int8": right * np.nan})["cloze int8"]
    assert find_deviations({"transformers fp32": right * np.nan, "cloze fp32": right}).keys() == {"transformers fp32"}


def test_all_at_once_is_one_request_for_us_and_several_for_others() -> None:
    requests = [[np.array([1]), np.array([2])], [np.array([3])]]
    contest = InferenceContest("all", requests, at_once=True)
    assert list(map(len, contest.requests_for("cloze bf16"))) == [3]
    assert contest.requests_for("transformers bf16") is requests
    assert InferenceContest("x", requests).requests_for("cloze bf16") is requests


def test_rates_and_ratios_are_of_turns() -> None:
    def turn(seconds: float) -> Replies:
        return Replies(np.zeros((4, 2)), [seconds / 2] * 2)

    contest = InferenceContest("x", [[np.array([1])] * 2] * 2)
    found = summarise(contest, {"cloze fp32": [turn(1.0), turn(2.0)], "transformers fp32": [turn(3.0), turn(4.0)]})
    assert found["sides"]["cloze fp32"]["sentences_per_second"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0}
    ratio = found["times_as_fast"]["cloze fp32"]["transformers fp32"]
    assert ratio == {"median": 2.5, "lowest": 2.0, "highest": 3.0}
    assert found["sides"]["transformers fp32"]["p99_ms"] == 2000
    json.dumps(found)


def test_a_turn_takes_a_while_but_not_for_ever() -> None:
    assert count_repeats(inference.TURN_SECONDS / 10) == 10
    assert count_repeats(1e-6) == inference.MOST_REQUESTS
    assert count_repeats(60) == 1
    assert count_repeats(1e-6, at_once=True) == 1
