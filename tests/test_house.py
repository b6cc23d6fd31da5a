"""The conventions of the house: floors, wings, folders, and modules that say what they are for."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from conftest import ROOT
from support.breaks import read_table

FLOORS = ["data_prep", "pretraining", "finetuning", "benchmarks", "cluster"]
FOLDERS = {*FLOORS, "docs", "tests", ".ci", ".git"}
WINGS = {
    "data_prep": "shard verify show fetch pairs / pipeline / readers examples fetching inspection / "
    "near_copies origins / vocabulary / running / work / shards / arrow_files seals / settings / common",
    "pretraining": "train export evaluate / training / scoring / checkpoint / engine planning / config "
    "huggingface / data / objectives optimizers / architectures / answering / model / mesh / reporting processes / "
    "devices flags",
    "finetuning": "run_glue run_squad run_swag run_ner run_task run_pairs predict evaluate_squad compare fetch / "
    "server / vectors / session prediction / flags / running / tasks model averages / "
    "files inputs settings / results scale",
}
"""The wings of a floor of the house, from above, neighbours between slashes: imports fall."""


def sources() -> list[Path]:
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(parse(path))]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()}


@cache
def imports_of(path: Path) -> set[str]:
    """All modules that a file imports, wherever in it: in functions and for types too."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= MODULES.keys() else {node.module, *(names & MODULES.keys())}
    return found


def test_imports_point_down_the_floors_only() -> None:
    climbing: dict[str, set[str]] = {}
    for path in sources():
        floor = FLOORS.index(path.relative_to(ROOT).parts[0])
        found = {name.partition(".")[0] for name in imports_of(path)}
        wrong = found & {*FLOORS[floor + 1 :], "tests", *(() if floor else ("torch", "deepspeed", "transformers"))}
        climbing |= {shown(path): wrong} if wrong else {}
    assert climbing == {}


def wing(module: Sequence[str]) -> str:
    """The wing of a module, given as the parts of its name; a file at a floor's root is a wing by itself."""
    return module[1] if len(module) > 1 else ""


def test_imports_fall_from_wing_to_wing() -> None:
    """No wing imports one above it, nor its neighbour on the same floor; each has its place in WINGS."""
    climbing: dict[str, set[str]] = {}
    for path in sources():
        floor, *_ = module = path.relative_to(ROOT).with_suffix("").parts
        lines = reversed(WINGS.get(floor, "").split("/"))
        heights = {name: height for height, names in enumerate(lines) for name in names.split()}
        own = wing(module)
        if own not in ("", "__init__") and floor in WINGS:
            others = {wing(name.split(".")) for name in imports_of(path) if name.startswith(f"{floor}.")} - {own}
            wrong = {other for other in others if heights.get(other, 99) >= heights.get(own, -1)}
            climbing |= {shown(path): wrong} if wrong or own not in heights else {}
    assert climbing == {}


def test_there_are_no_circles_of_imports() -> None:
    """Nor of those that are made in functions, or for types alone."""
    graph = {module: imports_of(path) for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_nobody_compares_the_names_of_what_declares_itself() -> None:
    """Whoever asks, asks what objectives, optimizers and architectures declare."""
    rooms = [ROOT / "pretraining" / room for room in ("objectives", "optimizers", "architectures")]
    names = {path.stem for room in rooms for path in room.glob("*.py")} - {"__init__", "declaration", "weights"}
    assert {"mlm", "lamb", "bert"} <= names
    comparing = []
    for path in sources():
        if path.parent in rooms and path.stem in names:
            continue
        for node in nodes_of(path):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [key for key in node.keys if key] if isinstance(node, ast.Dict) else []
            compared += [node.value] if isinstance(node, ast.MatchValue) else []
            if {each.value for each in compared if isinstance(each, ast.Constant)} & names:
                comparing.append(f"{shown(path)}: {ast.unparse(node)}")
    assert comparing == []


def test_preparing_data_loads_no_torch() -> None:
    """Nor does the help of a command of pre-training."""
    entries = ", ".join(f"data_prep.{name}" for name in ("shard", "verify", "show", "fetch", "pairs"))
    code = f"import sys, pretraining.flags, {entries}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_there_is_no_unknown_folder() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in tracked.stdout.splitlines() if "/" in name} <= FOLDERS


def test_every_module_says_what_it_is_for() -> None:
    assert [shown(path) for path in sources() if parse(path).body and not ast.get_docstring(parse(path))] == []


RIDDLES = set(
    "of told said kept made asked shown own found joined given taken left seen written known named done drawn begun "
    "ended used held heard meant wanted tried counted added cut at on".split()
)


def test_functions_are_named_by_a_verb_and_a_noun() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    named = [(path, node) for path in sources() for node in nodes_of(path) if isinstance(node, functions)]
    assert [f"{shown(path)}:{node.lineno} {node.name}" for path, node in named if node.name in RIDDLES] == []


def test_classes_of_two_things_have_two_names() -> None:
    classes = ((node.name, path) for path in sources() for node in parse(path).body if isinstance(node, ast.ClassDef))
    places: dict[str, list[str]] = {}
    for name, path in classes:
        places.setdefault(name, []).append(shown(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_break_of_a_promise_still_fits_the_product() -> None:
    """The table of tests/support/breaks.py, which `make breaks` tries out: each text is there once, with its tests."""
    for name, each in read_table().items():
        assert (ROOT / each.file).read_text().count(each.old) == 1, name
        assert all((ROOT / "tests" / test.split("::")[0]).is_file() for test in each.tests.split()), name


LOOKED_FOR = {"kernels", "apex", "triton", "flash_attn", "accelerate", "datasets", "peft", "mpi4py"}
"""Packages that torch, transformers and DeepSpeed use where they find them, installed here or not."""


def test_no_module_hides_a_package() -> None:
    """A script's own folder comes first on the path: `random.py` would break NumPy, `kernels.py` transformers."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    known = {*LOOKED_FOR, *sys.stdlib_module_names}
    hiding = []
    for folder in sorted({path.parent for path in sources() if "__main__" in path.read_text()}):
        beside = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        hiding += [shown(path) for path in beside if path.stem in known or PathFinder.find_spec(path.stem, installed)]
    assert hiding == []
