#!/usr/bin/env python3
"""Asks a fine-tuned model about text.

    python finetuning/predict.py runs/mini/glue/sst2/model reviews.txt
    echo "a fine film" | python finetuning/predict.py runs/mini/glue/sst2/model
    python finetuning/predict.py runs/mini/squad1/model questions.jsonl --tsv --out answers.tsv
    python finetuning/predict.py runs/mini/export texts.txt --vectors texts.npy --nearest queries.txt
    python finetuning/predict.py runs/mini/glue/sst2/model --serve 8000

A row is a line of text, columns that are parted by tabs, a JSON object with named fields, or a row of CSV or Parquet.
In a .csv or .tsv the first line names the columns; before rows of several texts parted by tabs it may. Every row gets
an answer, in the same order, an empty line too.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True, ends_with_ctrl_c=True)
    from data_prep.common.flags import print_help_if_asked
    from finetuning.flags import Predict

    print_help_if_asked(Predict, sys.argv[1:], "predict.py", "predicting")  # without PyTorch

from pretraining.processes.environment import prepare_process

prepare_process(small_steps=True)

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, BinaryIO, Literal

from data_prep.common.errors import UserError, quote
from data_prep.common.files import absence, replacing
from data_prep.common.flags import read_flags
from data_prep.common.outputs import making, refuse_inputs
from data_prep.common.terminal import is_terminal, run_curable
from data_prep.readers.formats.jsonl import parse_object
from data_prep.readers.reader import group_rows
from data_prep.readers.tables import decode_lines, open_parquet, parse_csv, told_at
from finetuning.flags import STANDARD_INPUT, Format, Numbers, Predict
from finetuning.prediction import Answer, FineTuned, Predictor, Row, TextEmbedder, Texts, find_fine_tuned, load
from finetuning.vectors import CHARACTERS, ROWS, VectorFile
from pretraining.checkpoint.record import list_finished
from pretraining.engine.precision import choose_dtype, name_dtype

FORMATS: dict[str, Format] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""The format of a file by its ending."""
Asked = Mapping[str, Any]
"""The columns of a row, by name."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    wanted = read_flags(Predict, arguments, "predict.py", "predicting")
    return run_curable(lambda: predict(wanted))


def predict(wanted: Predict) -> None:
    """Reads, answers and writes rows in batches, or serves them."""
    if wanted.serve is not None:
        serve_rows(wanted, wanted.serve)
        return
    for path in (*wanted.files, *([wanted.nearest] if wanted.nearest else [])):
        if path != STANDARD_INPUT and (os.path.isdir(path) or not os.path.exists(path)):
            asked = f"echo {quote(path)} | python finetuning/predict.py {quote(wanted.model)}"
            raise UserError(f"{path}: {absence(path)}; to ask about a text itself: {asked}")
    if wanted.vectors is not None or wanted.nearest is not None:
        predict_vectors(wanted, wanted.model if list_finished(wanted.model) else find_fine_tuned(wanted.model))
        return
    folder = find_fine_tuned(wanted.model)
    with open_out(wanted, [folder, *wanted.files]) as out:
        model = load_and_tell(folder, wanted.dtype)
        names: list[str] = []
        for path in wanted.files:
            for answers in answer_file(model, path, wanted):
                if wanted.tsv and not names:
                    names = [*flatten_answer(answers[0])]
                    out.write(format_tsv(names))
                for answer in answers:
                    out.write(format_tsv(list_values(answer, names, path)) if wanted.tsv else format_json(answer))
                out.flush()


def load_and_tell(folder: Path, dtype: Numbers) -> Predictor:
    """Loads a model, and says which numbers `auto` has chosen where a person looks."""
    model = load(folder, dtype)
    if dtype == "auto" and isinstance(model, FineTuned) and is_terminal(sys.stderr):
        chosen = name_dtype(choose_dtype(dtype, model.device))
        print(f"computing in {chosen}, which suits this machine", file=sys.stderr, flush=True)
    return model


def serve_rows(wanted: Predict, address: str) -> None:
    """Answers rows over HTTP until Ctrl-C."""
    from finetuning.server import open_server

    given = {each.name for each in fields(wanted) if getattr(wanted, each.name) != each.default}
    if given - {"model", "serve", "dtype"}:
        raise UserError("--serve takes rows from requests alone; leave out files and all flags but --dtype")
    server = open_server(address)
    server.model = load_and_tell(find_fine_tuned(wanted.model), wanted.dtype)
    print("answering at http://{}:{}; Ctrl-C ends".format(*server.server_address), file=sys.stderr, flush=True)
    server.serve_forever()


def predict_vectors(wanted: Predict, folder: Path) -> None:
    """Writes the vectors of a file, and answers queries by them."""
    check_vectors(wanted)
    assert wanted.vectors is not None
    (path,), model = wanted.files, TextEmbedder(folder, wanted.dtype)
    kind = RowReader(model, path, wanted.format).kind
    made = VectorFile(model, path, kind, wanted.vectors, partial(read_texts, model, wanted))
    sources = [folder, path, *([wanted.nearest] if wanted.nearest else [])]
    refuse_inputs([wanted.vectors, made.record], sources, "--vectors")
    made.write(wanted.replace)
    if wanted.nearest is not None:
        with open_out(wanted, [*sources, wanted.vectors]) as out:
            for answer in made.find_nearest(wanted.nearest):
                out.write(format_json(answer))


def check_vectors(wanted: Predict) -> None:
    """Raises UserError for flags that do not belong together where vectors are written or searched."""
    others = {"--tsv": wanted.tsv, "--with-input": wanted.with_input, "--flush": wanted.flush}
    ending = wanted.vectors and wanted.vectors.suffix
    faults = {
        "--nearest needs --vectors": wanted.vectors is None,
        "--vectors should end in .npy or .parquet": ending not in (None, ".npy", ".parquet"),
        "--nearest searches a .npy": wanted.nearest and ending == ".parquet",
        "--nearest reads a file, not standard input": wanted.nearest == STANDARD_INPUT,
        "--vectors reads a file, not standard input": STANDARD_INPUT in wanted.files,
        "--vectors reads one file": len(wanted.files) > 1,
        "--out takes the answers to --nearest": wanted.out and not wanted.nearest,
        **{f"{flag} does not apply to --vectors": given for flag, given in others.items()},
    }
    found = [fault for fault, holds in faults.items() if holds]
    if found:
        raise UserError("\n".join(found))


def read_texts(model: Predictor, wanted: Predict, path: Path) -> Iterator[str]:
    """Reads the texts of a file of texts alone."""
    return (text for _, (text,) in RowReader(model, path, wanted.format).read())


@contextmanager
def open_out(wanted: Predict, sources: Sequence[Path]) -> Iterator[BinaryIO]:
    """Opens the file of answers, which replaces nothing that something else has made; else standard output."""
    if wanted.out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with making([wanted.out], "predict.py", sources, wanted.replace), replacing(wanted.out) as out:
        yield out


def answer_file(model: Predictor, path: Path, wanted: Predict) -> Iterator[list[Answer]]:
    """Yields the answers to the rows of a file in batches, or each at once where a program waits for it."""
    is_typed = path == STANDARD_INPUT and sys.stdin.isatty()
    if is_typed:
        print("reading texts from the terminal, one a line; Ctrl-D ends", file=sys.stderr)
    rows = RowReader(model, path, wanted.format).read()
    most = 1 if wanted.flush or is_typed else ROWS
    for stretch in group_rows(rows, lambda row: sum(map(len, row[1])), CHARACTERS, most):
        answers = model.answer([texts for _, texts in stretch])
        pairs = zip(stretch, answers, strict=True)
        yield [{"input": asked, **answer} for (asked, _), answer in pairs] if wanted.with_input else answers


class RowReader:
    """The rows of a file; faults are UserErrors with file and line."""

    def __init__(self, model: Predictor, path: Path, kind: Literal["auto"] | Format) -> None:
        self._model, self._path = model, path
        self._name = "standard input" if path == STANDARD_INPUT else str(path)
        usual: Format = "tabs" if len(model.name_fields()) > 1 else "lines"
        self.kind: Format = FORMATS.get(path.suffix.lower(), usual) if kind == "auto" else kind
        self._may_be_pairs = kind == "auto" and self.kind == "lines" and not model.task

    def read(self) -> Iterator[tuple[Asked, Texts]]:
        """Yields the columns of every row with its texts, which are empty for an empty line."""
        fields: tuple[str, ...] = ()
        columns: tuple[str, ...] = ()
        for where, row in self._read_parquet() if self.kind == "parquet" else self._read_stream():
            with told_at(where):
                if row is None:
                    row = dict.fromkeys(columns or fields or self._model.name_fields(), "")
                elif not fields:
                    fields = self._model.name_fields(row)
                    columns = tuple(row) if isinstance(row, Mapping) else ()
                texts = self._model.find_texts(row, fields or self._model.name_fields())
            given = texts if len(texts) == len(fields) else [" ".join(texts)]  # of words, which are one text
            yield row if isinstance(row, Mapping) else dict(zip(fields, given, strict=True)), texts

    def _read_parquet(self) -> Iterator[tuple[str, Row]]:
        if self._path == STANDARD_INPUT:
            raise UserError("standard input: Parquet is read from its end, so name a file")
        with open_parquet(self._path) as file:
            rows = (row for batch in file.iter_batches(ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{self._path}: row {number}", row

    def _read_stream(self) -> Iterator[tuple[str, Row | None]]:
        """Yields a row of CSV, or one a line: a text, columns or a JSON object; None for an empty line."""
        header, fields, kind = list[str](), {*self._model.name_fields()}, self.kind
        with nullcontext(sys.stdin.buffer) if self._path == STANDARD_INPUT else self._path.open("rb") as stream:
            lines = decode_lines(stream, self._name)
            cells = enumerate((line.split("\t") for line in lines), 1)
            for number, values in parse_csv((f"{line}\n" for line in lines), self._name) if kind == "csv" else cells:
                where, line = f"{self._name}:{number}", "\t".join(values)
                begins = number == 1 and (kind == "tsv" or (kind == "tabs" and {*values} >= fields))
                if begins or (kind == "csv" and not header):
                    header = self._check_header(values, where)
                elif not line and kind != "csv":
                    yield where, dict.fromkeys(header, "") if header else None
                elif kind == "jsonl":
                    with told_at(where):
                        row = parse_object(line)
                    yield where, row
                elif self._may_be_pairs and len(values) > 1:
                    fault = "a line with a tab, and the model does not say whether that is one text or several"
                    raise UserError(f"{where}: {fault}; give --format lines or --format tabs")
                elif kind == "lines" or (len(values) == 1 and not header):
                    yield where, line
                elif header and len(values) != len(header):
                    raise UserError(f"{where}: columns: {len(values)}; the first line names {len(header)}")
                else:
                    yield where, dict(zip(header, values, strict=True)) if header else values

    def _check_header(self, header: list[str], where: str) -> list[str]:
        """Returns the column names of a first line; UserError if a field is not among them, so that a row is not
        mistaken for names."""
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise UserError(f"{where}: two columns have the name {twice[0]!r}; rename one")
        fields = self._model.name_fields(dict.fromkeys(header, ""))
        missing = [name for name in fields if name not in header]
        if missing:
            raise UserError(
                f"{where}: no field {missing[0]!r}; there is: {', '.join(header)}; the first line names the columns"
                + " (rows of texts alone: --format tabs)" * (self.kind == "tsv")
            )
        return header


def format_json(answer: Answer) -> bytes:
    return (json.dumps(answer, ensure_ascii=False, default=str) + "\n").encode(errors="replace")


def format_tsv(values: Any) -> bytes:
    return ("\t".join(" ".join(value.split()) for value in values) + "\n").encode(errors="replace")


def list_values(answer: Answer, names: Sequence[str], path: Path) -> Iterable[str]:
    """Lists the values of an answer in the order of the columns; UserError if it has other columns."""
    found = flatten_answer(answer)
    if [*found] != names:
        raise UserError(f"{path}: other columns than the first row had; leave out --tsv or --with-input")
    return found.values()


def flatten_answer(answer: Answer) -> dict[str, str]:
    """Flattens an answer into columns: lists as words, and a column for each class, prefixed if its name is taken."""
    found: dict[str, str] = {}
    for name, value in answer.items():
        if name == "entities":  # nested; the tags say the same
            continue
        if isinstance(value, dict):
            taken = {*answer, *found}
            named = {f"{name}.{label}" if label in taken else str(label): each for label, each in value.items()}
            found |= {column: format_value(each) for column, each in named.items()}
        else:
            found[name] = format_value(value)
    return found


def format_value(value: Any) -> str:
    """Formats a value of a column: a list as words, nothing for None."""
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
