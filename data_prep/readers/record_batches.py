"""An Arrow file, read as a Parquet file is: its batches of records are its row groups, or all of a stream is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

FILE, STREAM = b"ARROW1\0\0", b"\xff\xff\xff\xff"
"""How files of the two kinds begin."""
END_OF_STREAM = STREAM + bytes(4)


def is_arrow(head: bytes) -> bool:
    """Tells an Arrow file by its first bytes."""
    return head.startswith((FILE, STREAM))


class RecordBatches:
    """The part of pq.ParquetFile's interface that readers use, for an Arrow file; ArrowInvalid if that is cut off."""

    def __init__(self, path: str):
        self._path = path
        with pa.OSFile(path) as file:  # not mapped: a fault of the disk would be the end of the process
            if file.read(len(FILE)) == FILE:
                reader = pa.ipc.open_file(file)
                self.schema_arrow, self.num_row_groups = reader.schema, reader.num_record_batches
            else:
                file.seek(file.size() - len(END_OF_STREAM))
                if file.read() != END_OF_STREAM:
                    raise pa.ArrowInvalid("the stream has no end")
                file.seek(0)
                self.schema_arrow, self.num_row_groups = pa.ipc.open_stream(file).schema, 1

    def iter_batches(
        self, rows: int, row_groups: Sequence[int], columns: Sequence[str], use_threads: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yields so many rows at a time of some columns; it has no threads."""
        with pa.OSFile(self._path) as file:
            if file.read(len(FILE)) == FILE:
                reader = pa.ipc.open_file(file)
                batches: Iterator[pa.RecordBatch] = (reader.get_batch(number) for number in row_groups)
            else:
                file.seek(0)
                batches = iter(pa.ipc.open_stream(file))
            for batch in batches:
                for start in range(0, batch.num_rows, rows):
                    yield batch.select(columns).slice(start, rows)


def describes_dataset(path: Path) -> bool:
    """Whether a file tells of the Arrow files that `save_to_disk` put beside it, or into folders beside it."""
    names = ("state.json", "dataset_info.json", "dataset_dict.json")
    return path.name in names and any((path.parent / name).exists() for name in (names[0], names[2]))
