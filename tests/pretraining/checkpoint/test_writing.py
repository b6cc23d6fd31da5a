"""Which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

from pretraining.checkpoint.record import DAMAGED, FOLDER, RECORD
from pretraining.checkpoint.writing import retire
from pretraining.config.settings import Checkpoints


def test_a_damaged_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / FOLDER / f"step-{step:08}").mkdir(parents=True)
        (tmp_path / FOLDER / f"step-{step:08}" / RECORD).touch()
    (tmp_path / FOLDER / "step-00000002" / DAMAGED).touch()
    (tmp_path / FOLDER / "step-00000003" / RECORD).unlink()
    retire(tmp_path, Checkpoints(keep=1))
    assert sorted(path.name[-1] for path in (tmp_path / FOLDER).iterdir()) == ["2", "3", "5"]
