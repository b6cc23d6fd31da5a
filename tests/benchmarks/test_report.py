"""Results say on which machine they were measured, lose nothing, and make the tables and pictures of docs/."""

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from rich.console import Console
from support.commands import assert_refusal

from benchmarks import measure
from benchmarks.measure import LIMITS, RESULTS, ResultsFile, describe_environment, write_results
from benchmarks.pictures import PICTURES, draw_pictures
from benchmarks.report import PAGES, Report, read_all, report, rewrite
from benchmarks.tables import format_cell, list_ratios, show_contest


def results(benchmark: str = "throughput", **found: Any) -> dict[str, Any]:
    """A file of results."""
    machine = {"hardware": "avx2-2-cores", "processor": "P", "cores": 2, "instruction_sets": ["avx2"]}
    environment = {"date": "2026-11-03", **machine}
    return {"format": 2, "benchmark": benchmark, "environment": environment, **found}


def contest(**more: Any) -> dict[str, Any]:
    """A contest whose sides took no turns, unless more is said."""
    speed = {"median": 10.0, "lowest": 9.0, "highest": 11.0}
    side = {"sequences_per_second": speed, "share_of_ceiling": {"median": 0.5}}
    side |= {"real_pieces_per_second": {"median": 1e3}}
    return {"sequences": 8, "sides": {"cloze": side, "transformers": side}, **more}


def test_the_tables_of_docs_are_those_of_the_results() -> None:
    """Where this fails: python benchmarks/report.py --docs."""
    found = read_all(RESULTS)
    for path in PAGES:
        text = path.read_text()
        assert "<!-- results of " in text
        assert "| no signal |" not in text  # such columns are left out
        assert rewrite(text, found) == text, f"{path.name} is stale: python benchmarks/report.py --docs"
    stale = PAGES[0].read_text().replace("| base at", "| huge at")
    assert rewrite(stale, found) == PAGES[0].read_text()


def test_the_pictures_of_docs_are_those_of_the_results() -> None:
    """Where this fails: python benchmarks/report.py --docs. A picture loads nothing, as it could not on GitHub."""
    kept = {path.name: path.read_bytes() for path in PICTURES.iterdir()}
    assert sum(map(len, kept.values())) < 250_000
    assert not any(re.search(rb"url\([^#]|href=.[^#]|<script", picture) for picture in kept.values())
    locked = (ROOT / "requirements.lock").read_text()
    drawn_by = [f"{name}=={version(name)}" for name in ("matplotlib", "rich")]
    if not all(name in locked for name in drawn_by):
        pytest.skip(f"pictures of {drawn_by} differ from those of requirements.lock")
    assert draw_pictures(read_all(RESULTS)) == kept


def test_a_ratio_is_printed_only_of_sides_in_turns() -> None:
    taken = {"transformers": {"median": 3.0, "lowest": 2.5, "highest": 3.5}}
    turns = contest(times_as_fast_as=taken)
    assert list_ratios(turns) == taken
    assert list_ratios(contest()) == {}
    both = {"cloze fp32": {"transformers fp32": 2.0}, "cloze bf16": {"transformers fp32": 3.0}}
    found = list_ratios({"sides": {"cloze fp32": {}, "transformers fp32": {}}, "times_as_fast": both})
    assert found == {"transformers fp32": 2.0}
    alone = {"sides": {}, "against": {"fp32": {"training": {"cloze_items_per_second": 3.0}}}}
    assert list_ratios(alone) == {}


def test_results_and_contests_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new.json").write_text(json.dumps(results(contests={"base-128": contest(times_as_fast_as={"p": 3.0})})))
    report(Report(tmp_path), Console(width=200))
    shown = capsys.readouterr().out
    assert shown.startswith("2 cores of P (avx2), 3 November 2026 (`new.json`):")
    assert re.search(r"base at 128, 8 sequences +1,000 +50.0% +3\b", shown)
    show_contest(Console(width=200), "base-128", contest(times_as_fast_as={"transformers": {"median": 3.0}}))
    shown = capsys.readouterr().out
    assert re.search(r"transformers +10 +50.0% +1,000", shown)
    assert re.search(r"times as fast *\n *transformers *\n *3\b", shown)


