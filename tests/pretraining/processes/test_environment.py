"""What a process is given before PyTorch is loaded."""

from __future__ import annotations

import os

import pytest

from pretraining.processes.environment import prepare_process

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_memory_of_a_gpu_comes_in_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    prepare_process()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")  # which prepare_process has set


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    prepare_process()
    assert {each: os.environ.get(each) for each in NAMES if each in os.environ} == {name: "max_split_size_mb:128"}
