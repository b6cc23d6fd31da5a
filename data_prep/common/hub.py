"""The Hugging Face hub: the files of a model by its name, and what the hub's errors mean for a user."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_prep.common.errors import UserError
from data_prep.common.files import absence
from data_prep.common.terminal import is_terminal

STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors of a disk, not of the network."""
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # bert-base-uncased, google-bert/bert-base-uncased


def find_folder(given: str, files: Sequence[str], fetch: Callable[[str, Sequence[str]], Path] | None = None) -> Path:
    """Finds what a user names: a path that exists, otherwise the model of this name on the hub.

    Of a model the files of these names or patterns are fetched into the hub's own cache, from HF_ENDPOINT where that is
    set, and without the network under HF_HUB_OFFLINE. Processes that ask at the same time fetch a file once. `fetch` is
    another way than `fetch_model`.
    """
    path = Path(given)
    if os.path.exists(path):
        return path
    if not NAME.fullmatch(given):
        why = absence(path, "folder")
        raise UserError(f"{given}: {why}, and not the name of a model on the Hugging Face hub (OWNER/NAME)")
    try:
        return (fetch or fetch_model)(given, files)
    except UserError as error:
        raise UserError(f"{given}: {absence(path, 'folder')} here; as a name on the hub: {error}") from error


def fetch_model(name: str, files: Sequence[str], revision: str | None = None, from_cache: bool = False) -> Path:
    """Fetches files of a model on the hub that the cache lacks; returns their folder, which is called as the commit.

    With `from_cache` the hub is not asked at all.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not is_terminal(sys.stderr):
        disable_progress_bars()
    mirror = "set HF_ENDPOINT to a mirror, or name a folder"
    with hub_errors(f"{constants.ENDPOINT}/{name}", "model", mirror, revision):
        wanted = list(files)
        return Path(snapshot_download(name, allow_patterns=wanted, revision=revision, local_files_only=from_cache))


@contextmanager
def hub_errors(where: str, kind: str, mirror: str, revision: str | None) -> Iterator[None]:
    """Turns the errors of huggingface_hub into what they mean for the user.

    `where` begins the message; `kind` is "model" or "data set"; `mirror` says how to name another server.
    """
    from huggingface_hub import constants, errors

    offline = "is not in the cache, and HF_HUB_OFFLINE forbids the network: unset it"
    unreachable = f"cannot be reached, or does not answer as the hub does: check the network, or {mirror}"
    meanings: list[tuple[type, str]] = [
        (errors.GatedRepoError, "accept its conditions there, then log in: hf auth login"),
        (errors.RepositoryNotFoundError, f"no such {kind} there (is it OWNER/NAME?), or a private one: hf auth login"),
        (errors.RevisionNotFoundError, f"has no branch, tag or commit {revision}"),
        (errors.HFValidationError, f"not the name of a {kind}"),
        (errors.OfflineModeIsEnabled, offline),
        (errors.LocalEntryNotFoundError, offline if constants.HF_HUB_OFFLINE else unreachable),
        (OSError, unreachable),
        (errors.HfHubHTTPError.__mro__[1], unreachable),  # the base of all errors of the HTTP library that it uses
        (ValueError, unreachable),
    ]
    try:
        yield
    except Exception as error:
        meaning = next((meaning for raised, meaning in meanings if isinstance(error, raised)), None)
        if isinstance(error, OSError) and error.errno in STORAGE:
            meaning = f"{constants.HF_HOME}: cannot be written: make room there, or name another folder in HF_HOME"
        if meaning is None:
            raise
        said = str(error).partition("\n")[0]
        raise UserError(f"{where}: {meaning}\n({said})") from error
