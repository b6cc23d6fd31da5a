"""A Hugging Face hub on this machine that has one model."""

from __future__ import annotations

from pathlib import Path

from support.website import Site

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


def publish_model(site: Site, name: str, folder: Path) -> None:
    """Shows the files of a folder as the hub shows those of a model."""
    site.commit = COMMIT
    names = sorted(path.name for path in folder.iterdir())
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


def downloads(site: Site, file: str) -> int:
    """How often a file was sent."""
    return sum(request.path.endswith(f"/{file}") and request.sent > 0 for request in site.requests)
