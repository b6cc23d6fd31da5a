"""verify.py finds every kind of damage and names the file; show.py prints what a reader wants to see."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import write_wiki
from support.commands import run_main
from support.damage import flip, truncate
from support.shards import SETTINGS, interrupted_at, make, run

from data_prep import show, verify
from data_prep.arrow_files import read_shard
from data_prep.common.files import write_json
from data_prep.seals import hash_content, make_fingerprint
from data_prep.shards import KEPT, MANIFEST, REPORT

SHARD = "length-32/duplicate-1/shard-00000.arrow"
FILES = (SHARD, "vocab.txt", "tokenizer.json", "documents.arrow", "length-64/validation/shard-00000.arrow")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    docs = write_wiki(folder / "wiki", documents=100)
    return make(folder / "out", "--docs", docs, *SETTINGS, "--validation", "0.05")


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data"))


def test_a_sound_folder_passes(sound: Path) -> None:
    assert run_main(verify.main, sound).strip().endswith("all is right")


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
        run_main(verify.main, data)
    content["sources"][0]["format"] = "jsonl"
    other_format = make_fingerprint(content)
    content["settings"]["seed"] += 1
    assert len({before, content["fingerprint"], other_format, make_fingerprint(content)}) == 4


@pytest.mark.parametrize(
    ("damage", "names", "message"),
    [
        (flip, FILES, "its SHA-256 is not that of its record"),
        (truncate, [SHARD], "bytes, its record says "),
        (Path.unlink, [SHARD], "missing"),
    ],
)
def test_all_damage_is_named(damage: Callable[[Path], None], names: Sequence[str], message: str, data: Path) -> None:
    for name in names:
        damage(data / name)
    said = run_main(verify.main, data, code=1)
    assert all(re.search(f"{data / name}: .*{message}", said) for name in names)


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in run_main(verify.main, tmp_path / "nowhere", code=2)
    assert "not a folder of shards" in run_main(verify.main, tmp_path, code=2)


def test_a_half_finished_folder_is_checked_and_shown(tmp_path: Path) -> None:
    half = tmp_path / "half"
    with interrupted_at("shards"):
        run(write_wiki(tmp_path / "wiki", documents=40), half, code=130)
    said = run_main(verify.main, half, code=3)
    assert all(part in said for part in ("is not finished", "examples-32: finished", "run shard.py again"))
    for more in ("--index=0", "--report"):
        said = run_main(show.main, half, more, code=2)
        assert "not finished; run the same shard.py command again to continue" in said
    assert not (half / REPORT).exists()
    [file] = (half / KEPT).rglob("*.arrow")
    flip(file)
    assert str(file) in run_main(verify.main, half, code=1)


def test_an_example_is_shown_with_its_masks(sound: Path) -> None:
    row = read_shard(sound / "length-32/duplicate-0/shard-00000.arrow").slice(7, 1).to_pylist()[0]
    out = run_main(show.main, sound, "--length", 32, "--index", 7)
    heading, a, b, _ = out.strip().split("\n")
    facts = (f"example 7: {len(row['pieces'])} pieces, {len(row['masked'])} masked", "wiki", "Article")
    assert all(fact in heading for fact in (*facts, "B is random" if row["random_next"] else "B follows A"))
    assert len(re.findall(r"→|=\S+?=", a + b)) == len(row["masked"])
    mask = (sound / "vocab.txt").read_text().split("\n").index("[MASK]")
    assert (a + b).count("→[MASK]") == row["pieces"].count(mask)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "1000000"], "--index 1000000: length-32/duplicate-0 has"),
        (["--index", "-1"], "--index -1"),
        (["--length", "99"], "has no such examples; there is 32"),
    ],
)
def test_an_example_that_is_not_there_is_refused(arguments: list[str], message: str, sound: Path) -> None:
    assert message in run_main(show.main, sound, *arguments, code=2)


def test_an_edited_manifest_and_one_of_another_format_are_refused(data: Path) -> None:
    (data / "notes.txt").write_text("mine")
    assert "notes.txt is not in the manifest" in run_main(verify.main, data)
    text = (data / MANIFEST).read_text()
    (data / MANIFEST).write_text(text.replace('"seed": 12345', '"seed": 54321'))
    assert "fingerprint" in run_main(verify.main, data, code=1)
    (data / MANIFEST).write_text(json.dumps({**json.loads(text), "format": 99}))
    assert "of format 99; this version reads 1 and 2" in run_main(verify.main, data, code=2)
