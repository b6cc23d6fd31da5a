"""The files of a run: each record once, whatever is cut off; what is read of them again; chart and console."""

import io
import itertools
import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from support.commands import assert_refusal
from support.processes import spawn
from support.records import RECORD, SCORES, open_log
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from data_prep.common.errors import UserError
from data_prep.common.unread import drop_unread
from pretraining.objectives.declaration import list_loss_curves
from pretraining.reporting import figures
from pretraining.reporting.console import format_number
from pretraining.reporting.figures import draw_chart
from pretraining.reporting.metrics_file import METRICS, Logged, read_newest_records, read_step_records
from pretraining.reporting.records import describe_progress
from pretraining.reporting.run_log import TENSORBOARD, cut_metrics


def read_lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_each_record_is_a_line_of_json_and_of_the_console_at_once(tmp_path: Path) -> None:
    before, output = time.time(), io.StringIO()
    with open_log(tmp_path, Console(file=output, width=80)) as log:
        log.write(RECORD)
        [line] = read_lines(tmp_path)  # before the end
        assert (line["kind"], line["step"], line["masked_loss"], line["loss_scale"]) == ("step", 12000, 5.842, None)
        log.write(SCORES)
        found = read_newest_records(tmp_path / METRICS, KINDS)
        log.write(replace(RECORD, step=12001, loss=float("nan")))
    _, scores, broken = read_lines(tmp_path)
    assert found == {"step": line, "evaluation": scores}
    assert (scores["kind"], scores["perplexity"]) == ("evaluation", pytest.approx(330.2996))
    assert broken["loss"] is None  # JSON has no NaN
    assert before - 0.01 <= float(str(line["time"])) <= float(str(scores["time"])) <= time.time() + 0.01
    step, validation, _ = output.getvalue().splitlines()
    assert (step, len(step) <= 165) == (RECORD.line(), True)
    assert "12000/900000  loss 6.5321  masked 5.8420 12.3%  next 0.6901 55.1% (larger class 51.3%)" in step
    assert step.endswith("123k pieces/s  use 61%  wait 0%  2 h 03 m left")
    assert validation.startswith("validation 12000: masked 5.8000 12.0%  perplexity 330.30  next 0.6900 55.0%")


def test_ranks_other_than_0_write_nothing_and_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output), active=False) as log:
        log.write(RECORD)
        log.write(SCORES)
        log.say("hello")
    assert ([*tmp_path.iterdir()], output.getvalue()) == ([], "")
    assert_refusal("metrics.jsonl: cannot be written: No such file", open_log(tmp_path / "no").__enter__)


