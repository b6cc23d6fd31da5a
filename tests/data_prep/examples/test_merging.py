"""The rounds in which files of examples are merged."""

from __future__ import annotations

import pytest

from data_prep.examples import merging
from data_prep.examples.merging import merging_rounds
from data_prep.examples.sorted_files import SortedFiles


@pytest.mark.parametrize(
    ("num_parts", "rounds"),
    [(1, []), (256, []), (257, [52]), (4000, [64]), (65_536, [256]), (65_537, [257, 52]), (625_000, [2442, 63])],
)
def test_rounds_grow_with_the_logarithm_of_the_parts(num_parts: int, rounds: list[int]) -> None:
    found = list(merging_rounds(SortedFiles(128, num_parts), num_parts * 60_000_000, 6))
    assert [target.num_files for _, _, target in found] == rounds
    for source, fan_in, target in found:
        assert fan_in <= 256
        assert fan_in * target.num_files >= source.num_files > fan_in * (target.num_files - 1)
        assert target.num_ranges % source.num_ranges == 0
        in_memory = num_parts * 10_000_000 / target.num_files / target.num_ranges
        assert in_memory < 1.5 * merging.RANGE_BYTES
        assert in_memory > merging.RANGE_BYTES / 2 or target.num_ranges == source.num_ranges
