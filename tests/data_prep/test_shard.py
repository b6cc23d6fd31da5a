"""shard.py as its users run it: the same bytes however it is run, and nothing lost whatever happens to it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from conftest import ROOT, WORDS, sentence, write_wiki

from data_prep import shard
from data_prep.common.errors import UserError
from data_prep.settings import find_faults, read_config
from data_prep.shards import MANIFEST, WORK, Manifest
from data_prep.vocabulary import tokens as tokens

SHARD = str(ROOT / "data_prep/shard.py")
SETTINGS = ["--lengths", "32", "64", "--duplicates", "2", "--vocab-size", "300", "--shard-size", "128KB"]


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the hash of its bytes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text enough for several tasks in each step."""
    return write_wiki(tmp_path_factory.mktemp("corpus") / "wiki", documents=6000, files=12)


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed run with one worker writes."""
    out = tmp_path_factory.mktemp("expected") / "out"
    subprocess.run(command(corpus, out, "--workers", "1"), check=True, capture_output=True)
    return tree(out)


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, SHARD, "--docs", str(corpus), "--out", str(out), *SETTINGS, *more]


def test_the_corpus_is_large_enough_to_be_divided(corpus: Path, expected: dict[str, str]) -> None:
    assert sum(path.stat().st_size for path in corpus.iterdir()) > 4 << 20
    assert sum(name.startswith("length-32/duplicate-0/") for name in expected) > 4


def test_two_workers_write_the_same_bytes(corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(command(corpus, tmp_path / "out", "--workers", "2"), check=True, capture_output=True)
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mpi_ranks_write_the_same_bytes(ranks: int, corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    launch = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    done = subprocess.run([*launch, *command(corpus, tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(tmp_path / "out") == expected


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, at once."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        try:
            os.kill(each.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def test_a_run_killed_ten_times_ends_in_the_same_bytes(corpus: Path, expected: dict[str, str], tmp_path: Path) -> None:
    draw = random.Random(7)
    kills, out = 0, tmp_path / "out"
    while kills < 10:
        process = subprocess.Popen(
            command(corpus, out, "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=draw.uniform(0.8, 3.5))
        except subprocess.TimeoutExpired:
            kill_group(process)
            kills += 1
        if (out / MANIFEST).exists():  # too fast for us: begin anew
            shutil.rmtree(out)
    subprocess.run(command(corpus, out, "--workers", "2"), check=True, capture_output=True)
    assert tree(out) == expected


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def begin(corpus: Path, out: Path) -> subprocess.Popen[str]:
    """A run that has come as far as reading documents."""
    process = subprocess.Popen(
        command(corpus, out, "--workers", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any((out / WORK).glob("records/documents/*.json")) or (out / WORK / "documents.json").exists())
    return process


def test_a_worker_killed_from_outside_is_named_and_the_run_can_go_on(
    corpus: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    process = begin(corpus, tmp_path / "out")
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [each for each in family if not each.children() and each.ppid() != process.pid]
    assert workers
    os.kill(workers[0].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a worker process was killed from outside" in errors
    assert "run the same command again to continue" in errors
    subprocess.run(command(corpus, tmp_path / "out"), check=True, capture_output=True)
    assert tree(tmp_path / "out") == expected


def test_ctrl_c_leaves_what_is_done_and_says_how_to_go_on(
    corpus: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    process = begin(corpus, tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues where it stopped" in errors
    assert "Traceback" not in errors
    done = subprocess.run(command(corpus, tmp_path / "out"), check=True, capture_output=True, text=True)
    assert "continuing in" in done.stdout
    assert tree(tmp_path / "out") == expected


def test_a_second_run_into_the_same_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    first = begin(corpus, tmp_path / "out")
    second = subprocess.run(command(corpus, tmp_path / "out"), capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"another run is at work here (process {first.pid} on" in second.stderr
    first.communicate(timeout=120)
    assert first.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(
    corpus: Path, expected: dict[str, str], small_disk: Path
) -> None:
    out = small_disk / "out"
    full = subprocess.run(command(corpus, out, "--workers", "2"), capture_output=True, text=True, check=False)
    assert full.returncode == 2
    assert "cannot be written: No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    subprocess.run(command(corpus, out, "--workers", "2"), check=True, capture_output=True)
    assert tree(out) == expected


def test_a_read_only_folder_is_named(wiki: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert shard.main(["--docs", str(wiki), "--out", str(small_disk / "out")]) == 2
    assert "cannot be written: Read-only file system" in capfd.readouterr().err


def run(wiki: Path, out: Path, *more: str) -> int:
    """A small run in this process."""
    return shard.main(["--docs", str(wiki), "--out", str(out), "--workers", "1", *SETTINGS, *more])


def test_a_finished_folder_is_left_as_it_is(wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(wiki, tmp_path / "out") == 0
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert run(wiki, tmp_path / "out") == 0
    assert "is complete already; nothing to do" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()} == times


def test_other_settings_into_the_same_folder_are_refused_with_the_way_out(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(wiki, tmp_path / "out") == 0
    assert run(wiki, tmp_path / "out", "--seed", "2", "--masking", "whole-word") == 2
    message = capfd.readouterr().err
    assert "--seed was 12345, now 2" in message
    assert "--masking was token, now whole-word" in message
    assert "give the same settings to continue, another --out, or remove the folder" in message


def test_other_text_into_the_same_folder_is_refused(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(wiki, tmp_path / "out") == 0
    (wiki / "wiki_00").write_text((wiki / "wiki_00").read_text() * 2)
    assert run(wiki, tmp_path / "out") == 2
    assert "such as wiki_00" in capfd.readouterr().err


def test_the_folder_is_named_after_the_text(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shard.main(["--docs", str(wiki), "--workers", "1", *SETTINGS]) == 0
    assert Manifest.read(tmp_path / "data" / "wiki").content["corpus"]["documents"] == 200


def test_settings_may_come_from_a_file_and_flags_come_before_it(wiki: Path, tmp_path: Path) -> None:
    config = tmp_path / "shards.toml"
    config.write_text(
        f'docs = ["{wiki}"]\nlengths = [32]\nduplicates = 3\nvocab-size = 300\nworkers = 1\nmask_rate = 0.2\n'
    )
    assert shard.main(["--config", str(config), "--out", str(tmp_path / "out"), "--duplicates", "1"]) == 0
    settings = Manifest.read(tmp_path / "out").content["settings"]
    assert (settings["lengths"], settings["duplicates"], settings["mask_rate"]) == ([32], 1, 0.2)


def test_unreadable_files_can_be_left_out_in_a_second_attempt(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = wiki / "wiki_01"
    bad.write_bytes(bad.read_bytes().replace(b"Article 5\n", b"Article \xff5\n"))
    assert run(wiki, tmp_path / "out") == 2
    message = capfd.readouterr().err
    assert f"{bad}: byte" in message
    assert "not UTF-8" in message
    assert run(wiki, tmp_path / "out", "--errors", "skip") == 0
    corpus = Manifest.read(tmp_path / "out").content["corpus"]
    assert corpus["documents"] == 199
    assert str(bad) in corpus["skipped"][0]


def test_a_source_without_documents_stops_the_run(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blank.md").write_text("# only\n\n## headings\n")
    arguments = ["--docs", str(wiki), f"empty={tmp_path / 'blank.md'}", "--out", str(tmp_path / "out"), *SETTINGS]
    assert shard.main([*arguments, "--workers", "1"]) == 2
    assert "no document in empty, read as text" in capfd.readouterr().err


def test_text_without_a_single_piece_stops_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nul.txt").write_bytes(b"\0\0\0\n\n\0\0")
    assert run(tmp_path / "nul.txt", tmp_path / "out") == 2
    assert "no document" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to read"),
        (["--docs", "nowhere"], "--docs nowhere: no such file or folder"),
        (["--docs", "wiki", "--lengths", "4", "600"], "--lengths 600: from 8 to 512"),
        (["--docs", "wiki", "--mask-split", "80", "10", "5"], "three shares in percent that make 100"),
        (["--docs", "wiki", "--max-predictions", "20"], "one number for each of the 2 lengths"),
        (["--docs", "wiki", "--shard-size", "3 bananas"], "a number and a unit"),
        (["--docs", "wiki", "--validation", "1"], "--validation 1.0: a share from 0, below 1"),
        (["--docs", "wiki", "--config", "nowhere.toml"], "--config nowhere.toml: cannot be read"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    arguments: list[str], message: str, wiki: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(wiki.parent)
    assert shard.main([*arguments, "--workers", "1"]) == 2
    assert message in capfd.readouterr().err


def test_all_faults_of_the_settings_are_reported_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert shard.main(["--docs", "x", "--duplicates", "0", "--mask-rate", "2", "--seed", "-1"]) == 2
    message = capfd.readouterr().err
    assert all(flag in message for flag in ("--duplicates 0", "--mask-rate 2", "--seed -1"))


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("lenghts = [128]\nmasking = 3\n")
    assert shard.main(["--config", str(tmp_path / "c.toml")]) == 2
    message = capfd.readouterr().err
    assert "unknown key 'lenghts'; did you mean 'lengths'?" in message
    assert "masking = 3: not a value for this setting" in message


def peak_mb(arguments: list[str]) -> tuple[int, float]:
    """The exit code of a run with one worker, and the most memory that it took.

    From the process itself while it runs: what `wait4` reports may be the memory of its parent before the exec.
    """
    process = subprocess.Popen([sys.executable, SHARD, *arguments, "--workers", "1"], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.05)
    return process.returncode, peak / 1024


def one_line(path: Path, megabytes: int) -> Path:
    draw = random.Random(1)
    text = " ".join(sentence(draw) for _ in range(10_000)) + " "
    with path.open("w") as file:
        for _ in range(megabytes * 1_000_000 // len(text)):
            file.write(text)
    return path


def test_a_document_of_ten_megabytes_on_one_line(tmp_path: Path) -> None:
    path = one_line(tmp_path / "line.txt", 10)
    arguments = ["--docs", str(path), "--out", str(tmp_path / "out"), "--vocab-size", "300", "--duplicates", "1"]
    code, _ = peak_mb(arguments)
    assert code == 0
    corpus = Manifest.read(tmp_path / "out").content["corpus"]
    assert corpus["documents"] == 1
    assert corpus["sentences"] > 100_000


@pytest.mark.slow
def test_a_document_of_a_hundred_megabytes_on_one_line_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    path = one_line(tmp_path / "line.txt", 100)
    code, peak = peak_mb(["--docs", str(path), "--out", str(tmp_path / "out"), "--vocab-size", "300"])
    assert code == 0
    assert peak < 1024


@pytest.mark.parametrize("text", ["x" * 10_000_000, "中文" * 1_000_000, "é" * 1_000_000, "." * 3_000_000])
def test_text_without_any_space_is_no_trouble(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_text("An ordinary sentence. And another one.\n\n" + text)
    assert run(tmp_path / "odd.txt", tmp_path / "out") == 0


def test_documents_of_one_word_each(tmp_path: Path) -> None:
    lines = "\n\n".join(WORDS)
    (tmp_path / "words.txt").write_text(lines)
    assert run(tmp_path / "words.txt", tmp_path / "out", "--format", "sentences") == 0
    content = Manifest.read(tmp_path / "out").content
    assert content["corpus"]["documents"] == len(set(WORDS)) == len(WORDS)
    assert content["sets"][0]["random_next"] == content["sets"][0]["examples"]


def test_a_folder_with_other_files_is_left_alone(wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "project" / "work"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("chapter one")
    assert run(wiki, tmp_path / "project") == 2
    assert "holds other files already" in capfd.readouterr().err
    assert (mine / "thesis.txt").read_text() == "chapter one"


def test_shards_may_lie_in_the_folder_that_is_read(wiki: Path) -> None:
    assert run(wiki, wiki / "shards") == 0
    assert run(wiki, wiki / "shards") == 0


def test_no_worker_outlives_a_main_process_that_was_killed(corpus: Path, tmp_path: Path) -> None:
    process = begin(corpus, tmp_path / "out")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    process.communicate()
    wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family), 20)


def test_termination_is_as_polite_as_ctrl_c(corpus: Path, tmp_path: Path) -> None:
    process = begin(corpus, tmp_path / "out")
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues where it stopped" in errors


def test_a_source_without_documents_leaves_nothing_behind(wiki: Path, tmp_path: Path) -> None:
    blank = tmp_path / "blank"
    blank.mkdir()
    (blank / "blank.md").write_text("# only\n\n## headings\n")
    assert run(blank, tmp_path / "out") == 2
    assert run(wiki, tmp_path / "out") == 0


def test_settings_that_mean_the_same_are_the_same(wiki: Path, tmp_path: Path) -> None:
    assert run(wiki, tmp_path / "out") == 0
    assert run(wiki, tmp_path / "out", "--mask-split", "80", "10", "10", "--shard-size", "128000") == 0


def test_a_launcher_that_does_not_connect_its_processes_is_refused(
    wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    done = subprocess.run(command(wiki, tmp_path / "out"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "srun --mpi=pmix" in done.stderr


def test_words_too_many_to_keep_are_dropped_from_the_rarest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_WORDS", 4)
    paths = []
    for number, counts in enumerate([{"a": 5, "b": 1, "c": 1}, {"d": 3, "e": 1}, {"b": 1, "a": 1}]):
        batch = pa.record_batch([list(counts), list(counts.values())], schema=tokens.COUNTS_SCHEMA)
        tokens.write_batches(tmp_path, str(number), tokens.COUNTS_SCHEMA, [batch])
        paths.append(tmp_path / str(number))
    assert tokens.add_up(paths) == {"a": 6, "d": 3, "b": 1}


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("workers = 2", True),
        ('workers = "4"', False),
        ("workers = 1.5", False),
        ("seed = 1.9", False),
        ("lengths = [128.7]", False),
        ("mask-split = [90, 10]", False),
        ("cased = 1", False),
        ("cased = true", True),
        ('config = "other.toml"', False),
        ("validation = 0", True),
    ],
)
def test_values_of_a_file_must_be_of_their_kind(line: str, allowed: bool, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'docs = ["x"]\n{line}\n')
    try:
        accepted = not find_faults(read_config(tmp_path / "c.toml"))
    except UserError:
        accepted = False
    assert accepted == allowed
