"""Hides the installed modules in HIDDEN_MODULES from a Python whose path begins with this folder.

Python imports a module of this name when it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HIDDEN = {*os.environ.get("HIDDEN_MODULES", "").split()}


class Without(PathFinder):
    """Finds modules as Python does, without hidden ones."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
