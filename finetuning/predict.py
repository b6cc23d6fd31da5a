#!/usr/bin/env python3
"""Asks a fine-tuned model about text.

    python finetuning/predict.py runs/mini/glue/sst2/model reviews.txt
    echo "a fine film" | python finetuning/predict.py runs/mini/glue/sst2/model
    python finetuning/predict.py runs/mini/squad1/model questions.jsonl --tsv --out answers.tsv

A row is a line of text, columns that are parted by tabs, a JSON object with named fields, or a row of CSV or Parquet; a
first line of tabs that has the names of the fields says which columns they are. Every row gets an answer, in the same
order, an empty line too.
"""

from __future__ import annotations

import signal
import sys

from pretraining.processes.environment import prepare_process

prepare_process(small_steps=True)
if __name__ == "__main__":  # before anything that takes long is loaded: Ctrl-C and closed pipes end it without a word
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import tyro

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.common.terminal import open_console
from finetuning.files.tables import open_parquet, parse_csv, parse_object, told_at
from finetuning.prediction import Answer, FineTuned, Numbers, Row, Texts, count, load

Format = Literal["lines", "tsv", "csv", "jsonl", "parquet"]
FORMATS: dict[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
"""What the ending of a file says of its rows."""
STANDARD_INPUT = Path("-")
ROWS, CHARACTERS = 4096, 1 << 22
"""How many rows, and characters of them, are read before they are answered."""


@dataclass(frozen=True)
class Predict:
    """Asks a fine-tuned model about text, and writes an answer for every row."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a fine-tuned model, of run_glue.py and the like or of transformers."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = (STANDARD_INPUT,)
    """Files with text; - is standard input."""
    format: Literal["auto"] | Format = "auto"
    """What a row is: a line, columns parted by tabs, one of CSV with the names of the columns in its first line, a JSON
    object, or one of Parquet (default: by the ending of the file; otherwise lines, or tabs where a row has several
    texts)."""
    out: Path | None = None
    """File to write, whole or not at all (default: standard output)."""
    tsv: bool = False
    """Write columns parted by tabs, with their names in the first line, instead of JSON."""
    dtype: Numbers = "auto"
    """In which numbers the model computes; auto: those that the device is fast in. int8 is faster on a CPU, and less
    exact: look at the scores first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    wanted = tyro.cli(Predict, args=arguments, prog="predict.py", config=(tyro.conf.FlagCreatePairsOff,))
    try:
        predict(wanted)
    except (UserError, OSError) as error:  # a disk that is full, a file that must not be read
        open_console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        return 2
    return 0


def predict(wanted: Predict) -> None:
    """Reads, answers and writes some rows at a time."""
    if missing := [path for path in wanted.files if path != STANDARD_INPUT and not path.is_file()]:
        raise UserError(f"{missing[0]}: no such file")
    model = load(wanted.model, wanted.dtype, wanted.device)
    with ExitStack() as stack:
        out: BinaryIO = stack.enter_context(replacing(wanted.out)) if wanted.out else sys.stdout.buffer
        named = not wanted.tsv
        for path in wanted.files:
            for answers in answer_file(model, path, wanted.format):
                if not named:
                    out.write(tsv_line(columns(answers[0])))
                    named = True
                for answer in answers:
                    out.write(tsv_line(columns(answer).values()) if wanted.tsv else json_line(answer))
                out.flush()


def answer_file(model: FineTuned, path: Path, wanted: Literal["auto"] | Format) -> Iterator[list[Answer]]:
    """Answers the rows of a file, some at a time: one where somebody types them."""
    typed = path == STANDARD_INPUT and sys.stdin.isatty()
    with ExitStack() as stack:
        stream: BinaryIO = sys.stdin.buffer if path == STANDARD_INPUT else stack.enter_context(path.open("rb"))
        rows: list[Texts] = []
        characters = 0
        for row in read_rows(model, stream, path, format_of(model, path) if wanted == "auto" else wanted):
            rows.append(row)
            characters += sum(map(len, row))
            if typed or len(rows) == ROWS or characters >= CHARACTERS:
                yield model.answer(rows)
                rows, characters = [], 0
        if rows:
            yield model.answer(rows)


def format_of(model: FineTuned, path: Path) -> Format:
    """What a row of a file is by its ending, or by what the model needs."""
    return FORMATS.get(path.suffix.lower(), "tsv" if len(model.fields()) > 1 else "lines")


def read_rows(model: FineTuned, stream: BinaryIO, path: Path, kind: Format) -> Iterator[Texts]:
    """Reads the texts of every row; UserError with file and line where they are not there."""
    fields: tuple[str, ...] = ()
    for where, row in placed_rows(model, stream, path, kind):
        with told_at(where):
            if row is None:  # the texts of an empty line are empty
                row = dict.fromkeys(fields or model.fields(), "")
            elif not fields:
                fields = model.fields(row)
            texts = model.texts(row, fields or model.fields())
        yield texts


def placed_rows(model: FineTuned, stream: BinaryIO, path: Path, kind: Format) -> Iterator[tuple[str, Row | None]]:
    """The rows of a file, each with its place; None for an empty line."""
    name = "standard input" if path == STANDARD_INPUT else str(path)
    if kind == "parquet":
        yield from rows_of_parquet(path)
    elif kind == "csv":
        yield from rows_of_csv(stream, name)
    else:
        yield from rows_of_lines(stream, name, kind, {*model.fields()})


def rows_of_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of Parquet, of which some at a time are read."""
    if path == STANDARD_INPUT:
        raise UserError("standard input: Parquet is read from its end, so name a file")
    number = 0
    with open_parquet(path) as file:
        for batch in file.iter_batches(ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row


def rows_of_csv(stream: BinaryIO, name: str) -> Iterator[tuple[str, Row]]:
    """Rows of CSV, whose first line has the names of the columns."""
    header: list[str] = []
    for number, values in parse_csv((f"{line}\n" for line in decoded(stream, name)), name):
        where = f"{name}:{number}"
        if header:
            yield where, named(header, values, where)
        header = header or values


def rows_of_lines(stream: BinaryIO, name: str, kind: Format, fields: set[str]) -> Iterator[tuple[str, Row | None]]:
    """Rows of a line each: a text, columns parted by tabs, or a JSON object."""
    header: list[str] = []
    for number, line in enumerate(decoded(stream, name), 1):
        where, values = f"{name}:{number}", line.split("\t")
        if kind == "tsv" and number == 1 and {*values} >= fields:
            header = values
        elif not line:
            yield where, None
        elif kind == "jsonl":
            with told_at(where):
                row = parse_object(line)
            yield where, row
        elif kind == "lines" or (len(values) == 1 and not header):
            yield where, line
        else:
            yield where, named(header, values, where) if header else values


def decoded(stream: BinaryIO, name: str) -> Iterator[str]:
    """The text of every line, without what ends it, and without a byte order mark."""
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}:{number}: not UTF-8 ({error.reason}); convert it with iconv") from error
        yield text.removesuffix("\n").removesuffix("\r")


def named(header: list[str], values: list[str], where: str) -> Row:
    """The values of a row by the names of their columns."""
    if len(values) != len(header):
        raise UserError(f"{where}: {count(values, 'column')}; the first line names {len(header)}")
    return dict(zip(header, values, strict=True))


def json_line(answer: Answer) -> bytes:
    return (json.dumps(answer, ensure_ascii=False) + "\n").encode(errors="replace")


def tsv_line(values: Any) -> bytes:
    return ("\t".join(" ".join(value.split()) for value in values) + "\n").encode(errors="replace")


def columns(answer: Answer) -> dict[str, str]:
    """The columns of an answer: lists as words, a column for each class, which may not take the name of another."""
    found: dict[str, str] = {}
    for name, value in answer.items():
        if isinstance(value, dict):
            found |= {
                f"{name}.{label}" if label in answer else str(label): str(share) for label, share in value.items()
            }
        elif isinstance(value, list):
            found |= {name: " ".join(map(str, value))} if not any(isinstance(each, dict) for each in value) else {}
        else:
            found[name] = "" if value is None else str(value)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
