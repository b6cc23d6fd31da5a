"""What users are told of their mistakes, without a process of its own for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.measure import mistakes_told


def mistake_of(main: Callable[[list[str]], int], words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a benchmark's entry says of these words, once it has ended with 2."""
    with pytest.raises(SystemExit) as ended, mistakes_told():
        main(list(words))
    assert ended.value.code == 2
    return capsys.readouterr().err
