"""A corpus of five hundred parts: merged files, partners out of a few parts, kills at any moment, texts that change."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT, sentence, write_wiki
from support.commands import kill_group
from support.marks import slow
from support.sharding import SETTINGS, interrupted_at, run, tree

from data_prep import shard, show, steps, verify
from data_prep.examples import making, merging, parts
from data_prep.readers import sources
from data_prep.shards import KEPT, MANIFEST, WORK, Manifest

SMALL_BUNDLES = (
    "import sys; from data_prep.readers import sources; sources.SMALLEST_BUNDLE = sources.LARGEST_BUNDLE = 8192; "
    "from data_prep import shard; sys.exit(shard.main(sys.argv[1:]))"
)


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    arguments = ["--docs", str(corpus), "--out", str(out), "--workers", "2", *SETTINGS, *more]
    return [sys.executable, "-c", SMALL_BUNDLES, *arguments]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes text enough for more than five hundred parts of eight kilobytes."""
    return write_wiki(tmp_path_factory.mktemp("corpus") / "wiki", documents=6000, files=12)


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Finds out what an undisturbed run writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    subprocess.run(command(corpus, out), check=True, capture_output=True, cwd=ROOT)
    return tree(out)


def num_files(folder: Path) -> int:
    """Counts the files of the folder that has the most, of all below this one."""
    places = (place for place in folder.rglob("*") if place.is_dir())
    return max((sum(path.is_file() for path in place.iterdir()) for place in places), default=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_among_five_hundred_parts_end_in_the_same_bytes(
    corpus: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    draw, out = random.Random(11), tmp_path / "out"
    kills, most, steps = 0, 0, set[str]()
    wanted = {"tokens", "examples-32", "merged-32-1", "shards-32"}
    while kills < 10 or (kills < 30 and not wanted <= steps):  # a busy machine is long at the first steps
        process = subprocess.Popen(command(corpus, out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(2, 9))
        except subprocess.TimeoutExpired:
            kill_group(process)
            kills += 1
        if (out / MANIFEST).exists():  # too fast for us: begin anew
            shutil.rmtree(out)
        elif (out / WORK).exists():
            most = max(most, num_files(out / WORK))
            steps |= {path.stem for path in (out / WORK).glob("*.jsonl")}
    subprocess.run(command(corpus, out), check=True, capture_output=True, cwd=ROOT)
    assert tree(out) == expected
    assert most <= 1000
    assert wanted <= steps


def test_merging_changes_no_byte_and_partners_come_of_a_few_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wiki = write_wiki(tmp_path / "wiki", documents=240, files=30)
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 4096)
    monkeypatch.setattr(parts, "FEW_PARTS", 8)
    monkeypatch.setattr(parts, "PARTNER_PARTS", 3)
    monkeypatch.setattr(parts, "NEIGHBOURS", 5)
    assert run(wiki, tmp_path / "direct") == 0
    for module in (merging, steps):
        monkeypatch.setattr(module, "MOST_FILES", 8)
    monkeypatch.setattr(merging, "FAN_IN", 3)
    monkeypatch.setattr(merging, "FILES_LEFT", 1)
    monkeypatch.setattr(merging, "RANGE_BYTES", 5000)
    assert run(wiki, tmp_path / "merged") == 0
    assert tree(tmp_path / "merged") == tree(tmp_path / "direct")
    assert verify.main([str(tmp_path / "merged")]) == 0
    assert show.main([str(tmp_path / "merged")]) == 0


def work_of(parts: int, folder: Path) -> tuple[int, int, int]:
    """Counts for a corpus of about so many parts: the parts, the files opened in all, and the items sorted in all."""
    opened, items = list[str](), list[int]()
    open_file, argsort = pa.ipc.open_file, np.argsort

    def opening(source: Any, *words: Any, **more: Any) -> Any:
        opened.append(str(source))
        return open_file(source, *words, **more)

    def sorting(values: Any, *words: Any, **more: Any) -> Any:
        items.append(len(values))
        return argsort(values, *words, **more)

    wiki = write_wiki(folder / "wiki", documents=8 * parts, files=parts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "SMALLEST_BUNDLE", 4096)
        patched.setattr(sources, "LARGEST_BUNDLE", 4096)
        patched.setattr(pa.ipc, "open_file", opening)
        patched.setattr(np, "argsort", sorting)
        more = ["--workers", "1", "--drop-copies", "--weight", "wiki=1.5", "--shard-size", "1GB"]
        assert run(wiki, folder / "out", *more) == 0
    return len(Manifest.read(folder / "out").kept), len(opened), sum(items)


@pytest.mark.parametrize("sizes", [(12, 24), slow((18, 36, 70))])
def test_what_is_opened_and_sorted_grows_with_the_parts_and_not_with_their_square(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Each part may find its partners in any other: the files that are opened for that stay open.

    The shards are as many in all sizes: up to 256 parts, each of them opens all. Beyond, files are merged, which sorts
    once more; a weight of 1.5 makes two parts of one.
    """
    found = [work_of(size, tmp_path / str(size)) for size in sizes]
    for (few, opened, items), (many, more_opened, more_items) in itertools.pairwise(found):
        growth = many / few
        assert growth > 1.7
        assert more_opened <= 1.1 * growth * opened
        assert more_items <= 1.1 * growth * items


def test_few_parts_stay_open_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wiki = write_wiki(tmp_path / "wiki", documents=120, files=8)
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 4096)
    assert run(wiki, tmp_path / "all", "--workers", "1") == 0
    monkeypatch.setattr(making, "MOST_SENTENCES", 100)
    assert run(wiki, tmp_path / "few", "--workers", "1") == 0
    assert tree(tmp_path / "few") == tree(tmp_path / "all")


# Texts that change while a run is not finished


def interrupt(step: str, docs: Path, out: Path, *more: str) -> None:
    """Begins a run that is interrupted at the first task of a step."""
    with interrupted_at(step):
        assert run(docs, out, *more) == 130


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output folder of a run whose tasks read 64 kB at most."""
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 1 << 16)
    monkeypatch.setattr(sources, "LARGEST_BUNDLE", 1 << 16)
    return tmp_path / "out"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Writes two dozen files, of which some tasks have several and one only a part."""
    folder, draw = tmp_path / "docs", random.Random(8)
    folder.mkdir()
    for number in range(24):
        lines = (json.dumps({"text": " ".join(sentence(draw) for _ in range(12))}) for _ in range(40))
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def finish(docs: Path, out: Path, *more: str) -> None:
    """Goes on with a run, which writes what a run that begins now would write."""
    assert run(docs, out, *more) == 0
    assert run(docs, out.with_name("fresh"), *more) == 0
    assert tree(out) == tree(out.with_name("fresh"))


def repeated(folder: Path) -> set[str]:
    """Names the files that the steps before examples have written, with the times they were written at."""
    places = (folder / WORK / "documents", folder / KEPT)
    return {f"{path} {path.stat().st_mtime_ns}" for place in places for path in place.rglob("*.arrow")}


def test_a_repaired_file_is_taken_by_a_restart_that_reads_the_others_no_more(
    docs: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = (docs / "20.jsonl").read_text()
    (docs / "20.jsonl").write_text(whole[:-30])
    assert run(docs, out) == 2
    assert "20.jsonl: line" in capfd.readouterr().err
    before = repeated(out)
    assert len(before) > 5
    (docs / "20.jsonl").write_text(whole)
    finish(docs, out)
    said = capfd.readouterr().out
    assert "changed since the run began: 20.jsonl" in said
    assert "MB earlier)" in next(line for line in said.splitlines() if line.startswith("documents"))


@pytest.mark.parametrize("vocabulary", ["given", "trained"])
def test_an_added_file_is_taken_by_a_restart(vocabulary: str, docs: Path, out: Path, tmp_path: Path) -> None:
    more = list[str]()
    if vocabulary == "given":
        assert run(docs, tmp_path / "other") == 0
        more = ["--vocab", str(tmp_path / "other")]
    interrupt("shards", docs, out, *more)
    tokens = {line for line in repeated(out) if line.startswith(f"{out / KEPT}/")}
    (docs / "11b.jsonl").write_text((docs / "11.jsonl").read_text().replace("a", "e"))
    interrupt("examples", docs, out, *more)
    assert vocabulary == "trained" or len(tokens & repeated(out)) > 0.7 * len(tokens)
    finish(docs, out, *more)
    assert Manifest.read(out).corpus.documents == 25 * 40


def test_shards_of_a_text_that_changed_are_not_left_behind(
    docs: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "write", Mock(side_effect=KeyboardInterrupt))
        assert run(docs, out) == 130
    for number in range(12):
        (docs / f"{number:02}.jsonl").write_text('{"text": "Nothing."}\n')
    finish(docs, out)


def test_the_field_with_the_text_may_be_corrected(docs: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing but what a wrong field was read from is done anew, also where copies were looked for already."""
    for path in docs.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps({"body": line["text"], "text": "Short. Too short."}) + "\n" for line in lines)
        )
    interrupt("shards", docs, out, "--drop-copies")
    finish(docs, out, "--drop-copies", "--text-field", "body")
    assert "changed since the run began: --text_field;" in capfd.readouterr().out


