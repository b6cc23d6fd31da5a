"""The wheels for a machine without a network are all that is needed, and nothing that it has."""

from __future__ import annotations

from benchmarks.gpu.bare_machine import with_all_they_need
from benchmarks.gpu.install import NEEDED
from benchmarks.gpu.wheels import locked

LOCK = """\
deepspeed==0.19.8
exceptiongroup==1.3.1 ; python_full_version < '3.11'
numpy==2.2.6 ; python_full_version < '3.11'
numpy==2.5.5 ; python_full_version >= '3.12'
"""


def test_packages_come_with_what_they_need() -> None:
    found = with_all_they_need(NEEDED, ("torch",), "3.12")
    assert {"deepspeed", "hjson", "py-cpuinfo", "pydantic", "pydantic-core", "tyro", "tokenizers", "pytest"} <= {*found}
    assert len(found) == len({*found})


def test_torch_and_what_it_alone_needs_are_the_machines() -> None:
    assert not {"torch", "sympy", "networkx", "triton"} & {*with_all_they_need(NEEDED, ("torch",), "3.12")}


def test_what_the_machine_has_is_left_out_with_what_it_alone_needs() -> None:
    found = with_all_they_need(NEEDED, ("torch", "numpy", "transformers"), "3.12")
    assert not {"numpy", "transformers", "tokenizers", "huggingface-hub"} & {*found}
    assert "tqdm" in found  # which deepspeed needs too


def test_an_older_python_needs_more() -> None:
    assert "exceptiongroup" in with_all_they_need(["pytest"], (), "3.10")
    assert "exceptiongroup" not in with_all_they_need(["pytest"], (), "3.12")


def test_versions_are_those_of_the_lock_for_the_machines_python() -> None:
    assert locked({"numpy", "exceptiongroup"}, LOCK, "3.10") == ["exceptiongroup==1.3.1", "numpy==2.2.6"]
    assert locked({"numpy", "deepspeed"}, LOCK, "3.12") == ["deepspeed==0.19.8", "numpy==2.5.5"]
