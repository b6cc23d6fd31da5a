"""Reads Arrow files with a text column, as `save_to_disk` of Hugging Face's datasets writes them."""

from __future__ import annotations

from data_prep.readers.parquet import is_arrow, read, spans
from data_prep.readers.reader import Reader

READER = Reader("arrow", lambda name, head: is_arrow(head), read, spans)
