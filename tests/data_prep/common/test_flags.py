"""Flags of commands: their help, and those that there were once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
import tyro
from support.commands import assert_refusal

from data_prep.common.flags import Heading, Shown, make_help, read_flags, read_flags_and_rest, read_subcommand
from data_prep.common.sections import Removed


@dataclass(frozen=True)
class Sorting:
    """Sorts files."""

    removed: ClassVar[dict[str, Removed]] = {
        "sides": Removed((1, 2.0), "two sides are sorted best"),
        "fast": Removed(True, "it costs nothing"),
        "slow": Removed(None, "use --kind stable"),
    }
    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """What is sorted."""
    out: Annotated[Path | None, Heading("The result")] = None
    """Where it goes (default: nowhere)."""
    kind: Annotated[Literal["stable", "quick"], Shown.SELDOM] = "quick"
    """How."""
    threads: int = 2
    """How many
    threads."""


HELP = """\
usage: sort.py [FILES] [flags]

Sorts files.

Arguments
  FILES                 What is sorted.

The result
  --out PATH            Where it goes (default: nowhere).

Flags
  --threads N           How many threads. (default: 2)

--help-all shows 1 more.
docs/sorting.md explains them."""


def test_the_help_has_groups_and_one_default_a_flag() -> None:
    assert make_help(Sorting, "sort.py", "sorting") == HELP
    everything = make_help(Sorting, "sort.py", "sorting", everything=True)
    assert "  --kind stable|quick   How. (default: quick)\n" in everything
    assert "--help-all" not in everything


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all"])
def test_the_help_is_printed_wherever_it_is_asked(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_flags(Sorting, ["--threads", "3", word], "sort.py", "sorting")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: sort.py")


@pytest.mark.parametrize("given", [["--sides", "1", "2", "--fast"], ["--sides=1.0 2", "--fast=True"]])
def test_a_flag_of_earlier_is_taken_with_the_value_of_now(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert read_flags(Sorting, [*given, "--threads=3"], "sort.py", "sorting") == Sorting(threads=3)
    sides, fast = given[0].partition("=")[2] or " ".join(given[1:3]), " True" * ("=" in given[-1])
    always = "is no longer a setting: this value always applies"
    assert capsys.readouterr().err.splitlines() == [f"--sides {sides}: {always}", f"--fast{fast}: {always}"]


def test_a_flag_of_earlier_takes_its_own_words_alone() -> None:
    for before in (["--fast"], ["--sides", "1", "2"]):
        assert read_flags(Sorting, [*before, "a.txt"], "sort.py", "sorting") == Sorting((Path("a.txt"),))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sides", "1", "3"], "^--sides 1 3: is no longer a setting; it is always 1 2: two sides are sorted best$"),
        (["--fast", "false"], "^--fast false: is no longer a setting; it is always true: it costs nothing$"),
        (["--slow"], "^--slow: is no longer a setting: use --kind stable$"),
    ],
)
def test_another_value_is_refused_with_the_reason(given: list[str], said: str) -> None:
    read: Callable[..., object] = read_flags_and_rest
    assert_refusal(said, read, Sorting, [*given, "--threads", "3"], "sort.py", "sorting")


def test_a_kind_of_flags_is_named_first(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"files": Sorting}
    assert read_subcommand(kinds, ["files", "--threads", "4"], "sort.py", "sorting").threads == 4
    assert_refusal("^lines: there is files; ", read_subcommand, kinds, ["lines"], "sort.py", "sorting")
    with pytest.raises(SystemExit):
        read_subcommand(kinds, [], "sort.py", "sorting")
    assert "\n  sort.py files --help  Sorts files.\n" in capsys.readouterr().out
