"""Whatever is in a folder of shards, show.py and verify.py answer with a message and an exit code, and stay in it."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT, write_wiki
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal, run_main
from support.marks import slow
from support.shards import SHORT, make

from data_prep import show, verify
from data_prep.arrow_files import read_shard
from data_prep.common.files import json_bytes, sha256
from data_prep.seals import seal
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, MANIFEST, PLAN, WORK
from data_prep.work import LAYOUT, WorkFolder

SHARD = "length-32/duplicate-0/shard-00000.arrow"
CODES = {0, 1, 2, 3}
GB = 10**9


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return make(folder / "out", "--docs", write_wiki(folder / "wiki", documents=40), *SHORT, "--validation", "0.05")


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data"))


def rewrite(data: Path, change: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    """Changes a manifest, and makes fingerprint and checksum fit as one who means harm does."""
    content = json.loads((data / MANIFEST).read_text())
    change(content)
    if sealed:
        seal(content)
    (data / MANIFEST).write_bytes(json_bytes(content))


def record_anew(data: Path, name: str, **more: int) -> None:
    """Makes the record of a file fit what the file is now."""

    def change(content: dict[str, Any]) -> None:
        for record in content["files"] + [record for one in content["sets"] for record in one["shards"]]:
            if record["path"] == name:
                record.update(size=(data / name).stat().st_size, sha256=sha256(data / name), **more)

    rewrite(data, change)


def look(main: Callable[[list[str]], int], data: Path) -> tuple[int, str]:
    """Runs show.py or verify.py; returns the exit code and all that was said."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main([str(data)])
    return code, said.getvalue()


def refuse(data: Path, name: str = MANIFEST, message: str = "", looking: int = 2, verifying: int = 1) -> None:
    """Asserts that show.py and verify.py name a file and what is wrong with it."""
    for main, code in ((show.main, looking), (verify.main, verifying)):
        found, said = look(main, data)
        assert found == code
        assert f"{data / name}: " in said
        assert message in said


def look_aside(data: Path) -> tuple[list[int], str]:
    """Runs both in a process with bounded memory that may crash; returns their codes and all that was said."""
    report = data.parent / "said"
    report.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            own = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())  # of the tests before
            room = 3 * GB + 1024 * int(own[1] if own else 0)
            resource.setrlimit(resource.RLIMIT_DATA, (room, room))
            report.write_text(json.dumps([look(main, data) for main in (show.main, verify.main)]))
        except BaseException as error:
            report.write_text(json.dumps([(99, f"Traceback: {error!r}")] * 2))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    codes, said = zip(*json.loads(report.read_text()), strict=True)
    return [*codes], "".join(said)


