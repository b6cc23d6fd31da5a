"""Rows of different lengths beside lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetuning.ragged import Ragged

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6)


@given(ROWS, st.data())
def test_stretches_of_rows_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    begins = [data.draw(st.integers(0, len(rows[number]))) for number in wanted]
    ends = [data.draw(st.integers(begin, len(rows[number]))) for number, begin in zip(wanted, begins, strict=True)]
    ragged = Ragged.from_rows([np.array(row, np.int64) for row in rows])
    numbers, first, last = (np.array(values, np.int64) for values in (wanted, begins, ends))
    stretches, taken = ragged.take_stretches(numbers, first, last), ragged.take(numbers)
    assert [taken.row(at).tolist() for at in range(len(taken))] == [rows[number] for number in wanted]
    assert [stretches.row(at).tolist() for at in range(len(stretches))] == [
        rows[number][begin:end] for number, begin, end in zip(wanted, begins, ends, strict=True)
    ]
