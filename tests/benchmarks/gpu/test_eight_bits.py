"""A layer's products in FP8 are those in bf16 but for rounding, and what a GPU without them costs is one line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks.gpu import eight_bits
from benchmarks.gpu.eight_bits import PRODUCTS, EightBits, error_of, make_operands, rounded
from data_prep.common.files import read_json

CPU = torch.device("cpu")


@pytest.mark.parametrize("product", PRODUCTS)
def test_all_three_products_are_those_in_bf16(product: str) -> None:
    """Numbers of three and two binary digits are each up to 6 and 12% away; their sums are closer."""
    operands = make_operands(64, 32, product, CPU)
    assert 0 < error_of(operands) < 0.1
    wrong = operands._replace(weight=operands.weight.flip(0))
    straight, across = eight_bits.round_all(operands)
    other, _ = eight_bits.round_all(wrong)
    mixed = eight_bits.products_in_fp8(straight._replace(weight=other.weight), across)[0].float()
    right = eight_bits.products_in_bf16(operands)[0].float()
    assert (mixed - right).norm() > 0.5 * right.norm(), "the test can fail"


def test_the_largest_value_is_kept() -> None:
    tensor = torch.tensor([[1.0, -3000.0], [0.5, 2.0]])
    eight = rounded(tensor, torch.float8_e4m3fn)
    assert float(eight.values.float().min() * eight.scale) == pytest.approx(-3000.0)


def test_the_command_compares_widths(tmp_path: Path) -> None:
    out, said = tmp_path / "out.json", io.StringIO()
    eight_bits.measure(EightBits(widths=(16,), pieces=32, out=out), Console(file=said, width=120))
    found = read_json(out)["widths"]["16"]
    assert {*found["products"]} == {*PRODUCTS}
    for each in (*found["products"].values(), found["layer"]):
        for ratio in each["times_as_fast"].values():
            assert 0 < ratio["lowest"] <= ratio["median"] <= ratio["highest"]
    assert "the layer" in said.getvalue()


def test_a_gpu_without_such_products_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "explain_no_fp8", lambda device: "NVIDIA V100 has no products in FP8")
    said = io.StringIO()
    eight_bits.measure(EightBits(out=tmp_path / "out.json"), Console(file=said))
    assert said.getvalue() == "NVIDIA V100 has no products in FP8\n"
    assert read_json(tmp_path / "out.json")["widths"] == {"absent": "NVIDIA V100 has no products in FP8"}


def test_sizes_that_no_kernel_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    errors = mistake_of(EightBits, eight_bits.measure, ["--widths", "100"], capsys)
    assert errors == "error: --widths and --pieces: multiples of 16, which products in FP8 need\n"
