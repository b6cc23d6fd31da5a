#!/usr/bin/env python3
"""Fetches text to train on: dumps of Wikipedia, Parquet data sets of the Hugging Face hub, files of any web server.

    python data_prep/fetch.py wikipedia --language en
    python data_prep/fetch.py hub wikimedia/wikipedia --config-name 20231101.en
    python data_prep/fetch.py url https://example.org/books.jsonl.gz --out data/raw/books

Whatever interrupts it, the same command continues it. Then `shard.py` makes shards from what it fetched.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import tyro
from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.fetching.download import Client, Download, Item, Options

if TYPE_CHECKING:
    from huggingface_hub import DatasetInfo, HfApi
    from huggingface_hub.hf_api import RepoFile

OFFICIAL = "https://dumps.wikimedia.org"
CONVERTED = "refs/convert/parquet"  # where the hub keeps what it converted to Parquet itself


@dataclass(frozen=True, kw_only=True)
class Wikipedia(Options):
    """The articles of one language, from dumps.wikimedia.org, checked against the site's own list of checksums."""

    language: str = "en"
    """Language of the Wikipedia, as in its address: en, de, zh-min-nan, simple."""
    date: str = "latest"
    """Date of the dump, as in 20250601."""
    mirror: str = OFFICIAL
    """Address of a server with the same files."""


@dataclass(frozen=True, kw_only=True)
class Hub(Options):
    """The Parquet files of a data set on the Hugging Face hub."""

    name: tyro.conf.Positional[str]
    """OWNER/NAME of the data set."""
    config_name: str | None = None
    """Its part, a folder of the data set, such as 20231101.en; '*' is all of them."""
    revision: str | None = None
    """Branch, tag or commit (default: main, or where the hub keeps its own conversion to Parquet)."""
    endpoint: Annotated[str | None, tyro.conf.arg(aliases=["--mirror"])] = None
    """Address of another server with the same interface (default: HF_ENDPOINT, or huggingface.co)."""


@dataclass(frozen=True, kw_only=True)
class Url(Options):
    """Files with an address of their own."""

    urls: tyro.conf.Positional[tuple[str, ...]]
    """Addresses of the files."""
    sha256: tuple[str, ...] = ()
    """Their checksums, in the same order."""

    @property
    def elsewhere(self) -> str:
        return "give the address of a mirror"


Command = Wikipedia | Hub | Url


@dataclass(frozen=True)
class Plan:
    """All that one command fetches."""

    folder: Path
    items: list[Item]
    language: str = "en"

    def next_command(self) -> str:
        """What makes shards of these files, and of no others that are in the folder."""
        ours = {item.path for item in self.items}
        others = [each for each in self.folder.rglob("*") if each.is_file() and each not in ours]
        visible = [each for each in others if not re.search(r"(^|/)[._]", str(each.relative_to(self.folder)))]
        docs = [f"{self.folder.absolute().name}={item.path}" for item in self.items] if visible else [str(self.folder)]
        language = [] if self.language in ("en", "simple") else ["--language", self.language]
        return shlex.join(["python", "data_prep/shard.py", "--docs", *docs, *language])


def plan_wikipedia(command: Wikipedia, client: Client) -> Plan:
    """The dump in one file; `latest` is resolved to its date, so that a restart never mixes two dumps."""
    wiki = command.language.lower().replace("-", "_") + "wiki"
    base = f"{command.mirror.rstrip('/')}/{wiki}"
    list_url = f"{base}/{command.date}/{wiki}-{command.date}-sha1sums.txt"
    hint = f"is {command.language} the language of a Wikipedia? the dates that there are: {base}/"
    found = find_dumps(client.read_text(list_url, hint), wiki, command.date)
    if not found:
        raise UserError(f"{list_url}: no {wiki} pages-articles-multistream yet: try an earlier --date\n{hint}")
    date, checksum = max(found)
    name = f"{wiki}-{date}-pages-articles-multistream.xml.bz2"
    folder = command.out or Path("data/raw") / wiki
    for part in sorted(folder.glob(f"{wiki}-*-multistream.xml.bz2.part")):
        if part.name != name + ".part":
            client.console.print(f"{part}: unfinished, of another date: continue it with --date, or delete it")
    return Plan(folder, [Item(f"{base}/{date}/{name}", folder / name, checksum, hint)], command.language)


