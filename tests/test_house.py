"""The conventions of the house: floors, wings, folders, and modules that say what they are for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = ["data_prep", "pretraining", "finetuning", "benchmarks", "cluster"]
FOLDERS = {*FLOORS, "docs", "tests", ".ci", ".git"}
WINGS = {
    "data_prep": [
        ["shard", "verify", "show", "fetch"],
        ["pipeline"],
        ["forecast"],
        ["readers", "examples", "fetching", "inspection"],
        ["vocabulary"],
        ["running"],
        ["work"],
        ["settings", "shards"],
        ["common"],
    ],
    "pretraining": [
        ["train", "export"],
        ["training"],
        ["checkpoint"],
        ["engine", "planning"],
        ["data", "config", "huggingface"],
        ["reporting", "processes", "model"],
    ],
    "finetuning": [
        ["run_glue", "run_squad", "run_swag", "run_ner", "run_task", "predict", "evaluate_squad", "compare", "fetch"],
        ["session", "prediction", "fetching", "reference"],
        ["running"],
        ["tasks", "model"],
        ["files", "inputs", "settings"],
        ["ragged", "places", "scale"],
    ],
}
"""The wings of a floor of the house, from above: imports fall."""


def sources() -> list[Path]:
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, with their dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_the_floors_only(path: Path) -> None:
    floor = FLOORS.index(path.relative_to(ROOT).parts[0])
    found = {name.partition(".")[0] for name in imports(path)}
    assert not found & {*FLOORS[floor + 1 :], "tests"}
    if floor == 0:
        assert not found & {"torch", "deepspeed", "transformers"}


def wing(module: Sequence[str]) -> str:
    """The wing of a module, given as the parts of its name; a file at a floor's root is a wing by itself."""
    return module[1] if len(module) > 1 else ""


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_fall_from_wing_to_wing(path: Path) -> None:
    """No wing imports one above it, nor its neighbour on the same floor."""
    floor, *_ = module = path.relative_to(ROOT).with_suffix("").parts
    heights = {name: height for height, names in enumerate(reversed(WINGS.get(floor, []))) for name in names}
    own = wing(module)
    if own in ("", "__init__") or floor not in WINGS:
        return
    assert own in heights, f"{path}: a wing without a floor; give it one in WINGS, and in CONTRIBUTING.md"
    others = {wing(name.split(".")) for name in imports(path) if name.startswith(f"{floor}.")} - {own}
    assert not {other for other in others if heights[other] >= heights[own]}


def test_preparing_data_loads_no_torch() -> None:
    entries = ", ".join(f"data_prep.{name}" for name in ("shard", "verify", "show", "fetch"))
    code = f"import sys, {entries}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_there_is_no_unknown_folder() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in tracked.stdout.splitlines() if "/" in name} <= FOLDERS


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    if path.read_text().strip():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree)


LOOKED_FOR = {"kernels", "apex", "triton", "flash_attn", "accelerate", "datasets", "peft", "mpi4py"}
"""Packages that torch, transformers and DeepSpeed use where they find them, installed here or not."""


def script_folders() -> list[Path]:
    """Where scripts lie that a user starts."""
    return sorted({path.parent for path in sources() if "__main__" in path.read_text()})


@pytest.mark.parametrize("folder", script_folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_hides_a_package(folder: Path) -> None:
    """A script's own folder comes first on the path: `random.py` would break NumPy, `kernels.py` transformers."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not names & {*LOOKED_FOR, *sys.stdlib_module_names}
    assert not [name for name in names if PathFinder.find_spec(name, installed)]
