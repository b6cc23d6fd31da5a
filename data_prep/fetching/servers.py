"""Fetches text: dumps of Wikipedia, Parquet data sets of the Hugging Face hub, files of any web server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import unquote, urlsplit

import tyro

from data_prep.common.errors import Checks, UserError
from data_prep.common.files import is_inside
from data_prep.common.hub import hub_errors
from data_prep.common.languages import RULES
from data_prep.common.sections import Removed
from data_prep.fetching.client import Client, FetchOptions, Item, is_address

if TYPE_CHECKING:
    from huggingface_hub import DatasetInfo, HfApi
    from huggingface_hub.hf_api import RepoFile

WIKIMEDIA = "https://dumps.wikimedia.org"
CONVERTED = "refs/convert/parquet"  # where the hub keeps what it converted to Parquet itself


@dataclass(frozen=True, kw_only=True)
class Url(FetchOptions):
    """Files with an address of their own."""

    removed: ClassVar = {**FetchOptions.removed, "sha256": Removed(None, "sha256sum -c checks the files")}
    urls: tyro.conf.Positional[tuple[str, ...]]
    """Addresses of the files."""

    @property
    def names(self) -> list[str]:
        """Lists the names of the files, with which their addresses end."""
        return [unquote(urlsplit(url).path).rpartition("/")[2] for url in self.urls]

    def checks(self) -> Checks:
        """Checks what cannot be an address or a name of a file."""
        names = self.names
        yield names, "nothing to fetch: give at least one address"
        for url, name in zip(self.urls, names, strict=True):
            yield is_address(url), f"{url}: an address begins with http:// or https://"
            named = name and name[0] not in "._" and name.isprintable()
            yield named, f"{url}: must end in the name of a file (without . or _ before it)"
            yield names.count(name) == 1, f"{url}: another address ends in {name} too; fetch it into another --out"

    def fetch(self, client: Client) -> str:
        """Fetches the files under their own names."""
        names = self.names
        folder = self.out or Path("data/raw") / (names[0].partition(".")[0] or "files")
        return fetch_text(
            client, folder, [Item(url, folder / name) for url, name in zip(self.urls, names, strict=True)]
        )


@dataclass(frozen=True, kw_only=True)
class Wikipedia(FetchOptions):
    """The articles of one language, from dumps.wikimedia.org, checked against the site's own list of checksums."""

    language: str = "en"
    """Language of the Wikipedia, as in its address: en, de, zh-min-nan, simple."""
    date: str = "latest"
    """Date of the dump, as in 20250601."""

    def checks(self) -> Checks:
        """Checks what cannot be a language or a date."""
        code = re.fullmatch(r"[A-Za-z0-9]+([-_][A-Za-z0-9]+)*", self.language)
        yield code, f"--language {self.language}: letters, digits and -, such as en or zh-min-nan"
        yield re.fullmatch(r"latest|[0-9]{8}", self.date), f"--date {self.date}: latest, or as in 20250601"

    def fetch(self, client: Client) -> str:
        """Fetches the dump in one file; resolves `latest` to its date, so that no restart mixes two dumps."""
        wiki = self.language.lower().replace("-", "_") + "wiki"
        base = f"{WIKIMEDIA}/{wiki}"
        list_url = f"{base}/{self.date}/{wiki}-{self.date}-sha1sums.txt"
        hint = f"is {self.language} the language of a Wikipedia? the dates that there are: {base}/"
        day = "[0-9]{8}" if self.date == "latest" else self.date
        line = rf"^([0-9a-f]{{40}})\s+\*?({wiki}-({day})-pages-articles-multistream\.xml\.bz2)\s*$"
        found = re.findall(line, client.read_text(list_url, hint), re.MULTILINE)
        if not found:
            raise UserError(f"{list_url}: no {wiki} pages-articles-multistream yet: try an earlier --date\n{hint}")
        checksum, name, date = max(found, key=lambda dump: dump[2])
        folder = self.out or Path("data/raw") / wiki
        item = Item(f"{base}/{date}/{name}", folder / name, checksum, hint)
        return fetch_text(client, folder, [item], self.language.lower())


