"""The zip that the leaderboard of GLUE takes."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from finetuning.files.glue_files import AX
from finetuning.files.tables import read_tsv
from finetuning.tasks.glue import leaderboard_content, leaderboard_file

TEST_ROWS = {
    ("cola", "test"): 1_063,
    ("sst2", "test"): 1_821,
    ("mrpc", "test"): 1_725,
    ("stsb", "test"): 1_379,
    ("mnli", "test_matched"): 9_796,
    ("mnli", "test_mismatched"): 9_847,
    ("qnli", "test"): 5_463,
    ("qqp", "test"): 390_965,
    ("rte", "test"): 3_000,
    ("wnli", "test"): 146,
    ("mnli", AX): 1_104,
}
"""What the leaderboard wants answers to: the test splits of all tasks, with their numbers of rows."""
MADE = (1980, 1, 1, 0, 0, 0)
"""The time of files in the zip, which is the same every time."""


def write_submission(folders: Sequence[Path], path: Path, *, fill: bool = False) -> None:
    """Puts the answers that the tasks wrote into these folders into a zip.

    `fill` answers what no task answered: with the first class, or with 0. Without it that is a UserError.
    """
    contents, missing = {}, []
    for (name, split), rows in TEST_ROWS.items():
        file = leaderboard_file(name, split)
        if found := next((folder / file for folder in folders if (folder / file).is_file()), None):
            if (answers := len(read_tsv(found))) != rows:
                raise UserError(f"{found}: {answers:,} answers; the leaderboard has {rows:,} questions")
            contents[file] = found.read_bytes()
        else:
            missing.append(file)
            contents[file] = leaderboard_content(name, np.zeros(rows, np.int64))
    if missing and not fill:
        count = f"{len(missing)} of its {len(TEST_ROWS)} files"
        raise UserError(f"{path.name}: {count} have no answers yet; --submission fills them in")
    with replacing(path) as target, zipfile.ZipFile(target, "w") as archive:
        for file, content in contents.items():
            archive.writestr(zipfile.ZipInfo(file, MADE), content, zipfile.ZIP_DEFLATED)
