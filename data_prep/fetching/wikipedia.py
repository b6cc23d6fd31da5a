"""Fetches the dumps of Wikipedia from dumps.wikimedia.org or a mirror of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from data_prep.common.errors import Checks, UserError
from data_prep.fetching.client import Client, FetchOptions, is_address
from data_prep.fetching.download import Item, fetch_text

OFFICIAL = "https://dumps.wikimedia.org"


@dataclass(frozen=True, kw_only=True)
class Wikipedia(FetchOptions):
    """The articles of one language, from dumps.wikimedia.org, checked against the site's own list of checksums."""

    language: str = "en"
    """Language of the Wikipedia, as in its address: en, de, zh-min-nan, simple."""
    date: str = "latest"
    """Date of the dump, as in 20250601."""
    mirror: str = OFFICIAL
    """Address of a server with the same files."""

    def checks(self) -> Checks:
        """Checks what cannot be a language, a date or a server."""
        yield from super().checks()
        code = re.fullmatch(r"[A-Za-z0-9]+([-_][A-Za-z0-9]+)*", self.language)
        yield code, f"--language {self.language}: letters, digits and -, such as en or zh-min-nan"
        yield re.fullmatch(r"latest|[0-9]{8}", self.date), f"--date {self.date}: latest, or as in 20250601"
        yield is_address(self.mirror), f"--mirror {self.mirror}: an address, such as {OFFICIAL}"

    def fetch(self, client: Client) -> str:
        """Fetches the dump in one file; resolves `latest` to its date, so that no restart mixes two dumps."""
        wiki = self.language.lower().replace("-", "_") + "wiki"
        base = f"{self.mirror.rstrip('/')}/{wiki}"
        list_url = f"{base}/{self.date}/{wiki}-{self.date}-sha1sums.txt"
        hint = f"is {self.language} the language of a Wikipedia? the dates that there are: {base}/"
        found = find_dumps(client.read_text(list_url, hint), wiki, self.date)
        if not found:
            raise UserError(f"{list_url}: no {wiki} pages-articles-multistream yet: try an earlier --date\n{hint}")
        date, checksum = max(found)
        name = f"{wiki}-{date}-pages-articles-multistream.xml.bz2"
        folder = self.out or Path("data/raw") / wiki
        for part in sorted(folder.glob(f"{wiki}-*-multistream.xml.bz2.part")):
            if part.name != name + ".part":
                client.console.print(f"{part}: unfinished, of another date: continue it with --date, or delete it")
        item = Item(f"{base}/{date}/{name}", folder / name, checksum, hint)
        return fetch_text(client, folder, [item], self.language.lower())


def find_dumps(listing: str, wiki: str, date: str) -> list[tuple[str, str]]:
    """Finds dates and SHA-1s of the dumps in one file, among the lines `<checksum>  <name>` of the site's list."""
    day = "[0-9]{8}" if date == "latest" else date
    line = rf"^([0-9a-f]{{40}})\s+\*?{wiki}-({day})-pages-articles-multistream\.xml\.bz2\s*$"
    return [(date, checksum) for checksum, date in re.findall(line, listing, re.MULTILINE)]
