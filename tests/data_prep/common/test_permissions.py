"""What may not be read is said to need permission, not to be missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

NOBODY = 65534
ASK = """
import os, sys
from pathlib import Path
from data_prep.common.errors import UserError
from data_prep.common.hub import find_folder
from data_prep.readers.listing import list_files
from data_prep.readers.reader import Problems
from data_prep.vocabulary.source import find_vocabulary_folder
os.setgid({id}); os.setuid({id})
place = sys.argv[1]
asked = (lambda: find_folder(place, ()), lambda: find_vocabulary_folder(Path(place)),
         lambda: list_files([place], None, Problems("fail")))
for ask in asked:
    try:
        ask()
    except UserError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, whom only root can become")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    place = tmp_path / "own" / "model"
    place.mkdir(parents=True)
    (tmp_path / "own").chmod(0o700)
    command = [sys.executable, "-c", ASK.format(id=NOBODY), str(place)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 3
    for line in said:
        assert str(place) in line
        assert "permission denied" in line
        assert "no such" not in line
