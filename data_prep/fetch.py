#!/usr/bin/env python3
"""Fetches text to train on: dumps of Wikipedia, Parquet data sets of the Hugging Face hub, files of any web server.

    python data_prep/fetch.py wikipedia --language en
    python data_prep/fetch.py hub wikimedia/wikipedia --config-name 20231101.en
    python data_prep/fetch.py url https://example.org/books.jsonl.gz --out data/raw/books

Whatever interrupts it, the same command continues it. Then `shard.py` makes shards from what it fetched.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from data_prep.fetching.client import run_entry
from data_prep.fetching.servers import Hub, Url, Wikipedia


def main(arguments: list[str]) -> int:
    """Fetches what the command line asks for; returns the exit code."""
    return run_entry({"wikipedia": Wikipedia, "hub": Hub, "url": Url}, arguments, "preparation")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
