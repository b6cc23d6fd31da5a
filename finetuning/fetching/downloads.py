"""Fetches GLUE, SQuAD and SWAG: their addresses, checksums and folders."""

from __future__ import annotations

import re
import shlex
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from data_prep.common.errors import Checks, UserError
from data_prep.common.files import replacing, sha256, unfinished_name
from data_prep.fetching.client import Client, FetchOptions, Item, is_address
from data_prep.fetching.servers import Hub
from finetuning.files.splits import AX, AX_FOLDER, FOLDERS, list_splits, normalize_name

# All these checksums are in Hugging Face's catalogue of data sets, and the same ones in TensorFlow Datasets' (GLUE and
# SQuAD 1.1), in ParlAI (SQuAD 2.0) and in dataset_atlas (QQP). SWAG's are in the first alone, and so left out.
GLUE_SERVER = "https://dl.fbaipublicfiles.com"
SENTEVAL = "senteval/senteval_data/msr_paraphrase"
GLUE = {
    "cola": {"glue/data/CoLA.zip": "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"},
    "sst2": {"glue/data/SST-2.zip": "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"},
    "mrpc": {
        f"{SENTEVAL}_train.txt": "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
        f"{SENTEVAL}_test.txt": "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
        "glue/data/mrpc_dev_ids.tsv": "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
    },
    "qqp": {"glue/data/QQP-clean.zip": "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"},
    "stsb": {"glue/data/STS-B.zip": "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"},
    "mnli": {"glue/data/MNLI.zip": "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"},
    "qnli": {"glue/data/QNLIv2.zip": "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"},
    "rte": {"glue/data/RTE.zip": "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"},
    "wnli": {"glue/data/WNLI.zip": "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"},
    AX: {"glue/data/AX.tsv": "0e13510b1bb14436ff7e2ee82338f0efb0133ecf2e73507a697dc210db3f05fd"},
}
"""The SHA-256 of the published files of GLUE's tasks, by the names that run_glue.py uses."""

SQUAD_SERVER = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
SQUAD = {
    "1.1": {
        "train-v1.1.json": "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
        "dev-v1.1.json": "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
    },
    "2.0": {
        "train-v2.0.json": "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002",
        "dev-v2.0.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    },
}
"""The SHA-256 of SQuAD's files by their version."""
HUB_GLUE = "nyu-mll/glue"
HUB_SQUAD = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}

