"""How a time limit is written, and where it comes from."""

from __future__ import annotations

import time

import pytest

from data_prep.common.errors import UserError
from pretraining.processes import stopping
from pretraining.processes.stopping import time_limit

LIMITS = {
    "90m": 5400,
    "2h": 7200,
    "1.5h": 5400,
    "45s": 45,
    "1d": 86400,
    "30:00": 1800,
    "12:00:00": 43200,
    "1-12:00:00": 129600,
    "2-01:30": 178200,
}


@pytest.mark.parametrize("text", LIMITS)
def test_how_a_time_limit_is_written(text: str) -> None:
    assert time_limit(text, {}) == LIMITS[text]


@pytest.mark.parametrize(
    "text", ["", "90", "m", "-2h", "2 h", "2w", "1:2:3", "1-12", "tomorrow", "1e3s", "nan", "12:00h"]
)
def test_a_time_limit_that_is_not_understood(text: str) -> None:
    with pytest.raises(UserError, match=f"--time-limit {text}: not understood"):
        time_limit(text, {})


def test_the_end_of_the_slurm_job() -> None:
    for text in ("", "soon"):
        assert time_limit("auto", {"SLURM_JOB_END_TIME": text}) is None
    assert time_limit("auto", {}) is None
    limit = time_limit("auto", {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)})
    assert limit is not None
    assert limit - (time.monotonic() - stopping.STARTED) == pytest.approx(1000, abs=60)
