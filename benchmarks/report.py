#!/usr/bin/env python3
"""Makes one page of all that was measured, with tables, charts and the machines; and writes the tables of docs/.

    python benchmarks/report.py
    python benchmarks/report.py --run runs/demo
    python benchmarks/report.py --docs

Reads every JSON under benchmarks/results/ and writes build/report/index.html, which needs nothing else, and report.md
beside it. With --docs it writes anew what stands between markers in docs/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import tyro

from benchmarks.measure import PARTIAL, RESULTS, ROOT, commit, mistakes_told, read_results
from benchmarks.svg import curves
from benchmarks.tables import SHORT, Block, Results, blocks_of, matrix, middle
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from pretraining.reporting.metrics_file import METRICS, loss_curve, newest_records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PUBLISHED = Path(__file__).parent / "published.toml"
PAGES = tuple(ROOT / "docs" / name for name in ("measurements.md", "planning.md", "data.md"))
ORDER = ("throughput", "scaling", "inference", "preparation", "finetuning", "downstream")  # the others come after
MARKED = re.compile(r"(<!-- results of (\w+), written by benchmarks/report.py -->\n).*?(<!-- end of results -->)", re.S)
PLACES = 300  # of a loss curve that are drawn
STYLE = """
:root{color-scheme:light dark} a{color:LinkText} nav a{margin-right:.8rem}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:1100px;background:Canvas;color:CanvasText}
h1{font-size:1.6rem} h2{border-top:1px solid #8886;padding-top:1rem;margin-top:2rem} h4{margin:1.2rem 0 .4rem}
.box{overflow-x:auto;margin:.8rem 0} table{border-collapse:collapse;font-size:.86rem}
th,td{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #8884;vertical-align:top} th{min-width:4.5rem}
td{white-space:nowrap;font-variant-numeric:tabular-nums}
svg{display:block;overflow:visible;width:100%;max-width:540px;height:auto;font:12px system-ui,sans-serif}
svg text{fill:currentColor}
"""


@dataclass(frozen=True)
class Report:
    """Makes one page of all that was measured."""

    results: Path = RESULTS
    """Folder with the JSON files of benchmarks."""
    run: Path | None = None
    """Folder of a run of pre-training, whose loss is drawn too."""
    out: Path = Path("build/report")
    """Folder for the page."""
    docs: bool = False
    """Write anew the tables of docs/, and no page."""


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    note: str
    blocks: Sequence[Block]

    def html(self) -> str:
        begin = f'<h2 id="{escape(self.title)}">{escape(self.title)}</h2><p>{escape(self.note)}</p>'
        return begin + "".join(block.html() for block in self.blocks)

    def markdown(self) -> str:
        return "\n\n".join(filter(None, [f"## {self.title}", self.note, *(block.markdown() for block in self.blocks)]))


def read_all(folder: Path) -> dict[str, Results]:
    """The results of a folder by the names of their files; UserError where there are none, or some cannot be read."""
    found: dict[str, Results] = {}
    faults = []
    for path in sorted(path for path in folder.glob("*.json") if not path.stem.endswith(PARTIAL)):
        try:
            found[path.stem] = read_results(path)
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    if not found:
        raise UserError(
            f"{folder}: has no results for a page; first run python benchmarks/throughput.py, or give --results"
        )
    rank = {name: number for number, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[1]["benchmark"], len(ORDER)), item[0])))


def machine(environment: Mapping[str, Any]) -> str:
    """The hardware of results, and their day, as a line."""
    sets = ", ".join(environment.get("instruction_sets", [])) or "instruction sets unknown"
    processor = f"{environment.get('cores', '?')} cores of {environment.get('processor', 'an unknown kind')} ({sets})"
    return ", ".join(filter(None, (environment.get("gpu"), processor, environment.get("date"))))


def sections(results: Mapping[str, Results], run: Path | None) -> Iterator[Section]:
    """All parts of the page."""
    if run is not None:
        yield run_section(run)
    for name, found in results.items():
        yield Section(name, f"On {machine(found['environment'])}.", blocks_of(found))
    if PUBLISHED.exists():
        yield published(tomllib.loads(PUBLISHED.read_text(encoding="utf-8")), results)
    machines = [{"results": name, **found["environment"]} for name, found in results.items()]
    yield Section("Environment", "Where each was measured, and by which command.", [matrix("", machines)])


def run_section(folder: Path) -> Section:
    """How the loss of a run went, and its newest figures."""
    path = folder / METRICS
    curve = loss_curve(path, PLACES) if path.is_file() else []
    losses = [(step, loss) for step, loss in curve if math.isfinite(loss)]
    if not losses:
        raise UserError(f"{folder}: has no losses in {METRICS}; give the folder of a run, the --out of train.py")
    drawn = Block("", svg=curves({"training": losses}, "training loss", "step", "loss"))
    newest = newest_records(path, ("step", "evaluation")).values()
    return Section(f"Run {folder.resolve().name}", "", [drawn, *(matrix("", [record]) for record in newest)])


def published(content: Mapping[str, Any], results: Mapping[str, Results]) -> Section:
    """What others published, after the same model and length where they were measured here."""
    rows: list[dict[str, Any]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    known = {f"{row['model']}-{row['length']}" for row in content["rows"]}
    for name, found in results.items():
        for contest, each in found["contests"].items() if found["benchmark"] == "throughput" else ():
            if contest in known:
                speed = middle(each["sides"]["cloze"]["sequences_per_second"])
                own = {"devices": found["environment"]["hardware"], "software": "Cloze", "sequences_per_second": speed}
                rows.append({"model": contest.replace("-", " at "), **own, "source": f"{name}.json"})
    for row in content["rows"]:
        speed = float(row["sequences_per_second"])
        devices = {"devices": f"{row['gpus']} x {row['gpu']}", "software": row["software"]}
        speeds = {"sequences_per_second": speed, "of each GPU": speed / row["gpus"], "padded": row["padded"]}
        rows.append({"model": f"{row['model']} at {row['length']}", **devices, **speeds, "source": row["source"]})
        if row["length"] == 128 and "run" in row:
            series.setdefault(row["run"], []).append((row["gpus"], speed / row["gpus"]))
    drawn = curves({name: line for name, line in series.items() if len(line) > 1}, "published", "GPUs", "", log=True)
    times = [{name: row[name] for name in ("gpus", "gpu", "software", "hours", "source")} for row in content["hours"]]
    blocks = [
        Block("sequences/s of each GPU, large at 128", svg=drawn),
        matrix("", rows),
        matrix("Hours to train", times),
    ]
    return Section("Published", "What ran elsewhere took no turns with ours, so there are no ratios.", blocks)


def page(parts: Sequence[Section]) -> str:
    """The whole page: no script, and nothing that lies elsewhere."""
    links = " ".join(f'<a href="#{escape(each.title)}">{escape(each.title)}</a>' for each in parts)
    told = (
        f"Made at commit {commit() or 'unknown'}. A ratio is of sides that took turns in one run: the median of rounds."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Cloze: measurements</title>'
        f"<style>{STYLE}</style></head><body><h1>Cloze: measurements</h1><p>{escape(told)}</p><nav>{links}</nav>"
        f"{''.join(each.html() for each in parts)}</body></html>\n"
    )


def rewritten(text: str, results: Mapping[str, Results]) -> str:
    """A page of documentation with the tables of these results between its markers."""

    def tables(match: re.Match[str]) -> str:
        parts = []
        for name, found in results.items():
            if found["benchmark"] == match[2]:
                parts.append(f"{machine(found['environment'])} (`{name}.json`):")
                parts += filter(None, (block.markdown() for block in SHORT[match[2]](found)))
        return f"{match[1]}\n" + "".join(f"{part}\n\n" for part in parts) + match[3]

    return MARKED.sub(tables, text)


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Report, args=arguments, prog="report.py", config=(tyro.conf.FlagCreatePairsOff,))
    results = read_all(settings.results)
    if settings.docs:
        written = {path: rewritten(path.read_text(encoding="utf-8"), results) for path in PAGES}
    else:
        parts = list(sections(results, settings.run))
        text = "\n\n".join(["# Cloze: measurements", *(each.markdown() for each in parts)]) + "\n"
        written = {settings.out / "index.html": page(parts), settings.out / "report.md": text}
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content.encode())
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