def test_a_run_that_goes_on_has_no_step_twice(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in range(5, 40, 5):
            log.write(replace(RECORD, step=step))
            log.write(replace(SCORES, step=step))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')  # killed in the middle of a line
    with open_log(tmp_path, first_step=21) as log:
        log.write(replace(RECORD, step=25))
    assert [line["step"] for line in read_lines(tmp_path)] == [5, 5, 10, 10, 15, 15, 20, 20, 25]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_damaged_line_is_named_and_left(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    assert_refusal(r"metrics.jsonl:2: no record of a step", cut_metrics, path, 2)
    assert path.read_text().count("\n") == 3


def log_twice(run: Path) -> None:
    """Logs steps for TensorBoard, and then the last of them again, with a score."""
    run.mkdir(exist_ok=True)
    with open_log(run, tensorboard=True) as log:
        for step in (10, 20, 30):
            log.write(replace(RECORD, step=step, loss=1.0))
    with open_log(run, tensorboard=True, first_step=21) as log:
        log.write(replace(RECORD, step=30, loss=2.0))
        log.write(replace(SCORES, step=30))


def test_tensorboard_goes_on_with_the_files_of_an_older_run(tmp_path: Path) -> None:
    (tmp_path / "old" / TENSORBOARD).mkdir(parents=True)
    log_twice(tmp_path / "old")
    found = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert [*found.Runs()] == [f"old/{TENSORBOARD}"]


def test_tensorboard_shows_each_step_once_and_no_curve_of_what_is_none(tmp_path: Path) -> None:
    """Of the phase and the time left, which the lines of JSON have."""
    log_twice(tmp_path / "mini")
    assert [*EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload().Runs()] == ["mini"]
    found = EventAccumulator(str(tmp_path / "mini"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(10, 1.0), (20, 1.0), (30, 2.0)]
    names = found.Tags()["scalars"]
    assert {"train/learning_rate", "train/flops_utilisation", "validation/perplexity"} <= set(names)
    curves = {name.partition("/")[2] for name in names}
    assert {"masked_loss", "next_accuracy", "seconds_per_step", "examples_seen", "pieces_seen"} <= curves
    assert not curves & {"step", "phase", "seconds_left", "time", "scored_examples", "evaluation_seconds"}
    assert {"phase", "seconds_left"} <= read_lines(tmp_path / "mini")[0].keys()


def log_for_a_reader_who_leaves() -> None:
    """Logs to a pipe whose reading end is closed after the first line."""
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    drop_unread()
    with open_log(Path(os.environ["CLOZE_FOLDER"]), Console(file=sys.stdout)) as log:
        log.write(RECORD)
        assert b"loss 6.5321" in os.read(reading, 1000)
        os.close(reading)
        for step in range(RECORD.step + 1, RECORD.step + 10):
            log.write(replace(RECORD, step=step))


def test_a_reader_who_leaves_is_noted_once_and_the_run_goes_on(tmp_path: Path) -> None:
    [done] = spawn(1, log_for_a_reader_who_leaves, environment={"CLOZE_FOLDER": str(tmp_path)})
    assert done.code == 0, done.errors
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(RECORD.step, RECORD.step + 10))
    [note] = [line["text"] for line in lines if line["kind"] == "note"]
    assert "standard output" in str(note)
    assert done.errors == f"warning: {note}\n"


def log_until_the_disk_is_full() -> str:
    """What the user is told where no file may have more than 3000 bytes."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert unlimited[0] == resource.RLIM_INFINITY
    try:
        with open_log(Path(os.environ["CLOZE_FOLDER"]), tensorboard=os.environ["CLOZE_HOW"] == "tensorboard") as log:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, unlimited[1]))
            for step in range(100_000):
                log.write(replace(RECORD, step=step))
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return "nothing"


@pytest.mark.parametrize("how", ["plain", "tensorboard"])
def test_a_full_disk_is_told(how: str, tmp_path: Path) -> None:
    environment = {"CLOZE_FOLDER": str(tmp_path), "CLOZE_HOW": how}
    [done] = spawn(1, log_until_the_disk_is_full, environment=environment)
    assert done.code == 0, done.errors
    path = tmp_path if how == "tensorboard" else tmp_path / METRICS
    assert done.result.startswith(f"{path}: cannot be written: File too large")
    assert how == "tensorboard" or done.output + done.errors == "", "beside what TensorBoard's thread prints"
    cut_metrics(tmp_path / METRICS, 100_000)
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(len(read_lines(tmp_path))))


KINDS = ("step", "evaluation")


def write(folder: Path, records: list[dict[str, Any]], torn: bytes = b"") -> Path:
    (folder / METRICS).write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + torn)
    return folder / METRICS


def step(number: int, loss: float | None = 5.0, **more: object) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss, **more}


def curve_of(path: Path) -> list[tuple[int, float]]:
    return [(logged.step, logged.figures["loss"]) for logged in read_step_records(path)]


def test_an_evaluation_is_found_beyond_the_last_lines(tmp_path: Path) -> None:
    evaluation = {"kind": "evaluation", "step": 7, "masked_loss": 6.0}
    path = write(tmp_path, [evaluation, *(step(number, filler="x" * 500) for number in range(8, 2000))])
    assert read_newest_records(path, KINDS) == {"step": step(1999, filler="x" * 500), "evaluation": evaluation}


DAMAGED = b'garbage\n[1, 2]\n\n{"kind": "step", "step": 3, "loss": null}\n'


@pytest.mark.parametrize(
    ("torn", "last"),
    [
        (b'{"kind": "step", "st', step(2, 6.0)),
        (b"\0\0\0\0", step(2, 6.0)),
        (b'{"kind": "step", "step": 3, "loss": 1.0}', step(2, 6.0)),
        (b"\xff", step(2, 6.0)),
        (DAMAGED, step(3, None)),
    ],
)
def test_lines_half_written_or_damaged_and_losses_that_are_none_count_for_nothing(
    torn: bytes, last: dict[str, Any], tmp_path: Path
) -> None:
    """Of steps that were done again the last counts; an empty file has none."""
    path = write(tmp_path, [step(1, 7.0), step(2, 9.0), step(2, 6.0)], torn)
    assert (read_newest_records(path, KINDS), curve_of(path)) == ({"step": last}, [(1, 7.0), (2, 6.0)])
    path = write(tmp_path, [])
    assert (read_newest_records(path, KINDS), curve_of(path)) == ({}, [])


@pytest.mark.parametrize("pairs", [True, False])
def test_losses_stand_beside_those_of_validation(pairs: bool) -> None:
    more = {"next_loss": 0.5, "loss_scale": None} if pairs else {"loss_scale": None}
    records = [{"step": step, "masked_loss": 9.0 - step / 20, **more} for step in range(1, 101)]
    records.append({**records[-1], "step": 101, "masked_loss": float("nan")})
    trained = [*map(Logged.from_record, records)]
    figure = draw_chart(trained, [trained[49], trained[99]], "mini $", list_loss_curves())
    figure.canvas.draw()
    assert [axes.get_ylabel() for axes in figure.axes] == ["masked-word loss", "next-sentence loss"][: 1 + pairs]
    raw, smoothed, validation = figure.axes[0].lines
    assert np.asarray(raw.get_ydata()).tolist() == [9.0 - step / 20 for step in range(1, 101)]
    assert len(np.asarray(smoothed.get_ydata())) == 100
    assert (np.asarray(validation.get_xdata()).tolist(), validation.get_label()) == ([50.0, 100.0], "validation")


def test_phases_of_other_lengths_have_lines_of_their_own(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the losses nor their average go on from one to the next; its length stands above each."""
    records = [{"step": step, "phase": 1 + (step > 150), "masked_loss": 9.0 - step // 151} for step in range(1, 301)]
    trained = [*map(Logged.from_record, records)]
    [axes] = draw_chart(trained, trained[99::50], "mini", {"masked_loss": "loss"}, [128]).axes
    values = [{*np.asarray(line.get_ydata())} for line in axes.lines]
    assert values == [{9.0}] * 3 + [{8.0}] * 3, "raw, smoothed and validation of each phase"
    assert [text.get_text() for text in axes.texts] == ["length 128", "phase 2"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training, smoothed", "validation"]
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, _: drawn.append(figure))
    figures.draw_losses(straight, list_loss_curves())
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["length 32", "length 64"]


def test_labels_of_phases_stand_apart_and_within_the_plot() -> None:
    """And a phase with one record, of training or of validation, can be seen."""
    ends, records = (0, 9000, 9300, 9500, 9600), []
    for phase, (begin, end) in enumerate(itertools.pairwise(ends), 1):
        records += [{"step": step, "phase": phase, "masked_loss": 9.0} for step in range(begin + 50, end + 1, 50)]
    records.append({"step": 9610, "phase": 5, "masked_loss": 9.0})
    scored = Logged.from_record({"step": 9620, "phase": 6, "masked_loss": 9.0})
    figure = draw_chart([*map(Logged.from_record, records)], [scored], "", {"masked_loss": "loss"})
    figure.canvas.draw()
    [axes] = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == ["phase 1", "phase 2"]
    assert boxes[0].x1 < boxes[1].x0 < boxes[1].x1 < axes.bbox.x1
    shown = [[*np.asarray(line.get_xdata())] for line in axes.lines if line.get_marker() not in ("", "None")]
    assert shown == [[9610], [9620]]


def test_lines_of_progress_come_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, and then where nothing was printed for 5 seconds, 10, 20, 40, and at last for a minute."""
    numbers = {7.4: "7", 999: "999", 12345: "12.3k", 4.561e6: "4.56M", 123.4e9: "123G"}
    assert [*map(format_number, numbers)] == [*numbers.values()]
    output, now = io.StringIO(), 1000.0
    monkeypatch.setattr("pretraining.reporting.run_log.time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    with open_log(tmp_path, Console(file=output)) as log:
        log.show(describe_progress(0, 300, 10, None, None))  # nothing is known yet
        for second in range(1, 301):
            now = 1000.0 + second
            log.show(describe_progress(second, 300, 10, 12_345.0, 75.0))
            if second == 200:
                log.write(RECORD)  # a line too
    lines = output.getvalue().splitlines()
    assert lines[0] == "  1/300  12.3k pieces/s  1 m 15 s left  losses follow at step 10"
    steps = [int(line.partition("/")[0]) for line in lines]
    assert steps == [1, 6, 16, 36, 76, 136, 196, 12000, 260]
