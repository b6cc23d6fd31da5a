"""What users are told of their mistakes, without a process of its own for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console

from benchmarks.measure import run_command


def mistake_of(
    kind: type[Any], do: Callable[[Any, Console], int | None], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """What a benchmark's entry says of these words, once it has ended with 2."""
    with pytest.raises(SystemExit) as ended:
        run_command(kind, do, words)
    assert ended.value.code == 2
    return capsys.readouterr().err
