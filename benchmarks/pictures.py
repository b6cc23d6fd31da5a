#!/usr/bin/env python3
"""Draws the pictures of README and docs/ from results, and records the demo that three of them show.

    python benchmarks/pictures.py         trains the demo, and writes its figures into benchmarks/results/
    python benchmarks/report.py --docs    draws all pictures

Each picture is an SVG file that needs no other file. The same results give the same bytes.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import io
import os
import pty
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.measure import ROOT, ResultsFile, run_command
from benchmarks.tables import Results, list_contests, list_ratios, read_median
from data_prep.common.errors import UserError
from pretraining.objectives.declaration import list_loss_curves
from pretraining.reporting.figures import BLUE, GREY, draw_chart, new_figure, read_lengths
from pretraining.reporting.metrics_file import METRICS, Logged, read_evaluations, read_step_records

PICTURES = ROOT / "docs" / "pictures"
HARDWARE = {
    "amx-2-cores": "AMX",
    "avx512-bf16-2-cores": "AVX512-BF16",
    "zen4-avx512-bf16-2-cores": "Zen 4",
    "avx2-2-cores": "AVX2",
    "nvidia-h200": "H200",
}
"""Ends of the names of files of results, with the names of their hardware in the chart of speed."""
ALIKE = "transformers, same allocator settings"
GROUPED = "transformers' Trainer, batches of similar lengths"
ONNX = "onnxruntime fp32"
CONTESTS = (
    ("training base at 128", "transformers in bf16", "throughput", "base-128", "transformers"),
    ("training base at 128", ALIKE, "throughput", "base-128", "transformers, memory kept"),
    ("training mini at 128", ALIKE, "throughput", "mini-128", "transformers, memory kept"),
    ("training large at 128", "transformers", "throughput", "large-128", "transformers"),
    ("training large at 128", "compiled transformers", "throughput", "large-128", "transformers, compiled"),
    ("fine-tuning mini", GROUPED, "finetuning", "sst2-dynamic", "Trainer in autocast: training"),
    ("answers of mini in fp32, one at a time", "ONNX Runtime", "inference", "SST-2, 1 at a time", ONNX),
    ("answers of mini in fp32, 32 at a time", "ONNX Runtime", "inference", "SST-2, 32 at a time", ONNX),
    ("preparing 4 MB", "BERT's original algorithm", "preparation", "4 MB, 1 duplicate", "original"),
)
"""Bars of the chart of speed: what is done, by which peer; then the benchmark, its contest, and the peer there."""
COLOURS = {"light": ("#1f2328", BLUE), "dark": ("#e6edf3", "#56B4E9")}
"""Colours of text and bars for light and dark pages."""
SHORT = 5.6
"""Width of charts in inches: on a phone of 420 pixels their text has about ten pixels."""
COLUMNS = 72
"""Width of the terminal that is shown."""
RUN = "runs/demo"
PARTS = (r"<figure>.*?</figure>", r"<p><mark .*?</p>", r"<article .*?</article>")
"""What is kept of the report page: the first histogram, the key to the masks, and the first example."""
SHOWN_STEP = 250
"""The first step of the demo whose panel is kept: past an evaluation and a checkpoint."""
LOSS = "masked_loss"
"""The loss that is shown. That of next sentences does not fall in so short a run."""
PAGE = (560, 780)
"""Width and height of the part of the report page, in pixels: the font is that of the reader, so some room is left."""
STYLE = "body { height: 100%; padding: .2rem .8rem; font-size: 14px }"


def draw_pictures(results: Mapping[str, Results]) -> dict[str, bytes]:
    """Draws the pictures of README and docs/ from results by the name of their file; returns SVG by the name of a file.

    Raises UserError if there is no recorded demo.
    """
    demo = next((found for found in results.values() if found["benchmark"] == "demo"), None)
    if demo is None:
        raise UserError("no results of the demo, which the pictures show; first run python benchmarks/pictures.py")
    speeds = {f"speed-{theme}.svg": draw_speed(results, *colours) for theme, colours in COLOURS.items()}
    return {**speeds, "loss.svg": draw_losses(demo), "panel.svg": draw_panel(demo), "report.svg": draw_page(demo)}


def find_speeds(results: Mapping[str, Results]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the contests of the chart with the ratio of each hardware that was measured."""
    for what, peer, benchmark, contest, side in CONTESTS:
        bars = {}
        for end, hardware in HARDWARE.items():
            for model, contests in list_contests(results.get(f"{benchmark}-{end}", {})):
                ratio = list_ratios(contests.get(contest, {})).get(side)
                if model in ("", "mini") and ratio is not None:
                    bars[hardware] = ratio
        yield f"{what}, against {peer}", bars


