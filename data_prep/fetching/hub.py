"""Fetches the Parquet files of data sets on the Hugging Face hub, or those that the hub made of a data set."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from data_prep.common.errors import Checks, UserError
from data_prep.common.hub import hub_errors
from data_prep.fetching.client import Client, FetchOptions, is_address
from data_prep.fetching.download import Item, fetch_text

if TYPE_CHECKING:
    from huggingface_hub import DatasetInfo, HfApi
    from huggingface_hub.hf_api import RepoFile

CONVERTED = "refs/convert/parquet"  # where the hub keeps what it converted to Parquet itself


@dataclass(frozen=True, kw_only=True)
class Hub(FetchOptions):
    """The Parquet files of a data set on the Hugging Face hub."""

    name: tyro.conf.Positional[str]
    """OWNER/NAME of the data set."""
    config_name: str | None = None
    """Its part, a folder of the data set, such as 20231101.en; '*' is all of them."""
    revision: str | None = None
    """Branch, tag or commit (default: main, or where the hub keeps its own conversion to Parquet)."""
    endpoint: Annotated[str | None, tyro.conf.arg(aliases=["--mirror"])] = None
    """Address of another server with the same interface (default: HF_ENDPOINT, or huggingface.co)."""

    def checks(self) -> Checks:
        """Checks what cannot be a server."""
        yield from super().checks()
        endpoint = self.endpoint or "https://huggingface.co"
        yield is_address(endpoint), f"--endpoint {endpoint}: an address, such as https://huggingface.co"

    @property
    def folder(self) -> Path:
        """Where the files go: named after the data set and its part, unless the user says so."""
        label = "-".join([*self.name.split("/"), *([self.config_name] if self.config_name else [])])
        return self.out or Path("data/raw") / re.sub(r"[^\w.-]+", "_", label)

    def fetch(self, client: Client) -> str:
        """Fetches the Parquet files of one commit."""
        return fetch_text(client, self.folder, self.items())

    def items(self) -> list[Item]:
        """Lists the files of one commit: those of the data set, else those that the hub made of it."""
        from huggingface_hub import HfApi, get_token, hf_hub_url
        from huggingface_hub.errors import RevisionNotFoundError

        api = HfApi(endpoint=self.endpoint.rstrip("/") if self.endpoint else None)
        page, lacking = f"{api.endpoint}/datasets/{self.name}", "no such data set (is it OWNER/NAME?)"
        with hub_errors(page, "data set", lacking=lacking, mirror=self.elsewhere, revision=self.revision):
            info, files = list_parquet(api, self.name, self.revision)
            if not files and self.revision is None:
                with suppress(RevisionNotFoundError):
                    info, files = list_parquet(api, self.name, CONVERTED)
        files = choose_files(files, self)
        headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
        hint = f"where it has conditions, accept them at {page}, then log in: hf auth login"
        items = []
        for file in files:
            if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
                raise UserError(f"{self.name}: the server names a file outside the data set: {file.path}")
            url = hf_hub_url(info.id, file.path, repo_type="dataset", revision=info.sha, endpoint=api.endpoint)
            items.append(Item(url, self.folder / file.path, file.lfs.sha256 if file.lfs else "", hint, headers))
        return items


def list_parquet(api: HfApi, name: str, revision: str | None) -> tuple[DatasetInfo, list[RepoFile]]:
    """Lists the Parquet files of a data set as they are in one commit."""
    from huggingface_hub.hf_api import RepoFile

    info = api.dataset_info(name, revision=revision)
    tree = api.list_repo_tree(info.id, recursive=True, revision=info.sha, repo_type="dataset")
    return info, [file for file in tree if isinstance(file, RepoFile) and file.path.endswith(".parquet")]


def choose_files(files: list[RepoFile], command: Hub) -> list[RepoFile]:
    """Chooses the files of the part that the command names; many parts are not fetched by accident."""
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
