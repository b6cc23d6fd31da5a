#!/usr/bin/env python3
"""Makes one page of all that was measured, with tables, charts and the machines; and writes the tables of docs/.

    python benchmarks/report.py
    python benchmarks/report.py --run runs/demo
    python benchmarks/report.py --docs

Reads every JSON under benchmarks/results/ and writes build/report/index.html, which needs nothing else. With --docs it
writes anew what stands between markers in docs/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from typing import Any

import jinja2
from rich.console import Console

from benchmarks.charts import embedded, ratio_chart, scaling_chart
from benchmarks.measure import PARTIAL, RESULTS, ROOT, commit, read_results, run_command
from benchmarks.reproduction.drawing import chart_of
from benchmarks.reproduction.ledger import BENCHMARK
from benchmarks.reproduction.showing import read_table_result, runs_of, tables_of
from benchmarks.tables import (
    Results,
    ResultTable,
    cell,
    contest_name,
    contests_of,
    in_full,
    matrix,
    middle,
    shortly,
    times,
    titled,
)
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from pretraining.objectives.declaration import loss_curves
from pretraining.reporting.loss_chart import PLACES, loss_chart
from pretraining.reporting.metrics_file import METRICS, evaluations, newest_records, step_records

TEMPLATE = Path(__file__).with_suffix(".html")
PAGES = tuple(
    ROOT / "docs" / name
    for name in ("measurements.md", "data.md", "exactness.md", "training.md", "reproducing.md", "gpu.md")
)
TITLES = {
    BENCHMARK: "The paper's tables",
    "throughput": "Steps of pre-training",
    "optimizers": "Steps of optimizers",
    "weight_gradients": "Gradients of weights",
    "scaling": "Several processes",
    "finetuning": "Fine-tuning",
    "fine_tuning_ranks": "Fine-tuning on several ranks",
    "spin_counts": "How long threads wait",
    "inference": "Answers of a fine-tuned model",
    "preparation": "Preparing text",
    "parts": "Preparing large texts",
    "cleanliness": "Text of MediaWiki dumps",
    "loader": "Preparing batches",
    "trainer_losses": "Losses beside the Trainer's",
    "trainer_scores": "Scores beside the Trainer's",
    "recipe_scores": "What a recipe gives",
}
"""Titles of the benchmarks, in the order of the page; others follow by their own names."""
MARKED = re.compile(r"(<!-- results of (\w+), written by benchmarks/report.py -->\n).*?(<!-- end of results -->)", re.S)


@dataclass(frozen=True)
class ReportPage:
    """Makes one page of all that was measured."""

    results: Path = RESULTS
    """Folder with the JSON files of benchmarks."""
    run: Path | None = None
    """Folder of a run of pre-training, whose losses are drawn too."""
    out: Path = Path("build/report")
    """Folder for the page."""
    docs: bool = False
    """Write anew the tables of docs/, and no page."""


@dataclass(frozen=True)
class PagePart:
    """What one file of results says: a chart, what matters first, and the rest, which is folded away."""

    title: str = ""
    tables: Sequence[ResultTable] = ()
    chart: str = ""
    full: Sequence[ResultTable] = ()
    source: str = ""


@dataclass(frozen=True)
class Chapter:
    """A part of the page."""

    title: str
    parts: Sequence[PagePart]
    note: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


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
    return found


def machine(environment: Mapping[str, Any]) -> str:
    """The hardware of results, and their day, as a line."""
    sets = ", ".join(environment["instruction_sets"]) or "instruction sets unknown"
    processor = f"{environment['cores']} cores of {environment['processor']} ({sets})"
    return ", ".join(filter(None, (environment.get("gpu"), processor, day(environment["date"]))))


def day(written: str) -> str:
    """A date as people write it."""
    found = date.fromisoformat(written)
    return f"{found.day} {found:%B %Y}"


def sections(results: Mapping[str, Results], run: Path | None = None) -> Iterator[Chapter]:
    """All parts of the page."""
    yield Chapter("Summary", [PagePart(tables=[summary(results)])])
    if run is not None:
        yield chapter_of_run(run)
    for benchmark in dict.fromkeys([*TITLES, *(found["benchmark"] for found in results.values())]):
        parts = [part_of(name, found) for name, found in results.items() if found["benchmark"] == benchmark]
        if parts:
            yield Chapter(TITLES.get(benchmark, benchmark), parts)
    machines = [{"results": name, **found["environment"]} for name, found in results.items()]
    yield Chapter("Machines", [PagePart(full=[matrix("", machines)], source="their environments")])


def summary(results: Mapping[str, Results]) -> ResultTable:
    """How many times as fast as each peer we are, in the contests where we lead least and most, by hardware."""
    ratios: dict[tuple[str, str], dict[str, list[tuple[float, str]]]] = {}
    for benchmark, title in TITLES.items():
        for found in (each for each in results.values() if each["benchmark"] == benchmark):
            contests = [(model, *each) for model, several in contests_of(found) for each in several.items()]
            for model, name, contest in contests:
                for peer, ratio in times(contest).items():
                    row = ratios.setdefault((title, peer), {}).setdefault(found["environment"]["hardware"], [])
                    row.append((middle(ratio), f"{model} {contest_name(name, contest)}".strip()))
    rows: list[dict[str, str]] = []
    for (title, peer), kinds in ratios.items():
        ranges = {
            kind: " to ".join(dict.fromkeys(f"{cell(ratio)} ({name})" for ratio, name in (min(many), max(many))))
            for kind, many in kinds.items()
        }
        told_before = any(title in row.values() for row in rows)
        rows.append({"times as fast": "" if told_before else title, "beside": peer, **ranges})
    return matrix("", rows)


def part_of_paper(name: str, found: Results) -> PagePart:
    """What a table of the paper says that was measured."""
    result = read_table_result(found)
    drawn = chart_of(result)
    chart = embedded(drawn) if drawn else ""
    title = f"{result.title}, scale {result.scale}"
    return PagePart(title, list(tables_of(result)), chart, [runs_of(result)], f"{name}.json")


def part_of(name: str, found: Results) -> PagePart:
    """What a file of results says."""
    if found["benchmark"] == BENCHMARK:
        return part_of_paper(name, found)
    ratios = {
        f"{model} {contest_name(title, each)}".strip(): times(each)
        for model, contests in contests_of(found)
        for title, each in contests.items()
        if times(each)
    }
    chart = embedded(ratio_chart(ratios)) if ratios else ""
    if found["benchmark"] == "scaling":
        chart = embedded(scaling_chart(found["points"]))
    return PagePart(machine(found["environment"]), list(shortly(found)), chart, list(in_full(found)), f"{name}.json")


def chapter_of_run(folder: Path) -> Chapter:
    """How the losses of a run went, and its newest figures."""
    path, name = folder / METRICS, folder.resolve().name
    trained = step_records(path, PLACES) if path.is_file() else []
    if not trained:
        raise UserError(f"{folder}: has no losses in {METRICS}; give the folder of a run, the --out of train.py")
    newest = [table_of_record(record) for record in newest_records(path, ("step", "evaluation")).values()]
    chart = embedded(loss_chart(trained, list(evaluations(path)), name, loss_curves()))
    return Chapter(f"Run {name}", [PagePart(tables=newest, chart=chart)])


def table_of_record(record: Mapping[str, Any]) -> ResultTable:
    """A record of a run, a figure a row."""
    shown = {titled(figure): cell(value, figure) for figure, value in record.items() if figure != "kind"}
    if "time" in record:
        shown["time"] = f"{datetime.fromtimestamp(record['time'], timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    return ResultTable(f"The newest {record['kind']}", ("figure", ""), [*shown.items()])


def page(chapters: Iterable[Chapter]) -> str:
    """The whole page: no script, and nothing that lies elsewhere."""
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True, keep_trailing_newline=True)
    return str(
        template.render(sections=list(chapters), commit=commit() or "unknown", today=day(date.today().isoformat()))
    )


def for_docs(name: str, found: Results) -> Iterable[ResultTable]:
    """What documentation has of a file of results."""
    if found["benchmark"] != BENCHMARK:
        return shortly(found)
    scores, claims, _, notes, *_ = part_of_paper(name, found).tables
    titled = replace(scores, title=f"{part_of_paper(name, found).title}. {scores.title}")
    return [titled, claims, notes]


def rewritten(text: str, results: Mapping[str, Results]) -> str:
    """A page of documentation with the tables of these results between its markers."""

    def tables(match: re.Match[str]) -> str:
        parts = []
        for name, found in results.items():
            if found["benchmark"] == match[2]:
                parts.append(f"{machine(found['environment'])} (`{name}.json`):")
                parts += filter(None, (table.markdown() for table in for_docs(name, found)))
        return f"{match[1]}\n" + "".join(f"{part}\n\n" for part in parts) + match[3]

    return MARKED.sub(tables, text)


def write(settings: ReportPage, console: Console) -> None:
    """Writes the page, or the tables of the documentation."""
    results = read_all(settings.results)
    if settings.docs:
        written = {path: rewritten(path.read_text(encoding="utf-8"), results) for path in PAGES}
    else:
        written = {settings.out / "index.html": page(sections(results, settings.run))}
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content.encode())
        console.print(f"written: {path}", markup=False)


if __name__ == "__main__":
    run_command(ReportPage, write)
