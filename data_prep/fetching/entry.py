"""What the commands that fetch have alike: how they read their arguments, and what they print and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tyro

from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console
from data_prep.fetching.client import Client, Options

Command = TypeVar("Command", bound=Options)


def run_entry(
    kinds: Mapping[str, Callable[..., Command]], arguments: list[str], fetch: Callable[[Command, Client], str]
) -> int:
    """Fetches what the command line asks for, which is one of these kinds.

    `fetch` does it, and returns the command that a user will want next. Returns the exit code: 0 done, 2 what the user
    can cure, 130 interrupted.
    """
    console = open_console(markup=False, soft_wrap=True)
    errors = open_console(stderr=True, markup=False, soft_wrap=True)
    try:
        command = parse_command(kinds, arguments)
        console.print(f"next:\n    {fetch(command, Client(console, command))}")
    except (UserError, PermissionError) as error:
        errors.print(f"error: {error}", style="red" if errors.is_terminal else "")
        return 2
    except KeyboardInterrupt:
        errors.print("\ninterrupted; the same command continues where it stopped")
        return 130
    return 0


def parse_command(kinds: Mapping[str, Callable[..., Command]], arguments: list[str]) -> Command:
    """Reads the command from the command line; reports all faults of it at once."""
    given: dict[str, Any] = dict(kinds)
    command: Command = tyro.extras.subcommand_cli_from_dict(given, args=arguments, prog="fetch.py")
    if faults := command.faults():
        raise UserError("\n".join(faults))
    return command