def find_dumps(listing: str, wiki: str, date: str) -> list[tuple[str, str]]:
    """Date and SHA-1 of the dumps in one file, from the lines `<checksum>  <name>` of the site's list."""
    day = "[0-9]{8}" if date == "latest" else date
    line = rf"^([0-9a-f]{{40}})\s+\*?{wiki}-({day})-pages-articles-multistream\.xml\.bz2\s*$"
    return [(date, checksum) for checksum, date in re.findall(line, listing, re.MULTILINE)]


def plan_hub(command: Hub) -> Plan:
    """The Parquet files of one commit: those of the data set, else those that the hub made of it."""
    from huggingface_hub import HfApi, get_token, hf_hub_url
    from huggingface_hub.errors import RevisionNotFoundError

    api = HfApi(endpoint=command.endpoint.rstrip("/") if command.endpoint else None)
    with hub_errors(command, api.endpoint):
        info, files = list_parquet(api, command.name, command.revision)
        if not files and command.revision is None:
            with suppress(RevisionNotFoundError):
                info, files = list_parquet(api, command.name, CONVERTED)
    files = choose_files(files, command)
    label = "-".join([*command.name.split("/"), *([command.config_name] if command.config_name else [])])
    folder = command.out or Path("data/raw") / re.sub(r"[^\w.-]+", "_", label)
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    hint = f"where it has conditions, accept them at {api.endpoint}/datasets/{command.name}, then log in: hf auth login"
    items = []
    for file in files:
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise UserError(f"{command.name}: the server names a file outside the data set: {file.path}")
        url = hf_hub_url(info.id, file.path, repo_type="dataset", revision=info.sha, endpoint=api.endpoint)
        items.append(Item(url, folder / file.path, file.lfs.sha256 if file.lfs else "", hint, headers))
    return Plan(folder, items)


def list_parquet(api: HfApi, name: str, revision: str | None) -> tuple[DatasetInfo, list[RepoFile]]:
    from huggingface_hub.hf_api import RepoFile

    info = api.dataset_info(name, revision=revision)
    tree = api.list_repo_tree(info.id, recursive=True, revision=info.sha, repo_type="dataset")
    return info, [each for each in tree if isinstance(each, RepoFile) and each.path.endswith(".parquet")]


def choose_files(files: list[RepoFile], command: Hub) -> list[RepoFile]:
    """Those of the part that the command names; a data set with many parts is not fetched whole by accident."""
    if not files:
        raise UserError(f"{command.name}: no Parquet files in {command.revision or f'main or {CONVERTED}'}")
    parts = {file.path: (file.path.rpartition("/")[0] or ".").split("/") for file in files}
    heads = sorted({folders[0] for folders in parts.values()})
    listed = ", ".join(heads[:20]) + (f" and {len(heads) - 20} more" if len(heads) > 20 else "")
    if command.config_name is None and len(heads) > 1:
        raise UserError(f"{command.name}: choose a part with --config-name, or all with '*': {listed}")
    pattern = command.config_name or "*"
    chosen = [file for file in files if any(fnmatchcase(folder, pattern) for folder in parts[file.path])]
    if not chosen:
        raise UserError(f"--config-name {pattern}: {command.name} has no such part; it has {listed}")
    return chosen


