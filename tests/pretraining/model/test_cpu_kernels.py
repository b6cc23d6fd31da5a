"""The library of CPU kernels that is loaded is whole and nobody else's; and products whose operands it turns around."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import has_compiler
from support.pretraining_reference import gradient, mean_loss, random_batch

from data_prep.common.private_folders import cache_home
from pretraining.model import cpu_kernels as kernels
from pretraining.model import losses, products
from pretraining.model.products import multiply, multiply_and_pass, pad_to_tiles, transpose, weight_gradient
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model

pytestmark = pytest.mark.skipif(kernels.find_compiler() is None, reason="no C++ compiler")
COMPILER = kernels.find_compiler() or ""
ARM = "aarch64-linux-gnu-g++"


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a library was built; each is a copy of the one that this process has, which takes no time."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    made = list[Path]()
    kernels._functions()
    original = cache_home() / "cloze" / kernels._name_library(COMPILER)

    def build(_: str, work: Path) -> Path:
        made.append(work)
        (work / "kernels.so").write_bytes(original.read_bytes()[: -kernels.CHECKSUM_SIZE])
        return work / "kernels.so"

    monkeypatch.setattr(kernels, "_build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return made


@pytest.mark.parametrize("size", [0, 1, 9000, -1])
def test_a_part_of_a_library_is_built_again(builds: list[Path], tmp_path: Path, size: int) -> None:
    """The system ends who runs a part of a library with a bus error, and would at each start."""
    assert kernels._load_library(COMPILER).kernels
    [library] = (tmp_path / "cloze").iterdir()
    whole = library.read_bytes()
    library.unlink()  # this process runs it
    library.write_bytes(whole[:size])
    library.chmod(0o700)
    assert kernels._load_library(COMPILER).kernels
    assert (library.read_bytes() == whole, len(builds)) == (True, 2)


def test_there_is_a_library_for_each_processor(builds: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Which a home folder may serve by turns. The compiler writes elsewhere: of a full home it would only say that it
    failed, and nothing would be built."""
    for processor, count in (("one", 1), ("one", 1), ("another", 2)):
        monkeypatch.setattr(kernels, "_read_processor", lambda name=processor: name)
        assert kernels._load_library(COMPILER).kernels
        assert len(builds) == len([*(tmp_path / "cloze").iterdir()]) == count
    assert not any(work.is_relative_to(tmp_path / "cloze") for work in builds)


def test_a_home_that_cannot_be_written(builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernels._load_library(COMPILER).kernels
    folder = tmp_path / f"cloze-{os.geteuid()}"
    assert (folder.stat().st_mode & 0o777, len([*folder.iterdir()]), len(builds)) == (0o700, 1, 1)


@pytest.mark.parametrize("planted", ["folder", "library", "another user's"])
def test_a_library_that_others_may_have_planted_is_not_loaded(
    builds: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], planted: str
) -> None:
    folder = tmp_path / "cloze"
    library = folder / kernels._name_library(COMPILER)
    assert kernels._load_library(COMPILER).kernels
    inode = library.stat().st_ino
    (folder if planted == "folder" else library).chmod(0o777)
    if planted == "another user's":
        if os.geteuid():
            pytest.skip("only root gives files away")
        library.chmod(0o755)
        os.chown(library, 12345, -1)
    assert kernels._load_library(COMPILER).kernels
    assert len(builds) == 2
    assert not builds[-1].exists()
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / 'cloze'}")
    assert line.endswith(f"; the kernels for CPUs are kept in {tmp_path}/cloze-{os.geteuid()}")
    assert library.stat().st_ino == inode


