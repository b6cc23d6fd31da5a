"""The weight of the house in lines of code: it may fall, and no change adds to it unnoticed."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

PRODUCT = ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster")
MOST_PRODUCT, MOST_TESTS = 37_880, 36_271
"""Lines that product and tests have at most. A change that takes some away lowers these numbers with it."""
OTHER_LINES = {("*.cpp", "*.h"): 2_217, ("*.sh", "*.slurm"): 761, ("*.html", "*.jinja"): 332}
"""Lines of the product in other languages at most, by the names of their files."""


def count_code(source: bytes) -> int:
    """Counts the lines of a module that have code: no docstrings, comments or blank lines."""
    nodes = [*ast.walk(ast.parse(source))]
    stated = (each for node in nodes if isinstance(getattr(node, "body", None), list) for each in node.body)  # type: ignore[attr-defined]
    texts = (each.value for each in stated if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    docstrings = {line for text in texts if isinstance(text.value, str) for line in list_lines(text)}
    strings = {line for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr)) for line in list_lines(node)}
    lines = enumerate(map(bytes.strip, source.split(b"\n")), 1)
    return len((strings | {number for number, line in lines if line and not line.startswith(b"#")}) - docstrings)


def list_lines(node: ast.Constant | ast.JoinedStr) -> range:
    """Lists the lines of a constant, such as a string of several."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def weigh(folder: Path) -> Counter[str]:
    """Counts the lines of code below a folder, by its wings."""
    found = Counter[str]()
    for path in sorted(folder.rglob("*.py")):
        wing = path.relative_to(folder).parts[0] if path.parent != folder else "."
        found[wing] += count_code(path.read_bytes())
    return found


def test_lines_of_code_are_counted() -> None:
    source = b'"""Two\nlines."""\n\nx = 1  # one\n# none\n\n\ndef f():\n    "None."\n    return (\n        x\n    )\n'
    assert count_code(source) == 5
    assert count_code(b'text = """\n# of a string\n\n"""\n') == 4


def test_the_house_grows_no_heavier() -> None:
    """`pytest -s` prints the wings."""
    wings = {name: weigh(ROOT / name) for name in (*PRODUCT, "tests")}
    for name, parts in wings.items():
        print(f"{parts.total():7,}  {name:12}", *(f"{wing} {lines:,}" for wing, lines in parts.most_common()))
    assert sum(wings[name].total() for name in PRODUCT) <= MOST_PRODUCT
    assert wings["tests"].total() <= MOST_TESTS


def test_files_and_functions_stay_short() -> None:
    """Of a function the lines of its body count: each parameter of a GPU kernel has a line of its own."""
    long = []
    for path in sorted(path for folder in (*PRODUCT, "tests") for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        functions = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef))
        lines = {each.name: (each.end_lineno or 0) - each.body[0].lineno + 1 for each in functions}
        lines = {name: count for name, count in lines.items() if count > 45}
        long += [f"{path}: {lines or ''}"] if lines or len(source.splitlines()) > 400 else []
    assert long == []


@pytest.mark.parametrize("names", OTHER_LINES)
def test_no_weight_hides_in_other_languages(names: tuple[str, str]) -> None:
    paths = [path for folder in PRODUCT for name in names for path in (ROOT / folder).rglob(name)]
    assert sum(len(path.read_bytes().splitlines()) for path in paths) <= OTHER_LINES[names]


def test_pages_stay_short() -> None:
    words = {path.name: len(path.read_text().split()) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
    assert sum(words.values()) - words["CHANGELOG.md"] - words["CONTRIBUTING.md"] <= 30_000
    assert words["CHANGELOG.md"] <= 1_500
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