def set_at(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Makes a change of a manifest: a value at a place such as sets.0.shards.0.rows, or its absence for None."""

    def change(content: Any) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in parents:
            content = content[key]
        if value is None:
            del content[last]
        else:
            content[last] = value

    return change


VALUES = """
    sets                    5                   sets is 5: Input should be a valid list
    sets.0.length           "32"                sets.0.length is '32': Input should be a valid integer
    sets.0.duplicate        -1                  sets.0.duplicate is -1: Input should be greater
    sets.0.validation       1                   sets.0.validation is 1: Input should be a valid boolean
    sets.0.histogram        [NaN]               sets.0.histogram.0 is nan
    sets.0.examples         null                sets.0 lacks examples
    sets.0.shards.0.rows    true                sets.0.shards.0.rows is True
    sets.0.shards.0.size    1e300               sets.0.shards.0.size is 1e+300
    sets.0.shards.0.path    "../out/vocab.txt"  sets.0.shards.0.path is '../out/vocab.txt': Value error, not a path
    sets.0.shards.0.path    "/etc/passwd"       not a path in the folder
    sets.0.shards.0.path    "a\\u0000b"          not a path in the folder
    files.0.path            "length-32/../../x" not a path in the folder
    vocabulary.size         1099511627776       vocabulary.size is 1099511627776
    corpus                  null                lacks corpus
    settings.pairs          null                settings lacks pairs
    fingerprint             7                   fingerprint is 7: Input should be a valid string
"""
"""Places of a manifest, values that may not stand there, and what is said."""


@pytest.mark.parametrize("row", VALUES.strip().splitlines())
def test_a_manifest_of_other_values_is_named(row: str, data: Path) -> None:
    path, value, said = row.split(maxsplit=2)
    rewrite(data, set_at(path, json.loads(value)), sealed=False)
    refuse(data, message=said)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b'{"format": 1}', b"\xff\xfe", b"1" * 9999])
def test_what_is_no_manifest_is_named(content: bytes, data: Path) -> None:
    (data / MANIFEST).write_bytes(content)
    for main in (show.main, verify.main):
        code, said = look(main, data)
        assert code in (1, 2)
        assert f"{data / MANIFEST}: " in said


def test_a_manifest_of_two_gigabytes_and_one_that_never_ends_are_not_read(data: Path) -> None:
    os.truncate(data / MANIFEST, 2 << 30)
    assert "2,147,483,648 bytes" in look(show.main, data)[1]
    (data / MANIFEST).unlink()
    os.mkfifo(data / MANIFEST)
    for main in (show.main, verify.main):
        assert look(main, data)[0] in (1, 2)


def test_links_that_lead_out_of_the_folder_are_not_followed(data: Path, tmp_path: Path) -> None:
    (data / SHARD).rename(tmp_path / "elsewhere")
    (data / SHARD).symlink_to(tmp_path / "elsewhere")
    refuse(data, SHARD, f"leads out of {data}")
    (data / SHARD).unlink()
    (tmp_path / "elsewhere").rename(data / SHARD)
    (tmp_path / "link").symlink_to(data)  # which a folder itself may be
    assert [look(main, tmp_path / "link")[0] for main in (verify.main, show.main)] == [0, 0]


@pytest.mark.parametrize("column", ["pieces", "masked"])
@pytest.mark.parametrize(("row", "value"), [(0, -5), (1, 2**31 - 1), (-1, -5), (-1, 2**31 - 1)])
def test_offsets_out_of_range_are_damage_and_no_crash(row: int, value: int, column: str, data: Path) -> None:
    """Changed where they stand in the shard, whose record fits."""
    content, offsets = (data / SHARD).read_bytes(), np.array(read_shard(data / SHARD)[column].offsets)
    before = offsets.tobytes()
    offsets[row] = value
    assert before in content
    (data / SHARD).write_bytes(content.replace(before, offsets.tobytes(), 1))
    record_anew(data, SHARD)
    refuse(data, SHARD)


def write_as_shard(data: Path, batch: pa.RecordBatch) -> None:
    """Puts a record batch in the place of a shard, and makes its record fit."""
    (data / SHARD).unlink()  # the batch may lie in it
    with pa.ipc.new_file(str(data / SHARD), batch.schema) as writer:
        writer.write_batch(batch)
    record_anew(data, SHARD, rows=batch.num_rows)


def with_column(name: str, values: list[object]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Makes a change of examples: the first of them get other values in a column."""

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        index = batch.schema.get_field_index(name)
        columns = list(batch.columns)
        columns[index] = pa.array(values + columns[index].to_pylist()[len(values) :], batch.schema.field(index).type)
        return pa.record_batch(columns, schema=batch.schema)

    return change


@pytest.mark.parametrize(
    ("change", "message", "shown"),
    [
        (lambda batch: batch.slice(1), "examples, its manifest says", ""),
        (lambda batch: batch.rename_columns([*batch.schema.names[:-1], "book"]), "its columns are not those", ""),
        (with_column("boundary", [31]), "example 0", ""),
        (with_column("boundary", [None]), "values that are none", "values that are none"),
        (with_column("pieces", [[5] * 20]), "example 0 does not read [CLS] A [SEP] B [SEP]", ""),
        (with_column("pieces", [[5] * 10**6]), "example 0 is longer than its length", "1,000,000 pieces, longer than"),
        (with_column("masked", [[]]), "example 0 has no masked piece", ""),
        (with_column("masked", [[{"position": 0, "piece": 7}]]), "masks a position that it must not", ""),
        (with_column("masked", [[{"position": 1, "piece": 3}]]), "example 0 masks a position that it must not", ""),
        (with_column("masked", [[{"position": 2, "piece": 7}, {"position": 2, "piece": 7}]]), "masks a position", ""),
        (with_column("masked", [[{"position": 1, "piece": 255}]]), "beyond the vocabulary", "beyond its vocab.txt"),
    ],
)
def test_examples_that_are_not_well_formed_are_found_and_not_shown(
    change: Callable[[pa.RecordBatch], pa.RecordBatch], message: str, shown: str, data: Path
) -> None:
    write_as_shard(data, change(read_shard(data / SHARD)))
    assert message in run_main(verify.main, data, code=1)
    if shown:
        assert shown in run_main(show.main, data, code=2)


@pytest.mark.slow
def test_a_table_that_unpacks_to_more_than_memory_is_named(data: Path) -> None:
    titles, others = pa.array(["a" * 50 * 10**6] * 12), pa.array([""] * 12)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(data / DOCUMENTS), DOCUMENTS_SCHEMA, options=options) as writer:
        writer.write_batch(pa.record_batch([others, titles, others], schema=DOCUMENTS_SCHEMA))
    assert (data / DOCUMENTS).stat().st_size < 10**6
    record_anew(data, DOCUMENTS)
    for entry in ("show.py", "verify.py"):  # new processes: a fork of this one would have the room of the titles
        done = subprocess.run(
            [sys.executable, ROOT / "data_prep" / entry, data],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (GB // 2, GB // 2)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (1, 2)
        assert f"{data / DOCUMENTS}: " in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [slow(2**60), slow(2**31), -1])
def test_a_shard_that_claims_to_be_huge_is_named(number: int, data: Path) -> None:
    """The numbers of rows stand in the metadata as they are, for the batch and for each of its columns."""
    rows = read_shard(data / SHARD).num_rows
    content = (data / SHARD).read_bytes()
    changed = content.replace(rows.to_bytes(8, "little"), number.to_bytes(8, "little", signed=True))
    assert changed != content
    (data / SHARD).write_bytes(changed)
    record_anew(data, SHARD)
    codes, said = look_aside(data)
    assert set(codes) <= {1, 2}, said
    assert said.count(f"{data / SHARD}: ") >= 2
    assert "Traceback" not in said


PLANS = [
    "[]",
    "{}",
    '{"layout": 3, "settings": {"lengths": [128], "duplicates": 1, "cased": true, "pairs": "nsp"}, "sources": [],'
    ' "given_vocabulary": null}',
    f'{{"layout": {LAYOUT}, "settings": 5}}',
]
RECORDS = ["[]", '{"task": "x", "record": 5}', '{"task": "x", "record": {"files": [{"path": "../x"}]}}', "{", "{}"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_that_is_none_is_named(plan: str, tmp_path: Path) -> None:
    (tmp_path / PLAN).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / PLAN).write_text(plan)
    assert_refusal(f"{tmp_path / PLAN}: ", WorkFolder(tmp_path).read_plan)


@pytest.mark.parametrize("line", RECORDS)
def test_an_unfinished_folder_with_other_records_is_named(line: str, data: Path) -> None:
    (data / MANIFEST).unlink()
    (data / WORK).mkdir()
    (data / PLAN).write_text("{}")
    (data / WORK / "documents.jsonl").write_text(f"{line}\n")
    found, said = look(verify.main, data)
    assert found == 1
    assert f"{data / WORK / 'documents.jsonl'}: " in said


class Damage(NamedTuple):
    """A file, places in it, and what is done to the bytes there."""

    name: str
    places: list[int]
    value: int

    def do(self, sound: Path, data: Path) -> None:
        """Makes `data` a copy of the sound folder but for these bytes."""
        shutil.copytree(sound, data, dirs_exist_ok=True)
        content = bytearray((sound / self.name).read_bytes())
        for at in self.places:
            content[at % len(content)] ^= self.value
        (data / self.name).write_bytes(content)


def damages(*names: str, most: int) -> st.SearchStrategy[Damage]:
    """What Arrow says of a file stands at its ends: most changes are made there."""
    places = st.lists(st.integers(-1500, 1500) | st.integers(0, 10**6), min_size=1, max_size=most)
    return st.builds(Damage, st.sampled_from(names), places, st.integers(1, 255))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages(SHARD, DOCUMENTS, "vocab.txt", MANIFEST, most=1))
def test_a_byte_that_is_changed_anywhere_is_found(sound: Path, tmp_path: Path, damage: Damage) -> None:
    damage.do(sound, tmp_path / "data")
    (looked, verified), said = look_aside(tmp_path / "data")
    assert looked in CODES, said
    assert verified in (1, 2), said
    assert "Traceback" not in said


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages(SHARD, DOCUMENTS, most=8))
def test_changed_bytes_that_the_records_fit_never_crash(sound: Path, tmp_path: Path, damage: Damage) -> None:
    """Here checksums fit, so that what reads the files meets the damage."""
    damage.do(sound, tmp_path / "data")
    record_anew(tmp_path / "data", damage.name)
    codes, said = look_aside(tmp_path / "data")
    assert set(codes) <= CODES, said