@dataclass(frozen=True, kw_only=True)
class Hub(FetchOptions):
    """The Parquet files of a data set on the Hugging Face hub, or on the server that HF_ENDPOINT names."""

    removed: ClassVar = {**FetchOptions.removed, "endpoint": FetchOptions.removed["mirror"]}
    name: tyro.conf.Positional[str]
    """OWNER/NAME of the data set."""
    config_name: str | None = None
    """Its part, a folder of the data set, such as 20231101.en; '*' is all of them."""
    revision: str | None = None
    """Branch, tag or commit (default: main, or where the hub keeps its own conversion to Parquet)."""

    def fetch(self, client: Client) -> str:
        """Fetches the Parquet files of one commit into a folder named after the data set and its part."""
        label = "-".join([*self.name.split("/"), *([self.config_name] if self.config_name else [])])
        folder = self.out or Path("data/raw") / re.sub(r"[^\w.-]+", "_", label)
        return fetch_text(client, folder, self.list_items(folder))

    def list_items(self, folder: Path) -> list[Item]:
        """Lists the files of one commit: those of the data set, else those that the hub made of it."""
        from huggingface_hub import HfApi, get_token, hf_hub_url
        from huggingface_hub.errors import RevisionNotFoundError

        api = HfApi()
        page = f"{api.endpoint}/datasets/{self.name}"
        with hub_errors(page, "data set", "set HF_ENDPOINT to a mirror", self.revision):
            info, files = list_parquet(api, self.name, self.revision)
            if not files and self.revision is None:
                with suppress(RevisionNotFoundError):
                    info, files = list_parquet(api, self.name, CONVERTED)
        token, items = get_token() or "", []
        hint = f"where it has conditions, accept them at {page}, then log in: hf auth login"
        for file in self.choose(files):
            if not is_inside(file.path):
                raise UserError(f"{self.name}: the server names a file outside the data set: {file.path}")
            url = hf_hub_url(info.id, file.path, repo_type="dataset", revision=info.sha)
            items.append(Item(url, folder / file.path, file.lfs.sha256 if file.lfs else "", hint, token))
        return items

    def choose(self, files: list[RepoFile]) -> list[RepoFile]:
        """Chooses the files of the part that the command names; many parts are not fetched by accident."""
        if not files:
            raise UserError(f"{self.name}: no Parquet files in {self.revision or f'main or {CONVERTED}'}")
        parts = {file.path: (file.path.rpartition("/")[0] or ".").split("/") for file in files}
        heads = sorted({folders[0] for folders in parts.values()})
        listed = ", ".join(heads[:20]) + (f" and {len(heads) - 20} more" if len(heads) > 20 else "")
        if self.config_name is None and len(heads) > 1:
            raise UserError(f"{self.name}: choose a part with --config-name, or all with '*': {listed}")
        pattern = self.config_name or "*"
        chosen = [file for file in files if any(fnmatchcase(folder, pattern) for folder in parts[file.path])]
        if not chosen:
            raise UserError(f"--config-name {pattern}: {self.name} has no such part; it has {listed}")
        return chosen


def list_parquet(api: HfApi, name: str, revision: str | None) -> tuple[DatasetInfo, list[RepoFile]]:
    """Lists the Parquet files of a data set as they are in one commit."""
    from huggingface_hub.hf_api import RepoFile

    info = api.dataset_info(name, revision=revision)
    tree = api.list_repo_tree(info.id, recursive=True, revision=info.sha, repo_type="dataset")
    return info, [file for file in tree if isinstance(file, RepoFile) and file.path.endswith(".parquet")]


def fetch_text(client: Client, folder: Path, items: Sequence[Item], language: str = "") -> str:
    """Fetches files into a folder; returns the command that makes shards of them, and of no others that are there."""
    for item in items:
        client.fetch(item)
    ours = {item.path for item in items}
    others = [path for path in folder.rglob("*") if path.is_file() and path not in ours]
    visible = [path for path in others if not re.search(r"(^|/)[._]", str(path.relative_to(folder)))]
    docs = [f"{folder.absolute().name}={item.path}" for item in items] if visible else [str(folder)]
    code = "en" if language == "simple" else language
    options = ["--language", code] if code in RULES else []
    return shlex.join(["python", "data_prep/shard.py", "--docs", *docs, *options])