def draw_speed(results: Mapping[str, Results], ink: str, colour: str) -> bytes:
    """Draws how many times as fast Cloze is as its peers: a title for each, and a bar for each hardware."""
    titles, bars, y = {}, dict[float, tuple[str, Any]](), 0.0
    for title, ratios in find_speeds(results):
        titles[y] = title
        bars |= {y + number: each for number, each in enumerate(ratios.items(), 1)}
        y += len(ratios) + 1.6
    figure = new_figure(0.21 * y + 0.4)
    figure.set_figwidth(SHORT)
    axes = figure.subplots()
    for y, title in titles.items():
        place = axes.annotate(title, (0.01, y), xycoords=("figure fraction", "data"), color=ink, va="center")
        place.set_in_layout(False)
    for y, (_, ratio) in bars.items():
        median = end = read_median(ratio)
        axes.barh(y, median, color=colour, height=0.75)
        axes.vlines(1, y - 0.5, y + 0.5, color=ink, linewidth=1)
        if isinstance(ratio, Mapping):
            end = ratio["highest"]
            axes.hlines(y, ratio["lowest"], end, color=GREY, linewidth=1.5)
        axes.text(end + 0.2, y, f"{median:.{int(median < 10)}f}", color=ink, va="center")
    axes.set_yticks([*bars], [hardware for hardware, _ in bars.values()])
    axes.set(ylim=(max(bars, default=0) + 0.8, -0.8), xlim=(0, 17.4), xticks=[1, 5, 10, 15])
    axes.set_xlabel("times as fast (median; grey: lowest to highest)", color=ink)
    axes.tick_params(colors=ink, length=0)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("none")
    figure.set_facecolor("none")
    return save_svg(figure)


def draw_losses(demo: Results) -> bytes:
    """Draws the loss of masked pieces of the demo as `status.py --charts` does."""
    trained, scored = ([Logged.from_record(each) for each in demo[part]] for part in ("trained", "scored"))
    lengths = read_lengths(ROOT / "pretraining" / "recipes" / "demo.toml")
    figure = draw_chart(trained, scored, RUN, {LOSS: list_loss_curves()[LOSS]}, lengths)
    figure.set_size_inches(SHORT, 3.0)
    return save_svg(figure)


def save_svg(figure: Any) -> bytes:
    """Returns a figure as SVG with text in the font of the reader, without what differs from run to run."""
    from matplotlib import rc_context

    kept = io.BytesIO()
    with rc_context({"svg.hashsalt": "cloze", "svg.fonttype": "none"}):
        figure.savefig(kept, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return kept.getvalue()


def draw_panel(demo: Results) -> bytes:
    """Draws the terminal in which `status.py` has shown the demo. The font is that of the reader."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS)
    console.print(Text.from_ansi("\n".join(demo["panel"])), end="\n\n")
    drawn = console.export_svg(title="python cluster/status.py", unique_id="run")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).encode()


def draw_page(demo: Results) -> bytes:
    """Draws the parts of the report page that were kept, in its style: a histogram, and an example with its masks."""
    source = (ROOT / "data_prep" / "inspection" / "page" / "report.html").read_text(encoding="utf-8")
    style = source[source.index(":root") : source.index("</style>")]
    (width, height), (figure, *others) = PAGE, demo["page"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        '<foreignObject width="100%" height="100%"><body xmlns="http://www.w3.org/1999/xhtml">',
        f"<style>{style}{STYLE}</style>",
        figure.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '),
        *others,
        "</body></foreignObject></svg>\n",
    ]
    return "\n".join(lines).encode()


@dataclass(frozen=True)
class Recording:
    """Trains the demo of `make demo` in a temporary folder, and writes what the pictures show of it."""


def record(_: Recording, console: Console) -> None:
    """Trains the demo and writes the panel of a step, the losses, and parts of the report page."""
    with tempfile.TemporaryDirectory() as folder:
        run_script(folder, "data_prep/shard.py --docs demo --duplicates 2 --vocab-size 8192 --out data")
        run_script(folder, "data_prep/show.py data --report")
        page = Path(folder, "data", "report.html").read_text(encoding="utf-8")
        launcher, panel, metrics = "-m torch.distributed.run --nproc-per-node 2", "", Path(folder, RUN, METRICS)
        train = [sys.executable, *launcher.split(), str(ROOT / "pretraining" / "train.py"), "--recipe", "demo"]
        with subprocess.Popen([*train, "--data", "data", "--out", RUN], cwd=folder) as training:
            while training.poll() is None:
                time.sleep(0.2)
                if not panel and metrics.exists() and f'"step": {SHOWN_STEP},' in metrics.read_text():
                    panel = show_panel(folder)
        if training.returncode or not panel:
            raise UserError(f"the demo ended with exit code {training.returncode}; nothing is written")
        losses = {"trained": read_step_records(metrics), "scored": [*read_evaluations(metrics)]}
    names = ("step", "phase", LOSS)
    kept = {part: [{name: each.figures[name] for name in names} for each in losses[part]] for part in losses}
    parts = [re.findall(pattern, page, re.DOTALL)[0] for pattern in PARTS]
    found = {"panel": panel.splitlines(), **kept, "page": parts}
    path = ResultsFile("demo", ["torch", "deepspeed"], None).keep(found, replaces=True)
    console.print(f"written: {path}", markup=False)


def run_script(folder: str, line: str, **how: Any) -> None:
    """Runs a script of Cloze in a folder; raises CalledProcessError if it fails."""
    script, *words = line.split()
    subprocess.run([sys.executable, ROOT / script, *words], cwd=folder, check=True, **how)


def show_panel(folder: str) -> str:
    """Returns what `status.py` prints in a terminal, with its colours. A terminal holds that much unread."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": f"{COLUMNS}", "TERM": "xterm-256color"}
    run_script(folder, "cluster/status.py", stdout=theirs, env=environment)
    return os.read(ours, 1 << 16).decode().rstrip()


if __name__ == "__main__":
    run_command(Recording, record)
