"""Fetches files that have addresses of their own, on any web server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import tyro

from data_prep.common.errors import Checks
from data_prep.fetching.client import Client, FetchOptions, is_address
from data_prep.fetching.download import Item, fetch_text


@dataclass(frozen=True, kw_only=True)
class Url(FetchOptions):
    """Files with an address of their own."""

    urls: tyro.conf.Positional[tuple[str, ...]]
    """Addresses of the files."""
    sha256: tuple[str, ...] = ()
    """Their checksums, in the same order."""

    elsewhere: ClassVar[str] = "give the address of a mirror"

    @property
    def names(self) -> list[str]:
        """Lists the names of the files, with which their addresses end."""
        return [unquote(urlsplit(url).path).rpartition("/")[2] for url in self.urls]

    def checks(self) -> Checks:
        """Checks what cannot be an address, a name of a file or a checksum."""
        yield from super().checks()
        names = self.names
        yield names, "nothing to fetch: give at least one address"
        for url, name in zip(self.urls, names, strict=True):
            yield is_address(url), f"{url}: an address begins with http:// or https://"
            named = name and name[0] not in "._" and name.isprintable()
            yield named, f"{url}: must end in the name of a file (without . or _ before it)"
            yield names.count(name) == 1, f"{url}: another address ends in {name} too; fetch it into another --out"
        yield len(self.sha256) in (0, len(names)), f"--sha256: one for each of the {len(names)} addresses"
        for checksum in self.sha256:
            yield re.fullmatch(r"[0-9A-Fa-f]{64}", checksum), f"--sha256 {checksum}: 64 hexadecimal digits"

    def fetch(self, client: Client) -> str:
        """Fetches the files under their own names."""
        names = self.names
        folder = self.out or Path("data/raw") / (names[0].partition(".")[0] or "files")
        rows = zip(self.urls, names, self.sha256 or [""] * len(names), strict=True)
        return fetch_text(client, folder, [Item(url, folder / name, checksum.lower()) for url, name, checksum in rows])
