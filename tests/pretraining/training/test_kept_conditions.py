"""What a run with `parallel.same_bits` keeps: too many threads for a machine are told, and another device is."""

from unittest.mock import Mock

import pytest

from data_prep.common.errors import SharedError
from pretraining.processes import group
from pretraining.training import same_bits

KEPT = {"kernels": "vectors", "threads of a rank": 4, "precision.dtype": "fp32", "torch": "2.13"}


@pytest.mark.parametrize(("cores", "warns"), [(4, False), (2, True), (8, False)])
def test_threads_are_kept_and_told_where_the_cores_are_too_few(
    cores: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest, request, context = Mock(), Mock(), Mock()
    latest.run.same_bits, request.recipe.compute.threads, context.world.rank = KEPT, None, 0
    monkeypatch.setattr(group, "default_threads", lambda _: cores)
    assert same_bits.choose_threads(latest, request, context) == 4
    assert context.warn.called == warns


def test_another_device_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by its threads, which nothing can make equal."""
    now = {**KEPT, "kernels": "NVIDIA H200", "threads of a rank": 0, "precision.dtype": "bf16"}
    monkeypatch.setattr(group, "gather", lambda value: [value])
    monkeypatch.setattr(same_bits, "describe_conditions", lambda *_: now)
    latest = Mock()
    latest.run.same_bits = KEPT
    with pytest.raises(SharedError, match="kernels was vectors, now NVIDIA H200; start on such a device"):
        same_bits.require_same_conditions(latest, Mock(), Mock())