SWAG_SERVER = "https://raw.githubusercontent.com/rowanz/swagaf/master/data"
SWAG = ("train.csv", "val.csv", "test.csv")
"""The files of SWAG."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(FetchOptions):
    """Options of every data set."""

    mirror: str | None = None
    """Address of another server with the same files (default: the official one, with its folder)."""

    def checks(self) -> Checks:
        """Checks the address of the mirror."""
        yield from super().checks()
        yield self.mirror is None or is_address(self.mirror), f"--mirror {self.mirror}: an address, as {GLUE_SERVER}"

    def fetch_file(self, client: Client, server: str, name: str, folder: Path, checksum: str = "") -> Path:
        """Fetches a file of a server into a folder; returns its path.

        A file without a published checksum is compared with that of its first download, which is noted beside it.
        """
        path, said = folder / PurePosixPath(name).name, ""
        note = path.with_name(path.name + ".sha256")
        if not checksum and note.exists():
            checksum = note.read_text().partition(" ")[0]
            if not re.fullmatch(r"[0-9a-f]{64}", checksum):
                raise UserError(f"{note}: no checksum; delete it, and the same command writes it anew")
            said = f"by {note}, of the first download; delete that if the file was published anew"
        url = f"{(self.mirror or server).rstrip('/')}/{name}"
        client.fetch(Item(url, path, checksum, self.elsewhere, said=said))
        if not checksum:
            with replacing(note) as file:
                file.write(f"{sha256(path)}  {path.name}\n".encode())
        return path

    def list_hub_items(self, name: str) -> list[Item]:
        """Lists the Parquet files of all parts of a data set on the Hugging Face hub, by their paths there."""
        return Hub(name=name, config_name="*", endpoint=self.mirror).list_items(Path())


@dataclass(frozen=True, kw_only=True)
class FetchGlue(DataOptions):
    """The tasks of GLUE, from the addresses of gluebenchmark.com."""

    out: Path | None = None
    """Folder for the tasks (default: data/glue)."""
    task: tuple[str, ...] = ()
    """Tasks to fetch: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, ax (default: all)."""
    from_hub: bool = False
    """Take the Parquet files of nyu-mll/glue on the Hugging Face hub instead; --mirror is then another hub."""

    def checks(self) -> Checks:
        """Checks the names of tasks."""
        yield from super().checks()
        for given in self.task:
            yield normalize_name(given) in GLUE, f"--task {given}: no task of GLUE; there is {', '.join(GLUE)}"

    def fetch(self, client: Client) -> str:
        """Fetches the tasks that are not there; returns the command that fine-tunes on them."""
        out = self.out or Path("data/glue")
        names = tuple(dict.fromkeys(map(normalize_name, self.task))) or tuple(GLUE)
        if self.from_hub:
            parts = [(item.path.parent.name, item) for item in self.list_hub_items(HUB_GLUE)]
            if missing := sorted({*names} - {part for part, _ in parts}):
                raise UserError(f"{HUB_GLUE}: has no {', '.join(missing)} on this hub")
            for part, item in parts:
                if part in names:
                    client.fetch(replace(item, path=out / name_folder(part) / item.path.name))
        else:
            for name in names:
                self._fetch_task(name, out, client)
        trained = [name for name in names if name != AX]
        chosen = ["--task", *trained] if self.task and trained else []
        return build_command("run_glue.py", chosen, self.out)

    def _fetch_task(self, name: str, out: Path, client: Client) -> None:
        """Fetches a task, writes its tables and deletes the downloads."""
        folder, raw, tables = out / name_folder(name), out / ".downloads", list_tables(name)
        if all((folder / table).is_file() for table in tables):
            client.console.print(f"{folder}: already there")
            return
        fetched = [self.fetch_file(client, GLUE_SERVER, file, raw, checksum) for file, checksum in GLUE[name].items()]
        add_files(folder, build_tables(name, fetched))
        for path in fetched:
            path.unlink()
        if not any(raw.iterdir()):
            raw.rmdir()
        client.console.print(f"{folder}: {', '.join(tables)}")


@dataclass(frozen=True, kw_only=True)
class FetchSquad(DataOptions):
    """The files of SQuAD, from rajpurkar.github.io."""

    out: Path | None = None
    """Folder for the files (default: data/squad)."""
    version: tuple[str, ...] = tuple(SQUAD)
    """Versions to fetch."""
    from_hub: bool = False
    """Take the Parquet files of rajpurkar/squad and squad_v2 on the Hugging Face hub instead; --mirror is then another
    hub."""

    def checks(self) -> Checks:
        """Checks the versions."""
        yield from super().checks()
        yield self.version, f"--version: at least one of {', '.join(SQUAD)}"
        for version in self.version:
            yield version in SQUAD, f"--version {version}: there is {', '.join(SQUAD)}"

    def fetch(self, client: Client) -> str:
        """Fetches the versions; returns the command that fine-tunes on the last of them."""
        out = self.out or Path("data/squad")
        for version in self.version:
            if self.from_hub:
                for item in self.list_hub_items(HUB_SQUAD[version]):
                    split = "train" if item.path.name.startswith("train") else "dev"
                    client.fetch(replace(item, path=out / f"{split}-v{version}.parquet"))
            else:
                for name, checksum in SQUAD[version].items():
                    self.fetch_file(client, SQUAD_SERVER, name, out, checksum)
        return build_command("run_squad.py", ["--version", self.version[-1]], self.out)


@dataclass(frozen=True, kw_only=True)
class FetchSwag(DataOptions):
    """The files of SWAG, from the repository of its authors."""

    out: Path | None = None
    """Folder for the files (default: data/swag)."""

    def fetch(self, client: Client) -> str:
        """Fetches the files; returns the command that fine-tunes on them."""
        for name in SWAG:
            self.fetch_file(client, SWAG_SERVER, name, self.out or Path("data/swag"))
        return build_command("run_swag.py", [], self.out)


def build_command(script: str, chosen: Sequence[str], folder: Path | None) -> str:
    """Builds the command that fine-tunes on the data; it finds the default folder by itself."""
    return shlex.join(["python", f"finetuning/{script}", *chosen, *(["--data", str(folder)] if folder else [])])


def name_folder(task: str) -> str:
    """Returns the name of a task's folder."""
    return FOLDERS.get(task, AX_FOLDER)


def list_tables(task: str) -> list[str]:
    """Lists the tables of a task of GLUE."""
    return [f"{split}.tsv" for split in list_splits(task)]


def build_tables(task: str, fetched: Sequence[Path]) -> dict[str, bytes]:
    """Builds the contents of a task's tables from the downloads."""
    if task == "mrpc":
        return divide_mrpc(*map(read_lines, fetched))
    if fetched[0].suffix == ".zip":
        return unzip(fetched[0], task)
    return {list_tables(task)[0]: fetched[0].read_bytes()}


def unzip(path: Path, task: str) -> dict[str, bytes]:
    """Reads the task's files in an archive, and no others."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {PurePosixPath(name).parts[-2:]: name for name in archive.namelist()}
            return {name: archive.read(members[name_folder(task), name]) for name in list_tables(task)}
    except KeyError as error:
        raise UserError(f"{path}: has no {'/'.join(error.args[0])}; name another server with --mirror") from error
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: {error}; delete it, and the same command fetches it anew") from error


def divide_mrpc(train: list[str], test: list[str], dev_ids: list[str]) -> dict[str, bytes]:
    """Divides MRPC as GLUE does: the training pairs whose ids are in `dev_ids` become the dev split, and test has no
    labels."""
    header, *rows = train
    splits = {"train": [header], "dev": [header], "test": [f"index\t{header.partition(chr(9))[2]}"]}
    for row in rows:
        splits["dev" if "\t".join(row.split("\t")[1:3]) in dev_ids else "train"].append(row)
    splits["test"] += [f"{number}\t{row.partition(chr(9))[2]}" for number, row in enumerate(test[1:])]
    return {f"{split}.tsv": "".join(f"{line}\n" for line in lines).encode() for split, lines in splits.items()}


def read_lines(path: Path) -> list[str]:
    """Reads lines that end in LF or CRLF alone; other line separators of Unicode belong to the text."""
    text = path.read_bytes().decode("utf-8-sig")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def add_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Adds the files that a folder lacks, once all are on the disk."""
    made = unfinished_name(folder)
    shutil.rmtree(made, ignore_errors=True)
    try:
        for name, content in files.items():
            with replacing(made / name) as file:
                file.write(content)
        folder.mkdir(exist_ok=True)
        for path in made.iterdir():
            if not (folder / path.name).exists():
                path.rename(folder / path.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
