"""What a layer asks of a GPU is counted, and stays within what was reckoned."""

from __future__ import annotations

import pytest
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks import operators
from benchmarks.operators import Count, Operators, sides
from pretraining.model.shape import Shape

BOUND = 0.505
"""The share of PyTorch's traffic between products that ours may be. It was a half until an H200 showed that norms are
15% faster backward with more blocks of rows, whose sums are 0.7 U more."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Count]]:
    return sides(Shape.from_size("base", 30_522))


def total(directions: dict[str, Count]) -> float:
    return sum(each.between for each in directions.values())


def test_operations_and_traffic_of_a_layer(found: dict[str, dict[str, Count]]) -> None:
    plain = found["torch's operations"]
    assert (plain["forward"].launches, plain["backward"].launches) == (16, 21)
    assert (plain["forward"].products, plain["backward"].products) == (4, 8)
    assert plain["forward"].between == pytest.approx(41, abs=0.5)
    assert plain["backward"].between == pytest.approx(44, abs=0.5)


def test_our_kernels_ask_less(found: dict[str, dict[str, Count]]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    ours, plain = found["our kernels"], found["torch's operations"]
    assert (ours["forward"].launches, ours["backward"].launches) == (8, 17)
    assert total(ours) < BOUND * total(plain)
    assert total(ours) < total(found["transformers"])


def test_the_counts_do_not_depend_on_the_size(found: dict[str, dict[str, Count]]) -> None:
    large = sides(Shape.from_size("large", 30_522))
    for side, directions in found.items():
        for direction, each in directions.items():
            assert large[side][direction].launches == each.launches
            assert large[side][direction].between == pytest.approx(each.between, abs=0.5)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    operators.measure(Operators(), Console(width=160))
    assert "torch's operations" in capsys.readouterr().out
    assert "--size huge: is none of tiny" in mistake_of(Operators, operators.measure, ("--size", "huge"), capsys)