@pytest.mark.parametrize(("mode", "cache"), [(0o1777, "cache"), (0o777, "cache"), (0o777, "file")])
def test_nothing_is_compiled_where_others_can_rename_it(
    builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, cache: str
) -> None:
    """Nor is the library kept there if the user has no cache."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    library = kernels._load_library(COMPILER)
    assert library.kernels
    assert any(work.is_relative_to(temporary) for work in builds) == (mode == 0o1777)
    assert not Path(library._name).is_relative_to(temporary)


def test_the_words_of_a_compiler_that_fails_are_told_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env no-such-compiler")
    with pytest.warns(UserWarning, match="will be slow: env: "):
        assert kernels._functions.__wrapped__() == {}


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = tmp_path / "my tools" / "wrapper"
    spaced.parent.mkdir()
    spaced.write_text('#!/bin/sh\necho "$TMPDIR" > "$0.tmp"\nexec "$@"\n')
    spaced.chmod(0o755)
    plain = shutil.which("g++") or COMPILER
    monkeypatch.setenv("CXX", f"'{spaced}' {plain} -O1")
    assert kernels.find_compiler() == f"'{spaced}' {plain} -O1"
    names = {kernels._name_library(compiler) for compiler in (plain, f"'{spaced}' {plain}", f"'{spaced}' {plain} -O1")}
    assert len(names) == 3, "arguments decide what is built"
    monkeypatch.setattr(kernels, "MAIN_SOURCE", tmp_path / "small.cpp")
    kernels.MAIN_SOURCE.write_text("int small = 1;\n")
    assert kernels._build(kernels.find_compiler() or "", tmp_path).exists()
    assert Path(f"{spaced}.tmp").read_text() == f"{tmp_path}\n", "the compiler's temporary files lie there too"


@pytest.mark.kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
def test_a_compiler_may_be_told_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this machine can compute as a processor with AVX2 alone does."""
    monkeypatch.setattr(kernels, "MAIN_SOURCE", tmp_path / "small.cpp")
    kernels.MAIN_SOURCE.write_text("#if !defined(__AVX2__) || defined(__AVX512F__)\n#error another\n#endif\n")
    assert kernels._build("g++ -march=x86-64-v3", tmp_path).exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(ARM), reason=f"{ARM} is not installed")
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.2-a+bf16", "armv9-a"])
def test_the_kernels_compile_for_arm(processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert kernels._build(f"{ARM} -march={processor}", tmp_path).exists()


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a processor that multiplies tiles, and for sizes at which turning pays."""
    monkeypatch.setattr(kernels, "small_products", lambda: "tiles")
    monkeypatch.setattr(kernels, "has_tiles", lambda: True)
    monkeypatch.setattr(products, "is_worth_transposing", lambda *_: True)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.kernels
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 200), width=st.integers(1, 200))
def test_a_matrix_is_turned_whatever_its_sizes(rows: int, width: int) -> None:
    x = numbers(rows, width)
    x[0, -1], x[-1, 0] = torch.nan, torch.inf
    assert torch.equal(transpose(x).view(torch.int16), x.t().contiguous().view(torch.int16))
    assert torch.equal(transpose(x.t()).view(torch.int16), x.view(torch.int16))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 32), (32, 96), (64, 64)])
def test_a_weight_gets_the_gradient_of_the_plain_product(outputs: int, inputs: int) -> None:
    grad, x = numbers(100, outputs), numbers(100, inputs, seed=1)
    wanted = grad.double().t() @ x.double()
    found = weight_gradient(grad, x)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=0.02)


@pytest.mark.usefixtures("tiles")
def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(32, 16).requires_grad_(), numbers(64, 16)
    monkeypatch.setattr(products, "weight_gradient", None)
    (found,) = torch.autograd.grad(multiply(x, weight).sum(), [x])
    assert torch.equal(found, torch.ones(32, 64, dtype=torch.bfloat16) @ weight)
    with torch.no_grad():
        assert torch.equal(multiply(x, weight), F.linear(x, weight))


@pytest.mark.kernels
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rows", [1, 16, 39])
@pytest.mark.parametrize("operation", ["product", "loss"])
def test_rows_that_fill_a_tile_change_nothing(operation: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [each.requires_grad_() for each in (numbers(rows, 32), numbers(64, 32, seed=1), numbers(64, seed=2))]
    hidden, weight, bias = leaves
    assert len(pad_to_tiles(hidden)) == -(-rows // 16) * 16

    def compute(product: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        if operation == "product":
            out = product(hidden, weight)
            return [out, *torch.autograd.grad(out, leaves[:2], numbers(rows, 64, seed=2))]
        loss, right = losses.masked_loss(hidden, weight, bias, torch.arange(rows) % 60, 60)
        return [loss, right, *torch.autograd.grad(loss, leaves)]

    found = compute(multiply)
    monkeypatch.setattr(losses, "pad_to_tiles", lambda x: x)
    for ours, plain in zip(found, compute(F.linear), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-7, atol=0.05 if operation == "product" else 0.02)


@pytest.mark.kernels
def test_a_model_learns_the_same_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    # heads of 16 are too narrow for tiles and lanes, so that attention is the same
    shape = Shape(vocabulary=100, layers=2, hidden=64, heads=4, intermediate=256, positions=64)
    batch = random_batch((40, 7, 64), 100)
    monkeypatch.setattr(products, "is_worth_transposing", lambda *_: True)
    found = []
    for ways in (None, "lanes", "tiles"):
        monkeypatch.setattr(kernels, "small_products", lambda ways=ways: ways)
        monkeypatch.setattr(kernels, "has_tiles", lambda ways=ways: ways == "tiles")
        model = build_model(shape).initialize(0).bfloat16()
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(gradient(each).float() for each in model.parameters())])
    for plain, *turned_around in zip(*found, strict=True):
        for ours in turned_around:
            torch.testing.assert_close(ours, plain, rtol=2**-7, atol=2**-8 * float(plain.abs().max()))


def test_a_processor_whose_tiles_linux_forbids_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_functions", lambda: {"attention_by_tiles_bfloat16": None})
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert not kernels.has_tiles.__wrapped__()


@pytest.mark.usefixtures("tiles")
def test_the_weight_learns_from_the_gradient_as_it_came() -> None:
    """Also where the product and what goes past it get one and the same gradient, which the sum replaces."""
    x, weight, slope = numbers(32, 64).requires_grad_(), numbers(64, 64, seed=1).requires_grad_(), numbers(32, 64)
    out, past = multiply_and_pass(x, weight)
    found = torch.autograd.grad(out + past, [x, weight], slope.clone())
    wanted = torch.autograd.grad(F.linear(x, weight) + x, [x, weight], slope)
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-6, atol=0.1)


@pytest.mark.usefixtures("tiles")
def test_weights_of_another_type_are_left_to_torch() -> None:
    x, weight = numbers(5, 16), torch.randn(64, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        multiply(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


@pytest.mark.usefixtures("tiles")
def test_a_product_may_be_changed_in_place_whatever_its_rows() -> None:
    for rows in (5, 16):
        out = multiply(numbers(rows, 16).requires_grad_(), numbers(64, 16))
        out.add_(1)
