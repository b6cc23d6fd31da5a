"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.common.errors import UserError
from data_prep.common.files import unfinished_name, write_json


def test_a_link_where_a_file_is_being_written_is_not_followed(tmp_path: Path) -> None:
    """Whoever can write in the folder could choose what of this user is overwritten."""
    (tmp_path / "precious").write_text("precious")
    unfinished_name(tmp_path / "ended.json").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"ended\.json: cannot be written"):
        write_json(tmp_path / "ended.json", {})
    assert (tmp_path / "precious").read_text() == "precious"
    write_json(tmp_path / "ended.json", {})
    assert (tmp_path / "ended.json").read_text() == "{}\n"
