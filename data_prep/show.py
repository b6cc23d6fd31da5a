#!/usr/bin/env python3
"""Prints a training example as a reader would mark it, or a document; or makes a page of a whole folder.

python data_prep/show.py data/wiki --length 128 --index 7
python data_prep/show.py data/wiki --document Anarchism
python data_prep/show.py data/wiki --report
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)


from data_prep.common.capacity import limit_memory
from data_prep.common.flags import read_flags
from data_prep.common.terminal import open_console, run_curable
from data_prep.inspection.lookup import Wanted, describe_example, find_document, find_example, format_example
from data_prep.inspection.page.writing import write_page


def main(arguments: list[str]) -> int:
    """Shows what the arguments name; returns the exit code."""
    wanted = read_flags(Wanted, arguments, "show.py", "preparation")
    return run_curable(lambda: show(wanted))


def show(wanted: Wanted) -> None:
    """Prints the example or document that is wanted, or makes the page."""
    console = open_console(soft_wrap=True)
    if wanted.report:
        console.print(f"written: {write_page(wanted.data)}", markup=False)
    elif wanted.document is not None:
        document, vocabulary = find_document(wanted.data, wanted.document)
        for sentence in document.lines(vocabulary):
            console.print(sentence, markup=False)
    else:
        example, vocabulary = find_example(wanted)
        console.print(describe_example(wanted.index, example), markup=False)
        for line in format_example(example, vocabulary):
            console.print(line)


if __name__ == "__main__":
    limit_memory()
    sys.exit(main(sys.argv[1:]))