@contextmanager
def hub_errors(command: Hub, endpoint: str) -> Iterator[None]:
    """Says what the errors of huggingface_hub mean for the user."""
    from huggingface_hub import errors

    network = errors.HfHubHTTPError.__mro__[1]  # the base of all errors of the HTTP library that it uses
    meanings: list[tuple[type, str]] = [
        (errors.GatedRepoError, "accept its conditions there, then log in: hf auth login"),
        (errors.RepositoryNotFoundError, "no such data set (is it OWNER/NAME?), or a private one: hf auth login"),
        (errors.RevisionNotFoundError, f"has no branch, tag or commit {command.revision}"),
        (errors.HFValidationError, "not the name of a data set"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE forbids the network: unset it"),
        (errors.HfHubHTTPError, "refused; try again later, or name a mirror with --mirror"),
        (OSError, "cannot be reached: check the network, or name a mirror with --mirror"),
        (network, "cannot be reached: check the network, or name a mirror with --mirror"),
        (ValueError, "the server does not answer as the hub does: check --mirror"),
    ]
    try:
        yield
    except Exception as error:
        meaning = next((meaning for kind, meaning in meanings if isinstance(error, kind)), None)
        if meaning is None:
            raise
        said = str(error).partition("\n")[0]
        raise UserError(f"{endpoint}/datasets/{command.name}: {meaning}\n({said})") from error


def plan_urls(command: Url) -> Plan:
    names = [url_name(url) for url in command.urls]
    folder = command.out or Path("data/raw") / (names[0].partition(".")[0] or "files")
    sums = command.sha256 or [""] * len(names)
    rows = zip(command.urls, names, sums, strict=True)
    return Plan(folder, [Item(url, folder / name, checksum.lower()) for url, name, checksum in rows])


def url_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def find_faults(command: Command) -> list[str]:
    """All that cannot be, each with its cure."""
    faults: list[str] = []

    def check(holds: object, message: str) -> None:
        if not holds:
            faults.append(message)

    check(command.retries >= 0, f"--retries {command.retries}: at least 0")
    check(0 <= command.wait < 3600, f"--wait {command.wait}: seconds, from 0")
    check(0 < command.timeout < 86400, f"--timeout {command.timeout}: seconds, more than 0")
    if isinstance(command, Wikipedia):
        code = re.fullmatch(r"[A-Za-z0-9]+([-_][A-Za-z0-9]+)*", command.language)
        check(code, f"--language {command.language}: letters, digits and -, such as en or zh-min-nan")
        check(re.fullmatch(r"latest|[0-9]{8}", command.date), f"--date {command.date}: latest, or as in 20250601")
        check(is_address(command.mirror), f"--mirror {command.mirror}: an address, such as {OFFICIAL}")
    elif isinstance(command, Hub):
        endpoint = command.endpoint or "https://huggingface.co"
        check(is_address(endpoint), f"--endpoint {endpoint}: an address, such as https://huggingface.co")
    else:
        names = [url_name(url) for url in command.urls]
        check(names, "nothing to fetch: give at least one address")
        for url, name in zip(command.urls, names, strict=True):
            check(is_address(url), f"{url}: an address begins with http:// or https://")
            check(
                name and name[0] not in "._" and name.isprintable(),
                f"{url}: must end in the name of a file (without . or _ before it)",
            )
            check(names.count(name) == 1, f"{url}: another address ends in {name} too; fetch it into another --out")
        check(len(command.sha256) in (0, len(names)), f"--sha256: one for each of the {len(names)} addresses")
        for each in command.sha256:
            check(re.fullmatch(r"[0-9A-Fa-f]{64}", each), f"--sha256 {each}: 64 hexadecimal digits")
    return faults


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.netloc.isascii() and parts.port != 0
    except ValueError:
        return False


def parse_command(arguments: list[str]) -> Command:
    """From the command line; every fault of it is reported at once."""
    kinds: dict[str, Callable[..., Command]] = {"wikipedia": Wikipedia, "hub": Hub, "url": Url}
    command: Command = tyro.extras.subcommand_cli_from_dict(kinds, args=arguments, prog="fetch.py")
    if faults := find_faults(command):
        raise UserError("\n".join(faults))
    return command


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure, 130 interrupted."""
    console, errors = (Console(stderr=each, highlight=False, markup=False, soft_wrap=True) for each in (False, True))
    try:
        command = parse_command(arguments)
        client = Client(console, command)
        if isinstance(command, Wikipedia):
            plan = plan_wikipedia(command, client)
        else:
            plan = plan_hub(command) if isinstance(command, Hub) else plan_urls(command)
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
