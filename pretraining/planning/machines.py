"""The GPUs and networks that a plan can name: what their makers say of them, with the source of every line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from data_prep.common.errors import UserError

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Gpu:
    """A GPU as its datasheet has it: matrix products without sparsity."""

    products: float
    """operations a second in 16 bits"""
    products_fp32: float
    """operations a second in fp32 proper, without TF32"""
    memory: float
    """bytes"""
    bandwidth: float
    """bytes of its memory a second"""
    link: float
    """bytes a second to the other GPUs of the node, in each direction"""
    network: str
    """what the maker's own nodes of 8 are joined by: taken where no other network is named"""
    bf16: bool
    """whether it multiplies in bf16; otherwise fp16 is taken"""
    source: str


def _gpu(products: float, fp32: float, memory: float, bandwidth: float, link: float, network: str, source: str) -> Gpu:
    """A line of the table, in TFLOP/s, GB and GB/s."""
    numbers = (products * TERA, fp32 * TERA, memory * GIGA, bandwidth * GIGA, link * GIGA)
    return Gpu(*numbers, network, not source.startswith("V100"), source)


GPUS = {
    "v100-16": _gpu(125, 15.7, 16, 900, 150, "edr100x4", "V100 datasheet, SXM2; NVLink 2; DGX-1"),
    "v100-32": _gpu(125, 15.7, 32, 900, 150, "edr100x8", "V100 datasheet, SXM2 and SXM3; NVLink 2; DGX-2"),
    "a100-40": _gpu(312, 19.5, 40, 1555, 300, "hdr200x8", "A100 datasheet, SXM4; NVLink 3; DGX A100"),
    "a100-80": _gpu(312, 19.5, 80, 2039, 300, "hdr200x8", "A100 datasheet, SXM4; NVLink 3; DGX A100"),
    "h100-80": _gpu(989, 67, 80, 3350, 450, "ndr400x8", "H100 datasheet, SXM5; NVLink 4; DGX H100"),
    "h200": _gpu(989, 67, 141, 4800, 450, "ndr400x8", "H200 datasheet, SXM; NVLink 4; DGX H200"),
    "b200": _gpu(2250, 75, 180, 8000, 900, "ndr400x8", "HGX B200 datasheet; NVLink 5; DGX B200"),
    "a6000": _gpu(154.8, 38.7, 48, 768, 32, "100gbe", "RTX A6000 datasheet; PCIe 4.0 x16"),
    "l40s": _gpu(362, 91.6, 48, 864, 32, "100gbe", "L40S datasheet; PCIe 4.0 x16"),
    "rtx-4090": _gpu(165.2, 82.6, 24, 1008, 32, "10gbe", "Ada architecture paper, fp32 accumulation; PCIe 4.0 x16"),
}


@dataclass(frozen=True)
class Network:
    """What joins nodes."""

    name: str
    bandwidth: float
    """bytes a second of a node, in each direction"""
    latency: float
    """seconds from a rank to one of another node"""


INFINIBAND, ETHERNET = 14e-6, 50e-6
"""Seconds of a hop of a collective between nodes: NCCL's table for its own choices (tuning.cc, protocol Simple, NET),
and TCP through the kernel."""
WITHIN = 3.4e-6
"""Seconds of a hop within a node: the same table, protocol Simple, NVLink."""
LINKS = {  # of one port: bytes a second, latency, source
    "edr100": (12.5 * GIGA, INFINIBAND, "InfiniBand EDR, 100 Gbit/s"),
    "hdr200": (25.0 * GIGA, INFINIBAND, "InfiniBand HDR, 200 Gbit/s"),
    "ndr400": (50.0 * GIGA, INFINIBAND, "InfiniBand NDR, 400 Gbit/s"),
    "400gbe": (50.0 * GIGA, INFINIBAND, "RoCE over Ethernet of 400 Gbit/s"),
    "200gbe": (25.0 * GIGA, INFINIBAND, "RoCE over Ethernet of 200 Gbit/s"),
    "100gbe": (12.5 * GIGA, ETHERNET, "Ethernet of 100 Gbit/s"),
    "25gbe": (3.125 * GIGA, ETHERNET, "Ethernet of 25 Gbit/s"),
    "10gbe": (1.25 * GIGA, ETHERNET, "Ethernet of 10 Gbit/s"),
    "1gbe": (0.125 * GIGA, ETHERNET, "Ethernet of 1 Gbit/s"),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; UserError where the table has none."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: unknown{_nearest(name, GPUS)}; there is {', '.join(GPUS)}")
    return GPUS[name.lower()]


def find_network(name: str) -> Network:
    """The network of this name, such as hdr200x8: a kind of port, and how many of them a node has (one by default)."""
    match = re.fullmatch(r"(\w+?)(?:x(\d{1,2}))?", name.lower())
    kind, count = (match[1], int(match[2] or 1)) if match else ("", 0)
    if kind not in LINKS or not count:
        raise UserError(
            f"--network {name}: unknown{_nearest(name, LINKS)}; there is {', '.join(LINKS)}, with the ports of a node "
            "after an x, as in hdr200x8"
        )
    bandwidth, latency, _ = LINKS[kind]
    return Network(name.lower(), count * bandwidth, latency)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = [each for each in known if each.startswith(name.lower())] or get_close_matches(name.lower(), known, 1)
    return f", did you mean {close[0]}?" if close else ""
