"""From files to bundles of work: every byte once, of about one size, whatever the files are like."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.readers import READERS, sources
from data_prep.readers.reader import Options, Problems
from data_prep.readers.sources import SourceFile, find_files, make_bundles


def of_size(
    folder: Path, *sizes: int, format: str = "sentences", source: str = "x", suffix: str = ""
) -> list[SourceFile]:
    """Makes files of these sizes, which take no room on the disk."""
    files = []
    for number, size in enumerate(sizes):
        path = folder / f"{source}{number}{suffix}"
        with path.open("wb") as file:
            file.truncate(size)
        files.append(SourceFile(source, str(path), path.name, size, format))
    return files


@pytest.mark.parametrize(
    "sizes", [(1,), (5 << 20, 3, 0, 70 << 20, 1 << 20), (100,) * 1500, ((1 << 31) + 7, 10), ((1 << 20) + 1,) * 9]
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_every_byte_is_in_exactly_one_span(tmp_path: Path, sizes: tuple[int, ...], suffix: str) -> None:
    files = of_size(tmp_path, *sizes, suffix=suffix, format="mediawiki")
    bundles = make_bundles(files)
    spans = [span for bundle in bundles for span in bundle.spans]
    assert list(dict.fromkeys(span.path for span in spans)) == [file.path for file in files if file.size]
    for file in files:
        own = [span for span in spans if span.path == file.path]
        assert [span.start for span in own[1:]] == [span.end for span in own[:-1]]
        assert not own or (own[0].start, own[-1].end) == (0, file.size)
        assert suffix != ".gz" or len(own) == (1 if file.size else 0)
    assert len({bundle.name for bundle in bundles}) == len(bundles)
    assert all(bundle.spans for bundle in bundles)


def test_bundles_are_of_one_source_and_format_and_some_size(tmp_path: Path) -> None:
    files = of_size(tmp_path, *[1000] * 50, source="a") + of_size(tmp_path, 90 << 20, source="b")
    files += of_size(tmp_path, *[1000] * 5, source="b", format="text", suffix=".txt")
    bundles = make_bundles(files)
    found = [(bundle.source, bundle.format) for bundle in bundles]
    assert list(dict.fromkeys(found)) == [("a", "sentences"), ("b", "sentences"), ("b", "text")]
    assert found.count(("a", "sentences")) == found.count(("b", "text")) == 1
    assert found.count(("b", "sentences")) == 90 // 2  # of 2 MiB: 24 bundles or more, of a power of two
    assert sum(bundle.weight for bundle in bundles) == pytest.approx(sum(file.size for file in files), rel=0.001)
    assert make_bundles(files) == bundles


def test_large_corpora_have_bundles_of_16_mib(tmp_path: Path) -> None:
    bundles = make_bundles(of_size(tmp_path, 1 << 35))
    assert {bundle.part_bytes for bundle in bundles} == {16 << 20}
    assert len(bundles) == 1 << 11


def test_row_groups_are_divided(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(1000)]}), path, row_group_size=90)
    (bundle,) = make_bundles(find_files([str(path)], None))
    assert [(span.start, span.end) for span in bundle.spans] == [(number, number + 1) for number in range(12)]


def test_a_small_corpus_reads_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMALLEST_BUNDLE", 50)
    lines = [json.dumps({"text": f"Document {number}."}) for number in range(500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:300]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[300:]))
    bundles = make_bundles(find_files([str(tmp_path)], None))
    assert len(bundles) > 20
    options = Options(Problems("fail"))
    documents = [d for bundle in bundles for span in bundle.spans for d in READERS[bundle.format].read(span, options)]
    assert [document.passages for document in documents] == [[f"Document {number}."] for number in range(500)]
