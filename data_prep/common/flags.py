"""Reads the flags of a command, and prints its help: the flags that matter, and the others with --help-all."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import tyro
from pydantic import BaseModel

from data_prep.common.errors import UserError
from data_prep.common.sections import Removed, tell_removed

ARGUMENTS = "Arguments"
MARGIN, WIDEST = 24, 100
"""The column where the meanings of flags begin, and the widest line of a help."""
WORDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What a help writes for a value of a type."""


@dataclass(frozen=True)
class Heading:
    """Fact about a flag: the title under which the help has it."""

    title: str


class Shown(Enum):
    """Fact about a flag: when the help shows it."""

    SELDOM = "With --help-all alone."


Kind = TypeVar("Kind")
ASKS_FOR_HELP = {"-h", "--help", "--help-all"}
POSITIONAL = tyro.conf.Positional[int].__metadata__[0]  # type: ignore[attr-defined]
"""tyro's mark of what has no name on the command line."""
CONFIG = (tyro.conf.FlagCreatePairsOff,)


def read_flags(kind: type[Kind], arguments: Sequence[str], prog: str, page: str, **more: Any) -> Kind:
    """Reads the command line. Prints the help, which names a page of docs/, and exits if that is asked; exits after a
    fault that tyro finds. The attribute `removed` of a class lists flags that no longer exist.

    Raises UserError for these, unless they have the value that always applies now.
    """
    present = _prepare_arguments(kind, arguments, prog, page)
    found: Kind = tyro.cli(kind, args=present, prog=prog, config=CONFIG, **more)
    return found


def read_flags_and_rest(kind: type[Kind], arguments: Sequence[str], prog: str, page: str) -> tuple[Kind, list[str]]:
    """Reads the command line likewise, and returns the words that are no flags of the command: values of a recipe."""
    present = _prepare_arguments(kind, arguments, prog, page)
    return tyro.cli(kind, args=present, prog=prog, config=CONFIG, return_unknown_args=True)


def read_subcommand(kinds: Mapping[str, type[Kind]], arguments: Sequence[str], prog: str, page: str) -> Kind:
    """Reads a command line whose first word names one of several kinds of flags."""
    first = arguments[0] if arguments else "--help"
    if first in kinds:
        return read_flags(kinds[first], arguments[1:], f"{prog} {first}", page)
    if first not in ASKS_FOR_HELP:
        raise UserError(f"{first}: there is {', '.join(kinds)}; {prog} --help says what they do")
    rows = [(f"{prog} {name} --help", str(inspect.getdoc(kind)).partition("\n")[0]) for name, kind in kinds.items()]
    print("\n".join([f"usage: {prog} NAME [flags]", "", *_show_rows(rows), "", f"docs/{page}.md explains them."]))
    sys.exit(0)


def _prepare_arguments(kind: type[Any], arguments: Sequence[str], prog: str, page: str) -> list[str]:
    """Prints the help and exits if the command line asks for it; otherwise returns the words without removed flags."""
    print_help_if_asked(kind, arguments, prog, page)
    if len(re.findall(r"(?<!\S)--data[= ]\w+=", " ".join(arguments))) > 1:
        raise UserError("--data is given twice; give all corpora after one: --data wiki=data/wiki books=data/books")
    return drop_removed(getattr(kind, "removed", {}), arguments)


def print_help_if_asked(kind: type[Any], arguments: Sequence[str], prog: str, page: str) -> None:
    """Prints the help and ends the process if that is asked: a command that loads PyTorch calls this before."""
    if not ASKS_FOR_HELP.isdisjoint(arguments):
        print(make_help(kind, prog, page, everything="--help-all" in arguments))
        sys.exit(0)


def drop_removed(removed: Mapping[str, Removed], arguments: Sequence[str]) -> list[str]:
    """Removes flags that no longer exist from a command line and prints a line for each. Raises UserError if one has
    another value than the one that always applies now."""
    rest: list[str] = []
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        gone = removed.get(name[2:].replace("-", "_")) if name.startswith("--") else None
        if gone is None:
            rest.append(name + equals + value)
            continue
        may_take = 0 if equals else gone.count_words()
        if isinstance(gone.value, bool) and words and words[0].lower() not in ("true", "false"):
            may_take = 0
        while may_take and words and not words[0].startswith("--"):
            value, may_take = f"{value} {words.pop(0)}".lstrip(), may_take - 1
        if not gone.allows(value or True):
            raise UserError(f"{name} {value}".rstrip() + f": {gone.explain()}")
        tell_removed(f"{name} {value}".rstrip())
    return rest


