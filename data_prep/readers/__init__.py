"""The formats that Cloze reads: a new one is a new file here with a READER, and a line for it below."""

from __future__ import annotations

from data_prep.readers import arrow, books, csv_tables, demo, jsonlines, mediawiki, parquet, sentences, wikiextractor
from data_prep.readers.reader import Reader

# In the order in which they are tried on a file; `text` takes any text file, so it comes last.
READERS: dict[str, Reader] = {
    module.READER.name: module.READER
    for module in (mediawiki, wikiextractor, parquet, arrow, csv_tables, jsonlines, sentences, books, demo)
}