def test_cells() -> None:
    found = [format_cell(value) for value in (None, True, 3, 1234567, 0.123456, 45678.9, 1e-7)]
    assert found == ["", "yes", "3", "1,234,567", "0.123", "45,679", "1e-07"]
    assert format_cell({"median": 0.5, "lowest": 0.25, "highest": 0.75}, "share_of_it") == "50.0% (25.0%–75.0%)"


def test_bad_input_is_told_with_a_cure(tmp_path: Path) -> None:
    assert_refusal(r"has no results; first run python benchmarks/throughput.py", read_all, tmp_path)
    for name, content in (("good", json.dumps(results())), ("a", '{"environment": {}}'), ("b", "{")):
        (tmp_path / f"{name}.json").write_text(content)
    assert_refusal(r"a\.json: no results in format 2(.|\n)*b\.json: cannot be read: Expecting", read_all, tmp_path)


def test_the_gpu_is_named_where_torch_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(name="H200", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert describe_environment(["torch"]).items() >= {"gpu": "H200", "gpu_memory_gib": 141.0}.items()
    assert "gpu" not in describe_environment(["numpy"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in describe_environment(["torch"])


def test_only_a_processor_that_is_limited_in_all_is_named_by_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setenv(name, value)
    limited = describe_environment(["numpy"])
    assert (limited["instruction_sets"], limited["limits"]) == (["avx2"], LIMITS)
    monkeypatch.setenv("CXX", "g++")
    assert_refusal("no name for this limit", describe_environment, ["numpy"])


def test_a_run_that_lacks_a_side_keeps_its_own_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(*sides: str, **more: Any) -> dict[str, Any]:
        contest = {"sides": {side: {"p50_ms": 1.0} for side in sides}}
        return results("inference", **{"models": {"mini": {"1 x 128": contest}}, **more})

    path = tmp_path / "inference-here.json"
    assert write_results(path, measured("ours", "onnxruntime")) == path
    own = write_results(path, measured("ours"))
    assert own != path
    assert "onnxruntime (models, mini, 1 x 128)" in capsys.readouterr().err
    assert json.loads(path.read_text()) == measured("ours", "onnxruntime")
    assert json.loads(own.read_text()) == measured("ours")
    assert write_results(path, measured("ours", "onnxruntime", "another")) == path
    assert read_all(tmp_path).keys() == {path.stem}, "what is partial is on no page"
    for models in ({"mini": dict[str, Any]()}, dict[str, Any]()):
        assert write_results(path, measured("ours", models=models)) == own
        assert "ours (models, mini, 1 x 128)" in capsys.readouterr().err
    write_results(tmp_path / "more", measured("ours", growth=[]))
    write_results(tmp_path / "more", measured("ours"))
    assert "it has growth, which is not measured here" in capsys.readouterr().err
    write_results(tmp_path / "rows", measured("ours", speeds=[{"length": 128}, {"length": 512}]))
    write_results(tmp_path / "rows", measured("ours", speeds=[{"length": 512}]))
    assert "it has row 2 of speeds, which is not measured here" in capsys.readouterr().err
    path.write_text("notes of mine")
    assert write_results(path, measured("ours")) != path
    assert path.read_text() == "notes of mine"


def test_what_is_none_of_ours_is_refused_and_never_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for content in ("", "[]", '{"format": 1, "benchmark": "throughput"}'):
        path.write_text(content)
        assert_refusal(r"found\.json", getattr, ResultsFile("throughput", [], path), "earlier")


def test_a_machine_with_a_part_of_the_history_measures_the_commit_of_its_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the code is that of the wheels; otherwise it is some commit with changes."""
    root = tmp_path / "tree"
    (root / "benchmarks").mkdir(parents=True)
    code = root / "benchmarks" / "one.py"
    code.write_text("1")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(measure, "ROOT", root)
    monkeypatch.setattr(measure, "COMMIT", tmp_path / "commit.txt")
    code.write_text("2")
    old = measure.find_commit()
    (tmp_path / "commit.txt").write_text(f"abcdef {measure.compute_code_digest()}\n")
    assert old.endswith("+")
    assert measure.find_commit() == "abcdef"
    code.write_text("3")
    assert measure.find_commit() == old
