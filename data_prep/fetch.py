#!/usr/bin/env python3
"""Fetches text to train on: dumps of Wikipedia, Parquet data sets of the Hugging Face hub, files of any web server.

    python data_prep/fetch.py wikipedia --language en
    python data_prep/fetch.py hub wikimedia/wikipedia --config-name 20231101.en
    python data_prep/fetch.py url https://example.org/books.jsonl.gz --out data/raw/books

Whatever interrupts it, the same command continues it. Then `shard.py` makes shards from what it fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import tyro

from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console
from data_prep.fetching.addresses import Url
from data_prep.fetching.client import Client
from data_prep.fetching.download import Download
from data_prep.fetching.hub import Hub
from data_prep.fetching.wikipedia import Wikipedia

Command = Wikipedia | Hub | Url


def parse_command(arguments: list[str]) -> Command:
    """Reads the command from the command line; reports all faults of it at once."""
    kinds: dict[str, Callable[..., Command]] = {"wikipedia": Wikipedia, "hub": Hub, "url": Url}
    command: Command = tyro.extras.subcommand_cli_from_dict(kinds, args=arguments, prog="fetch.py")
    if faults := command.faults():
        raise UserError("\n".join(faults))
    return command


def main(arguments: list[str]) -> int:
    """Fetches what the command plans; returns the exit code: 0 done, 2 what the user can cure, 130 interrupted."""
    console = open_console(markup=False, soft_wrap=True)
    errors = open_console(stderr=True, markup=False, soft_wrap=True)
    try:
        command = parse_command(arguments)
        client = Client(console, command)
        plan = command.plan(client)
        for item in plan.items:
            Download(client, item).run()
        console.print(f"next:\n    {plan.next_command()}")
    except UserError as error:
        errors.print(f"error: {error}", style="red" if errors.is_terminal else "")
        return 2
    except KeyboardInterrupt:
        errors.print("\ninterrupted; the same command continues where it stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
