"""Outputs take the place of nothing by mistake: what exists, what is read, pipes and devices, the mode of new files."""

import os
import re
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest
from support.commands import assert_refusal

from data_prep.common.errors import UserError
from data_prep.common.files import replacing, unfinished_name, write_json
from data_prep.common.outputs import making


def make(out: Path, source: Path, command: str = "make.py", content: bytes = b"made", replace: bool = False) -> None:
    with making([out], command, [source], replace), replacing(out) as file:
        file.write(content)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("text")
    return tmp_path / "in.txt"


def test_what_the_same_command_made_of_the_same_source_is_renewed(source: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "new" / "out.txt", tmp_path / "other.txt"
    other.write_text("text")
    make(out, source)
    make(out, source, content=b"again")
    for command, read in (("other.py", source), ("make.py", other)):
        assert_refusal(r"out\.txt: exists.*--replace", make, out, read, command)
    assert out.read_bytes() == b"again"
    out.write_bytes(b"edited")
    assert_refusal("exists", make, out, source)
    assert out.read_bytes() == b"edited"
    make(out, source, replace=True)
    make(out, source, content=b"renewed")
    assert out.read_bytes() == b"renewed"


def test_what_is_read_stays_by_whatever_name(source: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "soft").symlink_to("in.txt")
    (tmp_path / "hard").hardlink_to(source)
    for out in (source, tmp_path / "soft", tmp_path / "hard", tmp_path / "x" / ".." / "in.txt"):
        assert_refusal(r"is what is read, .*in\.txt", make, out, source, replace=True)
    assert_refusal("belongs to what is read", make, source, tmp_path, replace=True)
    assert source.read_text() == "text"


def test_a_link_that_leads_nowhere_and_a_folder_are_something_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("later")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("link", "folder"):
        assert_refusal(f"{name}: exists", make, tmp_path / name, source)
    (tmp_path / "empty").touch()  # as mktemp leaves it
    make(tmp_path / "empty", source)


def test_places_are_files_with_names(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name, told in (("/", "the root of all folders"), (".", "a folder; name a file"), ("", "a folder; name a file")):
        assert_refusal(told, make, Path(name), source)


def test_what_is_read_may_be_called_as_something_unfinished(source: Path, tmp_path: Path) -> None:
    """And nothing beside an output goes that somebody could have put there."""
    for name in ("out.tmp", "out.old", ".out.tmp", ".out.old"):
        (tmp_path / name).write_text("text")
        if name.startswith("."):
            assert_refusal("is what is read", make, tmp_path / "out", tmp_path / name)
        else:
            make(tmp_path / "out", tmp_path / name, replace=True)
        assert (tmp_path / name).read_text() == "text"


@pytest.mark.parametrize("killed", [True, False])
def test_what_an_interrupted_command_began_it_makes_anew(killed: bool, source: Path, tmp_path: Path) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    (tmp_path / "mine").write_text("mine")

    def begin() -> None:
        with making([*places, tmp_path / "mine"], "make.py", [source], replace=True):
            places[0].write_text("made")
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

    process = get_context("fork").Process(target=begin)
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if killed else 1)
    with making(places, "make.py", [source]):
        places[1].write_text("made")
    with pytest.raises(UserError, match="exists"), making([*places, tmp_path / "mine"], "make.py", [source]):
        pass


def test_a_place_in_a_file_is_refused_before_anything_is_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file/out", "file/in/out", "link/out"):
        told = f"--out {tmp_path / name}: cannot be written: {tmp_path / name[:4]} is not a folder; name another"
        with pytest.raises(UserError, match=f"^{re.escape(told)}$"), making([tmp_path / name], "make.py", [source]):
            pytest.fail("it has begun")


def test_pipes_and_devices_are_written_as_they_are(source: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for out in (pipe, Path("/dev/null"), pipe):
        make(out, source)
    assert os.read(reader, 99) == b"mademade"
    os.close(reader)
    assert Path("/dev/null").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "pipe"]
    make(tmp_path / "out", Path("-"))  # what came through a pipe is not known again
    assert_refusal("exists", make, tmp_path / "out", Path("-"))


def test_what_a_shell_has_opened_is_written_to_its_end(source: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before ")
    with (tmp_path / "log").open("r+b", buffering=0) as opened:
        opened.seek(7)
        make(Path(f"/dev/fd/{opened.fileno()}"), source)
        opened.write(b" after")
    assert (tmp_path / "log").read_text() == "before made after"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_whatever_goes_wrong_leaves_nothing_unfinished(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "out").write_text("before")

    def write() -> None:
        with replacing(tmp_path / "out") as file:
            file.write(b"half")
            raise error

    with pytest.raises((UserError, type(error))):
        write()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out": "before"}


def test_a_link_where_a_file_is_being_written_is_not_followed(tmp_path: Path) -> None:
    """Whoever can write in the folder could choose what of this user is overwritten."""
    (tmp_path / "precious").write_text("precious")
    unfinished_name(tmp_path / "ended.json").symlink_to(tmp_path / "precious")
    assert_refusal(r"ended\.json: cannot be written", write_json, tmp_path / "ended.json", {})
    assert (tmp_path / "precious").read_text() == "precious"
    write_json(tmp_path / "ended.json", {})
    assert (tmp_path / "ended.json").read_text() == "{}\n"
