"""A corpus of many parts: merged files, partners out of a few parts, texts that change."""

import itertools
import json
import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from conftest import write_wiki
from support.commands import run_main
from support.marks import slow
from support.shards import SHORT, draw_text, interrupted_at, run, tell, tree, write_rows

from data_prep import show, verify
from data_prep.examples import making, merging, parts
from data_prep.pipeline import steps
from data_prep.readers import sources
from data_prep.shards import KEPT, WORK, Manifest


@pytest.mark.slow
def test_merging_changes_no_byte_where_partners_lie_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wiki = write_wiki(tmp_path / "wiki", documents=240, files=30)
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 4096)
    monkeypatch.setattr(parts, "FEW_PARTS", 8)
    monkeypatch.setattr(parts, "PARTNER_PARTS", 3)
    monkeypatch.setattr(parts, "NEIGHBOURS", 5)
    run(wiki, tmp_path / "direct")
    for module in (merging, steps):
        monkeypatch.setattr(module, "MOST_FILES", 8)
    monkeypatch.setattr(merging, "FAN_IN", 3)
    monkeypatch.setattr(merging, "FILES_LEFT", 1)
    monkeypatch.setattr(merging, "RANGE_BYTES", 5000)
    for step in ("merged-32-1", "shards-32"):
        with interrupted_at(step):
            run(wiki, tmp_path / "merged", code=130)
    run(wiki, tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(tmp_path / "direct")
    run_main(verify.main, tmp_path / "merged")
    run_main(show.main, tmp_path / "merged")


def work_of(parts: int, folder: Path) -> tuple[int, int, int]:
    """Counts for a corpus of about so many parts: the parts, the files opened in all, and the items sorted in all."""
    opening, sorting = Mock(wraps=pa.ipc.open_file), Mock(wraps=np.argsort)
    wiki = write_wiki(folder / "wiki", documents=8 * parts, files=parts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "SMALLEST_BUNDLE", 4096)
        patched.setattr(sources, "LARGEST_BUNDLE", 4096)
        patched.setattr(pa.ipc, "open_file", opening)
        patched.setattr(np, "argsort", sorting)
        run(wiki, folder / "out", "--drop-copies", "--weight", "wiki=1.5", "--shard-size", "1GB")
    items = sum(len(call.args[0]) for call in sorting.call_args_list)
    return len(Manifest.read(folder / "out").kept), opening.call_count, items


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(12, 24), slow((18, 36, 70))])
def test_what_is_opened_and_sorted_grows_with_the_parts_alone(sizes: tuple[int, ...], tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_few_parts_stay_open_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wiki = write_wiki(tmp_path / "wiki", documents=120, files=8)
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 4096)
    run(wiki, tmp_path / "all")
    monkeypatch.setattr(making, "MOST_SENTENCES", 100)
    run(wiki, tmp_path / "few")
    assert tree(tmp_path / "few") == tree(tmp_path / "all")


# Texts that change while a run is not finished


def prepare(docs: Path, out: Path, *more: object, code: int = 0) -> str:
    """Makes a few shards; returns what is said."""
    return tell(out, "--docs", docs, *SHORT, *more, code=code)


def interrupt(step: str, docs: Path, out: Path, *more: str) -> str:
    """Begins a run that is interrupted at the first task of a step; returns what it says."""
    with interrupted_at(step):
        return prepare(docs, out, *more, code=130)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output folder of a run whose tasks read 16 kB at most."""
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 1 << 14)
    monkeypatch.setattr(sources, "LARGEST_BUNDLE", 1 << 14)
    return tmp_path / "out"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Writes two dozen files, of which some tasks have several and one only a part."""
    draw = random.Random(8)
    for number in range(24):
        write_rows(tmp_path / "docs" / f"{number:02}.jsonl", [draw_text(draw, 12) for _ in range(10)])
    return tmp_path / "docs"


def finish(docs: Path, out: Path, *more: str) -> str:
    """Goes on with a run, which writes what a run that begins now would write; returns what it says."""
    said = prepare(docs, out, *more)
    prepare(docs, out.with_name("fresh"), *more)
    assert tree(out) == tree(out.with_name("fresh"))
    return said


