"""Packages that a recipe may ask for, and that need not be installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from importlib import util

TRACKERS = {"wandb": "wandb", "comet": "comet_ml"}
"""sections of DeepSpeed's that send metrics to a service, and the packages that do it"""


def apex_fault() -> str | None:
    """Why NVIDIA apex's kernels cannot be had here, with the cure; None where they can."""
    try:
        importlib.import_module("amp_C")
        return None
    except ImportError:
        cure = "build NVIDIA's from its source with --cpp_ext --cuda_ext (github.com/NVIDIA/apex)"
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return f"apex is not installed; {cure}"
    return (
        f"the package named apex that is installed here ({version}) has no amp_C: it is another project of that name, "
        f"or NVIDIA's built without its kernels; pip uninstall apex, and {cure}"
    )


def tracker_fault(section: str) -> str | None:
    """Why a service that DeepSpeed sends metrics to cannot be used here, with the cure; None where it can."""
    package = TRACKERS[section]
    return None if util.find_spec(package) else f"{package} is not installed; pip install {package}"
