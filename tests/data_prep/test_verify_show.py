"""verify.py finds every kind of damage and names the file; show.py prints what a reader wants to see."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_wiki
from support.damage import flip, truncate
from support.sharding import interrupted_at

from data_prep import shard, show, verify
from data_prep.arrow_files import read_shard
from data_prep.common.files import write_json
from data_prep.seals import hash_content, make_fingerprint
from data_prep.shards import KEPT, MANIFEST

SETTINGS = ["--lengths", "32", "64", "--duplicates", "2", "--vocab-size", "300", "--workers", "1"]
SETTINGS += ["--validation", "0.05"]
SHARD = "length-32/duplicate-1/shard-00000.arrow"
FILES = (SHARD, "vocab.txt", "tokenizer.json", "documents.arrow", "length-64/validation/shard-00000.arrow")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    assert shard.main(["--docs", str(write_wiki(folder / "wiki")), "--out", str(folder / "out"), *SETTINGS]) == 0
    return folder / "out"


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data"))


def test_a_sound_folder_passes(sound: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(sound)]) == 0
    assert capfd.readouterr().out.strip().endswith("all is right")


def test_a_field_that_no_reader_used_is_not_in_the_fingerprint(data: Path) -> None:
    """Folders of older versions, which had it there, are as sound as they were."""
    content = json.loads((data / MANIFEST).read_text())
    before = content["fingerprint"]
    for said in ("body", {"": "text", "wiki": "text"}, {"wiki": "body"}):
        content["settings"]["text_field"] = said
        assert make_fingerprint(content) == before
        content["fingerprint"] = make_fingerprint(content, field_as_given=True)
        content["checksum"] = hash_content(content)
        write_json(data / MANIFEST, content)
        assert content["fingerprint"] != before
        assert verify.main([str(data)]) == 0
    content["sources"][0]["format"] = "jsonl"
    assert make_fingerprint(content) not in (before, content["fingerprint"])


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        *((flip, name, "its SHA-256 is not that of its record") for name in FILES),
        (truncate, SHARD, "bytes, its record says "),
        (Path.unlink, SHARD, "missing"),
    ],
)
def test_damage_to_any_file_is_found(
    damage: Callable[[Path], None], name: str, message: str, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(data / name)
    assert verify.main([str(data)]) == 1
    assert re.search(f"{data / name}: .*{message}", capfd.readouterr().err)


def test_every_damaged_file_is_named_not_only_the_first(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = [SHARD, "length-64/duplicate-0/shard-00000.arrow"]
    for name in names:
        flip(data / name)
    assert verify.main([str(data)]) == 1
    errors = capfd.readouterr().err
    assert all(name in errors for name in names)


def test_an_edited_manifest_is_found(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (data / MANIFEST).read_text()
    (data / MANIFEST).write_text(text.replace('"seed": 12345', '"seed": 54321'))
    assert verify.main([str(data)]) == 1
    assert "fingerprint" in capfd.readouterr().err


def test_files_that_nobody_wrote_are_mentioned(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (data / "notes.txt").write_text("mine")
    assert verify.main([str(data)]) == 0
    assert "notes.txt is not in the manifest" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_folder_without_shards_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(tmp_path / name)]) == 2
    assert "no such folder" in (errors := capfd.readouterr().err) or "not a folder of shards" in errors


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """Makes a folder whose run stopped before the shards."""
    arguments = ["--docs", str(write_wiki(tmp_path / "wiki")), "--out", str(tmp_path / "half"), *SETTINGS]
    with interrupted_at("shards"):
        assert shard.main(arguments) == 130
    return tmp_path / "half"


def test_a_half_finished_folder_is_checked_and_told_apart(half: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(half)]) == 3
    out = capfd.readouterr().out
    assert "is not finished" in out
    assert "examples-32: finished" in out
    assert "run shard.py again" in out


def test_damage_in_a_half_finished_folder_is_found(half: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [file] = (half / KEPT).rglob("*.arrow")
    flip(file)
    assert verify.main([str(half)]) == 1
    assert str(file) in capfd.readouterr().err


def shown(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert show.main([str(argument) for argument in arguments]) == 0
    return capfd.readouterr().out


def test_an_example_is_shown_with_its_masks(sound: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = read_shard(sound / "length-32/duplicate-0/shard-00000.arrow").slice(7, 1).to_pylist()[0]
    out = shown(capfd, sound, "--length", 32, "--index", 7)
    heading, a, b, legend = out.strip().split("\n")
    assert f"example 7: {len(row['pieces'])} pieces, {len(row['masked'])} masked" in heading
    assert ("B is random" if row["random_next"] else "B follows A") in heading
    assert "wiki" in heading
    assert "Article" in heading
    assert a.startswith("A  [CLS] ")
    assert a.endswith("[SEP]")
    assert b.startswith("B  ")
    assert legend.startswith("masked ")
    arrows = len(re.findall(r"→|=\S+?=", a + b))
    assert arrows == len(row["masked"])
    mask = (sound / "vocab.txt").read_text().split("\n").index("[MASK]")
    assert (a + b).count("→[MASK]") == row["pieces"].count(mask)


def test_an_example_held_out_is_shown(sound: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "example 0" in shown(capfd, sound, "--validation")


def test_an_example_of_a_half_finished_folder_is_shown(half: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "A  [CLS]" in shown(capfd, half, "--length", 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "1000000"], "--index 1000000: length-32/duplicate-0 has"),
        (["--index", "-1"], "--index -1"),
        (["--length", "99"], "no length-99/duplicate-0; there is length-32/duplicate-0"),
        (["--duplicate", "9"], "no length-32/duplicate-9"),
    ],
)
def test_an_example_that_is_not_there_is_refused(
    arguments: list[str], message: str, sound: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert show.main([str(sound), *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_manifest_of_another_format_is_refused(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads((data / MANIFEST).read_text())
    (data / MANIFEST).write_text(json.dumps({**content, "format": 99}))
    assert verify.main([str(data)]) == 2
    assert "of format 99; this version reads 1" in capfd.readouterr().err