class _Flag(NamedTuple):
    """A flag as a help shows it."""

    title: str
    names: str
    meaning: str
    seldom: bool
    needed: bool


def make_help(kind: type[Any], prog: str, page: str, everything: bool = False) -> str:
    """Makes the help of a command from its class."""
    flags = [*_list_flags(kind)]
    shown = [flag for flag in flags if everything or not flag.seldom]
    given = [flag for flag in flags if flag.needed or flag.title == ARGUMENTS]
    words = [flag.names if flag.needed else f"[{flag.names}]" for flag in given]
    lines = [" ".join(f"usage: {prog} {' '.join(words)} [flags]".split()), ""]
    lines += [_wrap(paragraph) + "\n" for paragraph in str(inspect.getdoc(kind)).split("\n\n")]
    for title in sorted(dict.fromkeys(flag.title for flag in shown), key=ARGUMENTS.__ne__):
        lines += [title, *_show_rows([flag[1:3] for flag in shown if flag.title == title]), ""]
    if left := len(flags) - len(shown):
        lines.append(f"--help-all shows {left} more.")
    return "\n".join([*lines, f"docs/{page}.md explains them."])


def _list_flags(kind: type[Any], title: str = "Flags") -> Iterator[_Flag]:
    """Lists the flags of a class, in its order."""
    hints, meanings = get_type_hints(kind, include_extras=True), _read_meanings(kind)
    for name, default in _list_defaults(kind):
        annotation, facts = _split(hints[name])
        if is_dataclass(annotation):
            yield from _list_flags(annotation, meanings[name].rstrip("."))  # type: ignore[arg-type]
            continue
        given = [fact.title for fact in facts if isinstance(fact, Heading)]
        renamed = next((str(fact.name) for fact in facts if hasattr(fact, "prefix_name") and fact.name), name)
        is_positional = POSITIONAL in facts
        spelled = f"--{renamed.replace('_', '-')} {_name_value(annotation)}".rstrip()
        names = name.upper() if is_positional else spelled
        meaning = meanings[name]
        if "(default" not in meaning and default not in (MISSING, None, False, "", ()):
            meaning += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        group = ARGUMENTS if is_positional else given[0] if given else title
        yield _Flag(group, names, meaning, Shown.SELDOM in facts, default is MISSING)


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Parts a type from its facts."""
    facts: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *found = get_args(annotation)
        facts += tuple(found)
    return annotation, facts


def _name_value(annotation: Any) -> str:
    """Returns what a help writes for the value of a flag; nothing for one without."""
    annotation = _split(annotation)[0]
    inner = [each for each in get_args(annotation) if each not in (type(None), Ellipsis)]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, inner))
    if len(inner) > 1 and all(get_origin(_split(each)[0]) is Literal for each in inner):
        return "|".join(map(_name_value, inner))
    if get_origin(annotation) is tuple:
        words = list(map(_name_value, inner))
        return f"{words[0].removesuffix(' …')} …" if len({*words}) == 1 else " ".join(words)
    return _name_value(inner[0]) if inner else WORDS.get(annotation, "" if annotation is bool else "TEXT")


def _list_defaults(kind: type[Any]) -> list[tuple[str, Any]]:
    """Lists the flags of a class with their defaults; MISSING for those that must be given."""
    if issubclass(kind, BaseModel):
        return [(name, MISSING if field.is_required() else field.default) for name, field in kind.model_fields.items()]
    return [(field.name, field.default) for field in fields(kind) if field.init]


def _read_meanings(kind: type[Any]) -> dict[str, str]:
    """Reads the texts below the attributes of a class and of those above it."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        if each.__module__.partition(".")[0] in ("pydantic", "builtins"):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        for line, below in pairwise(getattr(tree, "body", [])):
            if isinstance(line, ast.AnnAssign) and isinstance(text := getattr(below, "value", None), ast.Constant):
                found[ast.unparse(line.target)] = " ".join(str(text.value).split())
    return found


def _wrap(text: str, indent: str = "") -> str:
    """Breaks a paragraph into the lines of this terminal; one that is indented stays as it is."""
    if text.startswith("    "):
        return text
    width = min(shutil.get_terminal_size((WIDEST, 0)).columns, WIDEST)
    lines = textwrap.wrap(" ".join(text.split()), width - len(indent), break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), indent)


def _show_rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Shows names and, beside or below them, their meanings."""
    lines = []
    for names, meaning in rows:
        text = _wrap(meaning, " " * MARGIN)
        fits = len(names) + 4 <= MARGIN
        lines.append(f"  {names}".ljust(MARGIN) + text.lstrip() if fits else f"  {names}\n{text}")
    return lines
