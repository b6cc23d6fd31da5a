"""Reads Arrow files with a text column, as `save_to_disk` of Hugging Face's datasets writes them."""

from __future__ import annotations

from dataclasses import replace

from data_prep.readers.formats import parquet

READER = replace(parquet.READER, first_bytes=(parquet.FILE, parquet.STREAM), order=4)