def test_files_that_are_gone_are_missed_where_much_would_be_lost_and_other_settings_are_refused(
    docs: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupt("shards", docs, out)
    text = (docs / "07.jsonl").read_text()
    (docs / "07.jsonl").unlink()
    assert run(docs, out) == 2
    assert "1 of the files that it was begun with are gone, such as 07.jsonl" in capfd.readouterr().err
    assert run(docs, out, "--duplicates", "3") == 2
    assert "--duplicates was 2, now 3" in capfd.readouterr().err
    assert run(docs, out, "--check") == 0
    (docs / "07.jsonl").write_text(text)
    assert run(docs, out) == 0


def test_a_source_without_text_that_is_added_costs_no_work(
    docs: Path, out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blank.md").write_text("# only\n\n## headings\n")
    interrupt("tokens", docs, out)
    assert run(docs, out, "--docs", str(tmp_path / "blank.md")) == 2
    assert "no document in blank" in capfd.readouterr().err
    assert run(docs, out) == 0
    assert "MB earlier)" in next(line for line in capfd.readouterr().out.splitlines() if line.startswith("documents"))


def test_sources_of_one_name_with_the_same_files_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 1 << 10)
    monkeypatch.setattr(sources, "LARGEST_BUNDLE", 1 << 10)
    draw = random.Random(3)
    text = " ".join(sentence(draw) for _ in range(300))
    for place in "xy":
        (tmp_path / place / "wiki").mkdir(parents=True)
        (tmp_path / place / "wiki" / "a.txt").write_text(text)
    docs = [str(tmp_path / place / "wiki") for place in "xy"]
    assert shard.main(["--docs", *docs, "--out", str(tmp_path / "out"), "--workers", "2", *SETTINGS]) == 0
    assert Manifest.read(tmp_path / "out").corpus.documents == 2
    bundles = sources.make_bundles(sources.find_files(docs))
    assert len({bundle.name for bundle in bundles}) == len(bundles) == 2


def test_a_record_that_a_power_cut_took_is_made_again(docs: Path, out: Path) -> None:
    interrupt("examples", docs, out)
    for step in ("tokens", "documents"):
        journal = out / WORK / f"{step}.jsonl"
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]) + b'{"task": "torn')
    finish(docs, out)
