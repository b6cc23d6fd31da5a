"""The weight of the house in lines of code: it may fall, and no change adds to it unnoticed."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from conftest import ROOT

PRODUCT = ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster")
MOST_PRODUCT, MOST_TESTS = 38_743, 37_896
"""Lines that product and tests have at most. A change that takes some away lowers these numbers with it."""
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


def count_code(source: bytes) -> int:
    """Counts the lines of a module that have code: no docstrings, comments or blank lines."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "body", None), list))
    texts = (each for node in nodes for each in node.body if isinstance(each, ast.Expr))  # type: ignore[attr-defined]
    docstrings = {
        line
        for text in texts
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.tokenize(io.BytesIO(source).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


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


def test_the_house_grows_no_heavier() -> None:
    """`pytest -s` prints the wings."""
    wings = {name: weigh(ROOT / name) for name in (*PRODUCT, "tests")}
    for name, parts in wings.items():
        print(f"{parts.total():7,}  {name:12}", *(f"{wing} {lines:,}" for wing, lines in parts.most_common()))
    assert sum(wings[name].total() for name in PRODUCT) <= MOST_PRODUCT
    assert wings["tests"].total() <= MOST_TESTS
