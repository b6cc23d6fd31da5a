#!/usr/bin/env python3
"""Counts what is left behind in text read from MediaWiki dumps where something of the page is not in it.

    python benchmarks/cleanliness.py --before main --extractor /tmp/extractor/bin/python

The sides are the reader of MediaWiki dumps as it is, the one of another commit, and WikiExtractor on the same pages:
run by the Python that --extractor names, or its own output beside the dump. Holes are told by rules that know nothing
of the readers: what no writer leaves, such as `( )`, ` ,`, `of the .`. They are counted by source too: of the templates
in the middle of sentences, those without which a paragraph reads the same. A few holes are the page's own.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import bz2
import json
import os
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.measure import DATA, ROOT, Keeper, run_command
from benchmarks.tables import cleanliness, show
from data_prep.common.errors import UserError
from data_prep.readers import READERS
from data_prep.readers.reader import Options, Problems
from data_prep.readers.wikitext import is_disambiguation

END = r"(?=[,.;!?)](?!\w)|$)"
HOLES = {
    "empty brackets or quotes": r"\(\s*\)|\[\s*\]|“\s*”|«\s*»|(?<!\w)\"\"(?!\w)",
    "brackets that begin or end with a comma": r"[(\[]\s*[,;]|[,;]\s*[)\]]",
    "a space before a comma or full stop": r"\w [,;](?=\s)|\w \.(?=\s|$)",
    "two commas": r",\s*,|;\s*[,;]|,\s*[.;](?!\.\.|\s*\.\s*\.)",
    "marks of wikitext": r"''|\[\[|\]\]|\{\{|\}\}|\{\||<(?:ref|span|math|div|br|small)\b|\|\s*\w+\s*=",
    "an article without a noun": rf"(?<![\[/⟨(.*-])\b(?:is|was|of|in|to|and|by|with|as|for|from) (?:an?|the) ?{END}",
    "a preposition without a noun": rf"\b(?:of|from|between|than|about|and) ?{END}(?!, | ?\.\.\.)",
    "a preposition before a comma": r"\b(?:of|from|At|between|about),(?! (?:but|or|and|for|in|if|as|\w+ing)\b)",
    "a word twice": r"\b(of|to|in|at|and|from|about) \1\b",
    "a unit without a number": r"\b(?:about|of|some|around|nearly|over) (?:km|m|mi|ft|kg|lb|°C|°F)\b",
    "a currency without a number": r"[$£€] (?=[a-z(])|\(\$ ",
    "a quote without a partner": r"(?:^|\s)'(?=[\s,.;:)])",
}
INLINE = re.compile(r"(?<=[\w,;:(\"'”] )\{\{([^{}|\n]+)((?:\|[^{}\n]*)?)\}\}(?=[ ,.;:)\"'])")
PROSE = re.compile(r"(?:'''|''|\[\[|\"|“)?[^\W\d_]")
SILENT = re.compile(
    r"(?:cite|sfn|efn|refn|ref\b|rp|citation|fact|cn|note|clarif|who|when|where|which|vague|dubious|page needed|"
    r"by whom|better|failed|verif|unreliable|dead|relevance|weasel|anchor|flagicon|coord|inflation-fn|clear|webarchive|"
    r"wayback|disambiguation|full|quantify|specify|according|#tag|cref|r\||sup\b)",
    re.IGNORECASE,
)
"""Templates that a reader of the page sees as the number of a note, a flag or nothing."""
CHILD = """
import json, sys
from pathlib import Path
from data_prep.readers import READERS
from data_prep.readers.reader import Options, Problems
from data_prep.readers.wikitext import Wikitext
asked, reader, wiki = json.load(sys.stdin), READERS["mediawiki"], Wikitext()
spans = reader.spans(Path(asked["dump"]), 1 << 30)
pages = [page.passages for span in spans for page in reader.read(span, Options(Problems("skip")))]
json.dump([pages, [wiki.passages(text) for text in asked["texts"]]], sys.stdout)
"""


@dataclass(frozen=True)
class Cleanliness:
    """Counts holes in the text of dumps."""

    data: Path = DATA / "wikidump"
    """Folder with dumps: .xml or .xml.bz2; NAME.wikiextractor beside NAME.xml is what WikiExtractor made of it."""
    before: str | None = None
    """A commit, whose reader takes part too."""
    extractor: Path | None = None
    """A Python that has WikiExtractor."""
    out: Path | None = None
    """File for the numbers (default: benchmarks/results/cleanliness-<hardware>.json)."""


def articles(path: Path) -> Iterator[str]:
    """The wikitext of the articles of a dump."""
    content = bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
    for found in re.findall(rb"<page>.*?</page>", content, re.DOTALL):
        page = ElementTree.fromstring(found)
        title, text = page.findtext("title", ""), page.findtext("revision/text") or ""
        if page.findtext("ns", "0") == "0" and page.find("redirect") is None and not is_disambiguation(title, text):
            yield text


def checkout(commit: str, folder: Path) -> Path:
    """Puts the files of a commit into a folder."""
    archive = folder / "tree.tar"
    output_of(["git", "-C", str(ROOT), "archive", "--output", str(archive), commit], f"--before {commit}")
    shutil.unpack_archive(archive, folder)
    return folder


def output_of(command: list[str], what: str, **options: Any) -> str:
    """What a command says; UserError with its complaint, after `what` it is for, where it fails."""
    try:
        said: str = subprocess.check_output(command, stderr=subprocess.PIPE, text=True, **options)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{what}: {str(getattr(error, 'stderr', error))[-500:]}") from error
    return said


def read_by(tree: Path, dump: Path, texts: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """The passages of pages and of texts, read by what is in a tree of files."""
    asked = {"dump": str(dump.resolve()), "texts": texts}
    inside: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(tree)}, "cwd": tree}
    command = [sys.executable, "-c", CHILD]
    pages, read = json.loads(output_of(command, f"{tree}: its reader fails", input=json.dumps(asked), **inside))
    return pages, read


def read_extracted(files: Iterable[Path]) -> list[str]:
    """The passages in files that WikiExtractor wrote."""
    reader, options, passages = READERS["wikiextractor"], Options(Problems("fail")), []
    for path in files:
        for span in reader.spans(path, 1 << 30):
            passages += [passage for document in reader.read(span, options) for passage in document.passages]
    return passages


def extract(python: Path, dump: Path) -> list[str]:
    """The passages that WikiExtractor finds in a dump."""
    with tempfile.TemporaryDirectory() as folder:
        plain, out = Path(folder) / "dump.xml", Path(folder) / "out"
        plain.write_bytes(bz2.decompress(dump.read_bytes()) if dump.suffix == ".bz2" else dump.read_bytes())
        command = [str(python), "-m", "wikiextractor.WikiExtractor", "--no-templates", "-q", "-o", str(out), str(plain)]
        output_of(command, f"--extractor {python}", cwd=folder)
        return read_extracted(sorted(out.rglob("wiki_*")))


def extractor_version(python: Path | None) -> str | None:
    """The version of WikiExtractor that a Python has."""
    ask = "import importlib.metadata as m; print(m.version('wikiextractor'))"
    return None if python is None else output_of([str(python), "-c", ask], f"--extractor {python}").strip()


def holes(passages: list[str]) -> dict[str, Any]:
    """How many passages of a thousand have a hole, and of which kinds."""
    of_kind = {kind: sum(bool(re.search(rule, passage)) for passage in passages) for kind, rule in HOLES.items()}
    number = sum(any(re.search(rule, passage) for rule in HOLES.values()) for passage in passages)
    per_thousand = round(1000 * number / max(len(passages), 1), 1)
    return {"passages": len(passages), "with_holes": number, "per_thousand": per_thousand, "kinds": of_kind}


def probes(texts: list[str]) -> list[tuple[str, str]]:
    """Paragraphs with a template in the middle of a sentence that shows something, each with itself without it."""
    found = []
    for text in texts:
        for line in re.sub(r"<ref[^<>]*/>|<ref[^<>]*>.*?</ref>|<!--.*?-->", "", text, flags=re.DOTALL).split("\n"):
            if PROSE.match(line) and line.count("{{") == line.count("}}"):
                shown = [match for match in INLINE.finditer(line) if not SILENT.match(match[1].strip())]
                found += [(line, line[: match.start()] + line[match.end() :]) for match in shown]
    return found


def by_source(outs: list[list[str]]) -> dict[str, Any]:
    """Counts the templates that come out as nothing: of each, the passages with it and those without it."""
    words = [re.findall(r"\w+", " ".join(passages)) for passages in outs]
    lost = sum(with_it == without for with_it, without in zip(words[::2], words[1::2], strict=True))
    return {"templates": len(outs) // 2, "lost": lost}


def measure(dump: Path, settings: Cleanliness, trees: dict[str, Path]) -> dict[str, Any]:
    """The numbers of all sides on one dump."""
    texts = list(articles(dump))
    pairs, sides = probes(texts), {}
    for side, tree in trees.items():
        pages, outs = read_by(tree, dump, [text for pair in pairs for text in pair])
        sides[side] = {**holes([passage for page in pages for passage in page]), "by_source": by_source(outs)}
    written = dump.with_name(dump.name.partition(".")[0] + ".wikiextractor")
    all_lost = {"templates": len(pairs), "lost": len(pairs)}  # it writes none without the templates of the wiki
    if written.exists():
        sides["WikiExtractor, its output"] = {**holes(read_extracted([written])), "by_source": all_lost}
    if settings.extractor:
        sides["WikiExtractor"] = {**holes(extract(settings.extractor, dump)), "by_source": all_lost}
    return {"articles": len(texts), "sides": sides}


def run(settings: Cleanliness, console: Console) -> None:
    """Measures all dumps, and keeps what is found."""
    dumps = sorted(path for path in settings.data.glob("*.xml*") if path.suffix in (".xml", ".bz2"))
    if not dumps:
        raise UserError(f"{settings.data} has no .xml or .xml.bz2; give --data a folder with dumps")
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": checkout(settings.before, Path(folder))} if settings.before else {}
        found = {dump.name: measure(dump, settings, {**trees, "now": ROOT}) for dump in dumps}
    told = {"before": settings.before, "wikiextractor": extractor_version(settings.extractor), "dumps": found}
    show(console, cleanliness(told))
    kept = Keeper("cleanliness", [], settings.out, with_gpu=False).keep(told)
    console.print(f"kept in {kept}", markup=False)


if __name__ == "__main__":
    run_command(Cleanliness, run)
