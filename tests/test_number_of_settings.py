"""How many settings users can meet: flags, keys of recipes and environment variables. Their number may fall."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from support.processes import run_program
from test_entries import ENTRIES, STANDARD_LIBRARY_ALONE, name

MOST = 360
"""Settings at most, each flag counted once for every command that takes it."""
FLAG = re.compile(r"^ +(?:-\w, )?(--[a-z][\w-]*)", re.MULTILINE)
SUBCOMMAND = re.compile(r"^  fetch.py (\w+) --help", re.MULTILINE)
KEY = re.compile(r"^(?:## \[+([\w.]+)\]+|\| `(\w+)` \|)", re.MULTILINE)
"""The title of a section in a page of recipes, or the row of a key."""
VARIABLE = re.compile(r"\bCLOZE_[A-Z_]*[A-Z]\b")
READ_BY = [ROOT / each for each in ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster")]


def read_helps(folder: Path) -> dict[str, str]:
    """Reads all that each command says of its flags."""
    found = {}
    for path in ENTRIES:
        if path.name == "worker.py":  # which run.py starts with its own flags
            continue
        text = run_program(str(path), ["--help" if path.name == "submit.py" else "--help-all"], folder).output
        more = [run_program(str(path), [each, "--help-all"], folder).output for each in SUBCOMMAND.findall(text)]
        found[name(path)] = "\n".join([text, *more])
    return found


def list_flags(text: str) -> list[str]:
    """Lists the flags in the help of a command."""
    return sorted({*FLAG.findall(text)} - {"--help", "--help-all"})


def list_keys() -> dict[str, list[str]]:
    """Lists the keys of recipes by their page, which is written from the declared settings."""
    found: dict[str, list[str]] = {}
    for page in ("recipes.md", "finetuning-recipes.md"):
        section = ""
        for title, key in KEY.findall((ROOT / "docs" / page).read_text()):
            section = f"{title}." if title else section
            found.setdefault(page, []).extend([f"{section}{key}"] if key else [])
    return found


def list_variables() -> list[str]:
    """Lists the environment variables of this project that its code reads."""
    paths = (path for folder in READ_BY for path in folder.rglob("*") if path.suffix in (".py", ".sh", ".slurm"))
    return sorted({each for path in paths for each in VARIABLE.findall(path.read_text())})


def find_pages(setting: str) -> str:
    """Names the pages and recipes that have a setting, by its last word."""
    paths = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *(each for top in READ_BY for each in top.rglob("recipes/*.toml")),
    ]
    word = re.compile(rf"(?<![\w-]){re.escape(setting.rpartition('.')[2])}(?![\w-])")
    return " ".join(sorted(path.name for path in paths if word.search(path.read_text())))


def print_settings(settings: Mapping[str, list[str]]) -> None:
    """Prints the settings of each command or page, with the pages and recipes that use them."""
    for where, each in settings.items():
        print(f"{len(each):4}  {where}", *(f"      {setting}  {find_pages(setting)}" for setting in each), sep="\n")


@pytest.mark.slow
def test_the_settings_grow_no_more_and_each_command_explains_its_own(tmp_path: Path) -> None:
    """`pytest -sm slow` prints them, with the pages that use them. A help names a page, and a flag has one default."""
    helps = read_helps(tmp_path)
    flags = {path: list_flags(text) for path, text in helps.items()}
    settings = {**flags, **list_keys(), "environment": list_variables()}
    print_settings(settings)
    assert sum(map(len, settings.values())) <= MOST
    for path, text in helps.items():
        pages = re.findall(r"docs/[\w-]+\.md", text)
        assert pages or name(ROOT / path) in STANDARD_LIBRARY_ALONE, path
        assert all((ROOT / page).is_file() for page in pages), path
        each = re.split(r"\n +(?=--)", text)
        assert not [flag for flag in each if flag.count("(default") > 1], path
