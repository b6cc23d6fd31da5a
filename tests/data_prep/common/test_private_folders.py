"""Nobody but this user and root can have written compiled code that is loaded; processors of all kinds share it."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import pytest

from data_prep.common import compiled
from data_prep.common.private_folders import _is_own_group, open_private, require_private

OTHER = 12345
CAN_WRITE = "other users can write it"


def assert_refused(folder: Path, match: str) -> None:
    with pytest.raises(OSError, match=match):
        open_private(folder)


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = open_private(tmp_path / "home" / ".cache" / "cloze")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent, folder.parents[1])] == [0o700] * 3
    assert open_private(folder) == folder


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cloze").mkdir()
    for mode in (0o770, 0o707, 0o1777):
        (tmp_path / "cloze").chmod(mode)
        assert_refused(tmp_path / "cloze", f"cloze: {CAN_WRITE}")


def test_of_the_folders_above_only_sticky_ones_may_be_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "cloze").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "cloze")
    tmp_path.chmod(0o1777)
    assert open_private(tmp_path / "cloze") == tmp_path / "cloze"
    assert open_private(tmp_path / "link" / "new") == tmp_path / "cloze" / "new"  # by a link of this user
    tmp_path.chmod(0o777)
    assert_refused(tmp_path / "cloze", CAN_WRITE)
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cloze").mkdir(0o700)
    (tmp_path / "cloze" / "library").touch(0o700)
    os.chown(tmp_path / "cloze" / "library", OTHER, -1)
    with pytest.raises(PermissionError, match=f"library: belongs to another user .{OTHER}."):
        require_private(tmp_path / "cloze" / "library")
    os.chown(tmp_path / "cloze", OTHER, -1)
    (tmp_path / "link").symlink_to(tmp_path / "cloze")
    assert_refused(tmp_path / "link" / "new", "cloze: belongs to another user")
    assert not (tmp_path / "cloze" / "new").exists()


def test_a_folder_of_an_unknown_home_is_not_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(Path("~/.cache/cloze"), "no absolute path")
    assert not [*tmp_path.iterdir()]


def keep_in(cache: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path | None = None) -> Path:
    """Finds anew the folder of what numba compiles, for a user whose caches lie in `cache`."""
    numba_config: Any = numba.config
    assert Path(numba_config.CACHE_DIR).is_absolute(), "the folder is chosen when modules load"
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(tempfile, "tempdir", str(temporary or cache))
        patch.setattr(numba.config, "CACHE_DIR", "")
        patch.setenv("NUMBA_CACHE_DIR", "")  # so that it is as before afterwards
        patch.delenv("NUMBA_CACHE_DIR")
        compiled.keep_compiled_here()
        return Path(numba_config.CACHE_DIR)


def test_pickles_of_numba_that_others_may_have_planted_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever knows the sources knows the folder's name. Nor does anything go where others can rename files."""
    usual = keep_in(tmp_path, monkeypatch)
    assert (usual.is_relative_to(tmp_path / "cloze" / "numba"), capsys.readouterr().err) == (True, "")
    assert usual.stat().st_mode & 0o777 == 0o700
    (other := usual.with_name("of an earlier version")).mkdir()
    usual.chmod(0o777)
    for temporary, found_in in ((tmp_path, tmp_path), (usual, Path("/tmp"))):
        folder = keep_in(tmp_path, monkeypatch, temporary)
        told = f"warning: {usual}: {CAN_WRITE} (remove it); what is compiled is kept in {folder}\n"
        assert (folder.parent, capsys.readouterr().err) == (found_in, told)
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())
        folder.rmdir()
    assert not [*usual.iterdir()]
    shutil.rmtree(usual)
    assert (keep_in(tmp_path, monkeypatch), capsys.readouterr().err) == (usual, "")
    assert not other.exists()


def test_a_cache_that_the_group_of_this_user_alone_can_write_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a umask of 002, as many systems have it, ~/.cache is one."""
    tmp_path.chmod(0o775)
    taken = keep_in(tmp_path, monkeypatch).is_relative_to(tmp_path / "cloze")
    assert taken == _is_own_group(tmp_path.stat().st_gid)


def test_kinds_of_processors_share_a_folder_and_not_the_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    for name in ("skylake", "znver4"):
        monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda name=name: name)
        assert not compiled.compiled_before("nsp")
        compiled.remember_compiled("nsp")
        assert compiled.compiled_before("nsp")
