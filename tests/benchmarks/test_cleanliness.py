"""Holes in text are told by rules that know nothing of the readers; the command counts them on dumps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.reading import page, wiki_dump

from benchmarks.cleanliness import holes, probes

WHOLE = [
    "In 1990, he left (he was 5). It is 5, or so, of the 6; \"no\" and 'yes', at $5 ... there.",
    "The house that he came from, but not the one, is about 5 km away, e.g. 5. It's the 'word'.",
]
BROKEN = [
    "A ( ) b.",
    "A (, b).",
    "A , b.",
    "A, , b.",
    "A {{b}}.",
    "It is of the.",
    "An area of, all",
    "A $ in b.",
    "A ' b.",
]


def test_whole_sentences_have_no_hole() -> None:
    assert holes(WHOLE)["with_holes"] == 0


@pytest.mark.parametrize("text", BROKEN)
def test_a_hole_is_found(text: str) -> None:
    assert holes([text])["per_thousand"] == 1000


def test_only_what_shows_something_in_a_sentence_is_probed() -> None:
    text = "A {{b|c}} d {{citation needed}}, {{e}}.<ref>f {{g}} h</ref>\n* i {{j}} k\n{{l}} m"
    assert probes([text]) == [
        ("A {{b|c}} d {{citation needed}}, {{e}}.", "A  d {{citation needed}}, {{e}}."),
        ("A {{b|c}} d {{citation needed}}, {{e}}.", "A {{b|c}} d {{citation needed}}, ."),
    ]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/cleanliness.py"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_counts_all_sides(tmp_path: Path) -> None:
    dump = wiki_dump(page("A", "It is of {{unknown}}. The {{lang|fr|Monde}} is.", 1), page("B", "It is."))
    (tmp_path / "x.xml").write_bytes(dump)
    (tmp_path / "x.wikiextractor").write_text('<doc id="1" url="" title="A">\nA\n\nIt is of . The  is.\n</doc>\n')
    done = run("--data", str(tmp_path), "--out", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["dumps"]["x.xml"]
    assert found["articles"] == 2
    now, theirs = found["sides"]["now"], found["sides"]["WikiExtractor, its output"]
    assert (now["passages"], now["with_holes"], now["by_source"]) == (2, 1, {"templates": 2, "lost": 1})
    assert (theirs["with_holes"], theirs["by_source"]["lost"]) == (1, 2)


def test_a_folder_without_dumps_is_a_message(tmp_path: Path) -> None:
    done = run("--data", str(tmp_path))
    assert done.returncode == 2
    assert "has no .xml" in done.stderr
