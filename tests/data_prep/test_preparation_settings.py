"""The settings of shard.py: from flags and files, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reading import page, wiki_dump
from support.sharding import run

from data_prep import shard
from data_prep.command_line import read_config
from data_prep.common.errors import UserError
from data_prep.settings import find_faults
from data_prep.shards import Manifest


def test_other_settings_into_the_same_folder_are_refused_with_the_way_out(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(wiki, tmp_path / "out") == 0
    assert run(wiki, tmp_path / "out", "--seed", "2", "--masking", "whole-word") == 2
    message = capfd.readouterr().err
    assert "--seed was 12345, now 2" in message
    assert "--masking was token, now whole-word" in message
    assert "give the same settings to continue, another --out, or remove the folder" in message


def test_settings_may_come_from_a_file_and_flags_come_before_it(wiki: Path, tmp_path: Path) -> None:
    config = tmp_path / "shards.toml"
    config.write_text(
        f'docs = ["{wiki}"]\nlengths = [32]\nduplicates = 3\nvocab-size = 300\nworkers = 1\nmask_rate = 0.2\n'
    )
    assert shard.main(["--config", str(config), "--out", str(tmp_path / "out"), "--duplicates", "1"]) == 0
    settings = Manifest.read(tmp_path / "out").settings
    assert (settings.lengths, settings.duplicates, settings.mask_rate) == ([32], 1, 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to read"),
        ("--docs nowhere", "--docs nowhere: no such file or folder"),
        ("--docs wiki --lengths 4 600", "--lengths 600: from 8 to 512"),
        ("--docs wiki --mask-split 80 10 5", "three shares in percent that make 100"),
        ("--docs wiki --max-predictions 20", "one number for each of the 2 lengths"),
        ("--docs wiki --shard-size bananas", "--shard-size bananas: a number and a unit"),
        ("--docs wiki --validation 1", "--validation 1.0: a share from 0, below 1"),
        ("--docs wiki --mask-rate nan", "--mask-rate nan: a share between 0 and 1"),
        ("--docs wiki --config nowhere.toml", "--config nowhere.toml: no such file"),
        ("--docs wiki --extend 5", "--extend 5: extends a vocabulary that exists; name it: --vocab"),
        ("--docs wiki --vocab x --extend -1", "--extend -1: from 0"),
        ("--docs wiki --format wiki=word", "--format wiki=word: there is mediawiki"),
        ("--docs wiki --format wien=text", "--format wien=text: there is no source wien, only wiki"),
        ("--docs wiki --text-field wien=x", "--text-field wien=x: there is no source wien, only wiki"),
        ("--docs wiki --text-field a --text-field b", "--text-field a b: once for"),
        ("--docs wiki --language german", "--language german: no language of this code"),
        ("--docs wiki --weight wiki=0", "--weight wiki=0: NAME=WEIGHT above 0, up to 20"),
        ("--docs wiki --weight wiki=20.1", "--weight wiki=20.1: NAME=WEIGHT above 0, up to 20"),
        ("--docs wiki --weight wiki=nan", "--weight wiki=nan: NAME=WEIGHT"),
        ("--docs wiki --weight 2", "--weight 2: NAME=WEIGHT"),
        ("--docs wiki --weight wiki=2 wiki=3", "--weight wiki=2 wiki=3: once for each source"),
        ("--docs wiki --max-share 0.5", "--max-share 0.5: NAME=SHARE, such as wiki=0.5"),
        ("--docs wiki --max-share wiki=1", "--max-share wiki=1: NAME=SHARE"),
        ("--docs wiki --max-share wiki=", "--max-share wiki=: NAME=SHARE"),
        ("--docs wiki --max-share wien=0.5", "there is no source wien, only wiki"),
        ("--docs wiki --near-copies 0.49", "--near-copies 0.49: from 0.5, below 1"),
        ("--docs wiki --near-copies 1", "--near-copies 1.0: from 0.5, below 1"),
        ("--docs wiki --near-copies nan", "--near-copies nan: from 0.5, below 1"),
        ("--docs wiki --min-words 0", "--min-words 0: at least 1"),
        ("--docs wiki --max-words -1", "--max-words -1: at least 1"),
        ("--docs wiki --min-words 9 --max-words 8", "--max-words 8: not below --min-words 9"),
        ("--docs wiki --min-letters 1.1", "--min-letters 1.1: a share above 0, up to 1"),
        ("--docs wiki --min-letters nan", "--min-letters nan: a share above 0"),
        ("--docs wiki --max-repeated-lines 1", "--max-repeated-lines 1.0: a share from 0, below 1"),
        ("--docs wiki --max-repeated-lines -0.1", "--max-repeated-lines -0.1: a share from 0"),
        ("--docs wiki --without-words nowhere.txt", "--without-words nowhere.txt: cannot be read: No such file"),
        ("--docs wiki --without-words .", "--without-words .: cannot be read: Is a directory"),
        ("--docs wiki --only-language klingon", "--only-language klingon: the model knows"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    arguments: str, message: str, wiki: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(wiki.parent)
    assert shard.main([*arguments.split(), "--workers", "1"]) == 2
    assert message in capfd.readouterr().err
    assert not Path("data").exists()


def test_all_faults_of_the_settings_are_reported_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert shard.main(["--docs", "x", "--duplicates", "0", "--mask-rate", "2", "--seed", "-1"]) == 2
    message = capfd.readouterr().err
    assert all(flag in message for flag in ("--duplicates 0", "--mask-rate 2", "--seed -1"))


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("lenghts = [128]\nmasking = 3\n")
    assert shard.main(["--config", str(tmp_path / "c.toml")]) == 2
    message = capfd.readouterr().err
    assert "lenghts: unknown; did you mean lengths?" in message
    assert 'masking = 3: one of "token", "whole-word"' in message


def test_settings_that_mean_the_same_are_the_same(wiki: Path, tmp_path: Path) -> None:
    assert run(wiki, tmp_path / "out") == 0
    assert run(wiki, tmp_path / "out", "--mask-split", "80", "10", "10", "--shard-size", "128000") == 0


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("workers = 2", True),
        ('workers = "4"', False),
        ("workers = 1.5", False),
        ("seed = 1.9", False),
        ("lengths = [128.7]", False),
        ("mask-split = [90, 10]", False),
        ("cased = 1", False),
        ("cased = true", True),
        ('config = "other.toml"', False),
        ("validation = 0", True),
    ],
)
def test_values_of_a_file_must_be_of_their_kind(line: str, allowed: bool, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'docs = ["x"]\n{line}\n')
    try:
        accepted = not find_faults(read_config(tmp_path / "c.toml"))
    except UserError:
        accepted = False
    assert accepted == allowed


def test_formulas_stay_as_a_word_where_that_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = " ".join(f"Sentence {n} is about the sum of many things." for n in range(200))
    dump = tmp_path / "x.xml"
    dump.write_bytes(
        wiki_dump(*(page(f"T{n}", f"It is &lt;math&gt;x^{n}&lt;/math&gt;.\n\n{text} {n}", n) for n in range(9)))
    )
    options = ["--docs", str(dump), "--lengths", "32", "--duplicates", "1", "--vocab-size", "400", "--workers", "1"]
    for way, there in (("drop", False), ("word", True)):
        out = tmp_path / way
        assert shard.main([*options, "--out", str(out), "--formulas", way]) == 0
        assert Manifest.read(out).settings.as_json()["formulas"] == way
        assert ("formula" in (out / "vocab.txt").read_text().split()) is there
    assert shard.main([*options, "--out", str(tmp_path / "drop"), "--formulas", "word"]) == 2
    assert "--formulas was drop, now word" in capfd.readouterr().err
