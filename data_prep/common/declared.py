"""Finds what the files of a folder declare, so that a new file needs no line anywhere else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def declared_in(file: str, package: str, attribute: str) -> dict[str, Any]:
    """What the modules beside `file` have under this name, by the modules' names; those that have it not are left out.

    All of them are imported, so that none may load what takes long, such as PyTorch.
    """
    found = (path.stem for path in Path(file).parent.glob("*.py"))
    names = sorted(name for name in found if name.isidentifier() and name not in ("__init__", Path(file).stem))
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {name: getattr(module, attribute) for name, module in modules.items() if hasattr(module, attribute)}
