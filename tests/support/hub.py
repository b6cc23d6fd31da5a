"""A Hugging Face hub on this machine that has a model or data sets."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path

from support.website import Site

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


def publish_model(site: Site, name: str, folder: Path) -> None:
    """Shows the files of a folder as the hub shows those of a model."""
    site.commit = COMMIT
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for at in ("", "/revision/main", f"/revision/{COMMIT}"):
        siblings = [{"rfilename": file} for file in names]
        site.replies[f"/api/models/{name}{at}"] = {"id": name, "sha": COMMIT, "siblings": siblings}
    site.replies[f"/api/models/{name}/tree/{COMMIT}"] = [
        {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": f"{number:040}"}
        for number, file in enumerate(names)
    ]
    for file in names:
        for revision in ("main", COMMIT):
            site.put(f"/{name}/resolve/{revision}/{file}", (folder / file).read_bytes())


def read_settings_anew(folder: Path) -> None:
    """A fault: a rank works in a folder, and reads the settings of the hub, which the library reads once, anew."""
    os.chdir(folder)
    importlib.reload(importlib.import_module("huggingface_hub.constants"))


def downloads(site: Site, file: str) -> int:
    """How often a file was sent."""
    return sum(request.path.endswith(f"/{file}") and request.sent > 0 for request in site.requests)


def publish_dataset(site: Site, cdn: Site, dataset: str, files: dict[str, bytes]) -> None:
    """Publishes a data set as the hub shows it, with the files on another server."""
    api, commit = f"/api/datasets/{dataset}", hashlib.sha1(dataset.encode()).hexdigest()
    site.replies[api] = {"id": dataset, "sha": commit}
    site.replies[f"{api}/tree/{commit}"] = [{"type": "directory", "path": "folder", "oid": "0"}] + [
        {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": "0",
            "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100},
        }
        for name, content in files.items()
    ]
    for name, content in files.items():
        site.redirects[f"/datasets/{dataset}/resolve/{commit}/{name}"] = cdn.put(f"/blobs/{dataset}/{name}", content)