def repeated(folder: Path) -> set[str]:
    """Names the files that the steps before examples have written, with the times they were written at."""
    places = (folder / WORK / "documents", folder / KEPT)
    return {f"{path} {path.stat().st_mtime_ns}" for place in places for path in place.rglob("*.arrow")}


def test_a_repaired_file_is_taken_by_a_restart_that_reads_the_others_no_more(docs: Path, out: Path) -> None:
    whole = (docs / "20.jsonl").read_text()
    (docs / "20.jsonl").write_text(whole[:-30])
    assert "20.jsonl: byte" in prepare(docs, out, code=2)
    before = repeated(out)
    assert len(before) > 5
    (docs / "20.jsonl").write_text(whole)
    assert "changed since the run began: 20.jsonl" in interrupt("words", docs, out)
    assert before < repeated(out)
    finish(docs, out)


def test_an_added_file_is_taken_by_a_restart(docs: Path, out: Path) -> None:
    interrupt("shards", docs, out)
    tokens = {line for line in repeated(out) if line.startswith(f"{out / KEPT}/")}
    (docs / "11b.jsonl").write_text((docs / "11.jsonl").read_text().replace("a", "e"))
    interrupt("examples", docs, out)
    assert len(tokens & repeated(out)) > 0.7 * len(tokens)
    finish(docs, out)
    assert Manifest.read(out).corpus.documents == 25 * 10


def test_shards_of_a_text_that_changed_do_not_stay(docs: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "write", Mock(side_effect=KeyboardInterrupt))
        prepare(docs, out, code=130)
    for number in range(12):
        (docs / f"{number:02}.jsonl").write_text('{"text": "Nothing."}\n')
    finish(docs, out)


@pytest.mark.slow
def test_the_field_with_the_text_may_be_corrected(docs: Path, out: Path) -> None:
    """Nothing but what a wrong field was read from is done anew, also where copies were looked for already."""
    for path in docs.iterdir():
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        lines = (json.dumps({"body": text, "text": "Short. Too short."}) + "\n" for text in texts)
        path.write_text("".join(lines))
    interrupt("shards", docs, out, "--drop-copies")
    said = finish(docs, out, "--drop-copies", "--text-field", "body")
    assert "changed since the run began: --text-field;" in said


def test_files_that_are_gone_are_missed_where_much_is_lost_and_other_settings_refused(docs: Path, out: Path) -> None:
    interrupt("shards", docs, out)
    gone = (docs / "07.jsonl").rename(out.with_name("07.jsonl"))
    assert "1 of the files that it was begun with are gone, such as 07.jsonl" in prepare(docs, out, code=2)
    assert "--duplicates was 1, now 3" in prepare(docs, out, "--duplicates", "3", code=2)
    prepare(docs, out, "--check")
    gone.rename(docs / "07.jsonl")
    prepare(docs, out)


def test_a_source_without_text_that_is_added_costs_no_work(docs: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.md").write_text("# only\n\n## headings\n")
    interrupt("tokens", docs, out)
    before = repeated(out)
    assert "no document in blank" in prepare(docs, out, "--docs", tmp_path / "blank.md", code=2)
    interrupt("tokens", docs, out)
    assert repeated(out) == before


def test_sources_of_one_name_with_the_same_files_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 1 << 10)
    monkeypatch.setattr(sources, "LARGEST_BUNDLE", 1 << 10)
    text = draw_text(random.Random(3), 300)
    for place in "xy":
        (tmp_path / place / "wiki").mkdir(parents=True)
        (tmp_path / place / "wiki" / "a.txt").write_text(text)
    docs = [str(tmp_path / place / "wiki") for place in "xy"]
    tell(tmp_path / "out", "--docs", *docs, *SHORT)
    assert Manifest.read(tmp_path / "out").corpus.documents == 2
    bundles = sources.make_bundles(sources.find_files(docs))
    assert len({bundle.name for bundle in bundles}) == len(bundles) == 2


def test_a_record_that_a_power_cut_took_is_made_again(docs: Path, out: Path) -> None:
    interrupt("examples", docs, out)
    for step in ("tokens", "documents"):
        journal = out / WORK / f"{step}.jsonl"
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]) + b'{"task": "torn')
    interrupt("shards", docs, out)
    finish(docs, out)
