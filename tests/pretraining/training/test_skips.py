"""The batches that a run leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.common.errors import UserError
from pretraining.training.skips import SKIPPED, read_skips


def test_a_list_of_batches_to_leave_out_that_is_damaged_is_named(tmp_path: Path) -> None:
    assert read_skips(tmp_path) == []
    (tmp_path / SKIPPED).touch()
    with pytest.raises(UserError, match=SKIPPED):
        read_skips(tmp_path)
