"""Breaks the product in some thirty places, one at a time, and says which test notices: `make breaks`, or

    python tests/support/breaks.py [NAME...]

tries all breaks, or those that are named, and ends with 1 if one is not caught. Each break is a promise to the user
that no longer holds: a copy of the tracked files has one text of the product replaced, and the tests that should notice
run there until one fails. In the end, the tests that have failed run without a break, and must pass. Who takes tests
away runs it before and after: nothing less may be caught.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
"""A line of pytest's summary."""


class Break(NamedTuple):
    """A broken promise, and the tests that should notice."""

    file: str
    old: str
    """the text that is replaced, which is there once"""
    new: str
    tests: str
    """files, or names of tests in them, below tests/"""


TABLE = r"""
static masks: the shares | data_prep/examples/masking.py
    - elif share < masking.mask_share + masking.random_share
    + elif share < masking.random_share
    data_prep/examples/test_masking.py::test_pieces_become_masks_and_others_in_the_shares_set
next sentences: the label | data_prep/examples/making.py
    - random_next = segments.partner[order] >= 0
    + random_next = segments.partner >= 0
    data_prep/test_contract.py::test_b_follows_a_or_comes_from_another_document
an example in no shard | data_prep/examples/merging.py
    - slice_by_keys(reader.get_batch(files.find_batch(one, number)), (low, high))
    + slice_by_keys(reader.get_batch(files.find_batch(one, number)), (low, high - (1 << 58)))
    data_prep/test_contract.py
validation: trained on too | data_prep/examples/making.py
    - rows = np.delete(np.arange(own.corpus.document_ends.size), held_out), held_out
    + rows = np.arange(own.corpus.document_ends.size), held_out
    data_prep/test_contract.py::test_no_document_held_out_is_seen_in_training
lower case | data_prep/vocabulary/encoders/words.py
    - forms[ord("A") : ord("Z") + 1] += 32
    + forms[ord("A") : ord("Z")] += 32
    data_prep/vocabulary/test_words.py data_prep/vocabulary/test_wordpiece.py
byte-level BPE: the order of merges | data_prep/vocabulary/encoders/bytelevel.py
    - if ranks[at] < ranks[best]:
    + if ranks[at] <= ranks[best]:
    data_prep/vocabulary/test_bytelevel.py::test_of_equal_pairs_that_overlap_the_first_is_merged
near copies: the threshold | data_prep/near_copies/signatures.py
    - if index >= threshold:
    + if index > threshold:
    data_prep/near_copies/test_finding.py::test_who_has_just_the_threshold_is_a_near_copy
redirects are no articles | data_prep/readers/formats/mediawiki.py
    - if page.find("{*}redirect") is not None:
    + if page.find("{*}none") is not None:
    data_prep/readers/test_mediawiki.py
the last row of a group | data_prep/readers/formats/parquet.py
    - for number, row in enumerate(rows)]
    + for number, row in enumerate(rows[:-1])]
    data_prep/readers/test_parquet.py
a file half-written | data_prep/common/files.py
    - with open(unfinished, "w+b", opener=refuse_link) as file:
    + with open(path, "w+b") as file, open(unfinished, "wb"):
    data_prep/common/test_outputs.py
shards: the checksum | pretraining/data/dataset.py
    - record.check(corpus.folder)
    + record.find(corpus.folder)
    pretraining/data/test_dataset.py
mixtures: the earliest deadline | pretraining/data/mixing.py
    - if slots[0, corpus] <= number and slots[1, corpus] < earliest:
    + if slots[0, corpus] <= number and earliest == NEVER:
    pretraining/data/test_mixing.py::test_any_prefix_is_within_one_sequence_of_the_shares
mixtures: from phase to phase | pretraining/checkpoint/state.py
    - if each["stored"] == stored
    + if each["stored"] != stored
    pretraining/data/test_mixing.py::test_a_corpus_goes_on_from_phase_to_phase
checkpoints: the checksum | pretraining/checkpoint/reading.py
    - file.check(checkpoint)
    + file.find(checkpoint)
    pretraining/checkpoint/test_reading.py
a second run in a folder | data_prep/common/locks.py
    - fcntl.LOCK_EX | fcntl.LOCK_NB
    + fcntl.LOCK_UN | fcntl.LOCK_NB
    data_prep/common/test_storage.py
exit codes: a lost rank | data_prep/common/codes.py
    - RANK_LOST = 76
    + RANK_LOST = 77
    pretraining/processes/test_ending.py::test_a_code_is_told_with_its_meaning
job scripts: a path unquoted | cluster/functions.sh
    - words=(--recipe "$recipe" --out "$run"
    + words=(--recipe "$recipe" --out $run
    cluster/test_functions.py::test_paths_with_blanks_stay_whole_and_none_is_refused
a rank votes alone | pretraining/processes/group.py
    - while distance < ranks:
    + while 2 * distance < ranks:
    pretraining/processes/test_group.py::test_all_find_the_greatest_of_each_number
a message that nobody signed | pretraining/processes/signing.py
    - if hmac.compare_digest(self._sign(key, value).encode(), found):
    + if len(found) >= 64:
    pretraining/processes/test_signing.py::test_what_was_signed_for_another_start_counts_for_nothing
resume: a moment | pretraining/checkpoint/reading.py
    - if part.name not in fresh:
    + if part.name not in fresh and kind != "exp_avg_sq":
    end_to_end/test_stops.py
resume: the optimizer's steps | pretraining/checkpoint/reading.py
    - engine.optimizer_steps = record.optimizer_steps
    + engine.optimizer_steps = 0.0
    end_to_end/test_stops.py
a rank's share of a batch | pretraining/data/batches.py
    - mine = deal_sequences(lengths, count)[rank::ranks]
    + mine = deal_sequences(lengths, count)[::ranks]
    pretraining/data/test_batches.py
the loss by micro-batches | pretraining/data/batches.py
    - counts = int(predictions.sum()),
    + counts = count * int(predictions[mine[0]].sum()),
    pretraining/data/test_batches.py
an epoch as the one before | pretraining/data/order.py
    - hash_key(self.seed, epoch, 1, shards)
    + hash_key(self.seed, 0, 1, shards)
    pretraining/data/test_order.py
dropout by rank | pretraining/engine/step.py
    - int(hash_key(seed, step)[0])
    + int(hash_key(seed, step, rank)[0])
    pretraining/engine/test_engine.py
attention: padded sequences leak | pretraining/model/attention.py
    - self.inside = (at < starts.diff()[:, None])[:, None, None]
    + self.inside = (at <= starts.diff()[:, None])[:, None, None]
    pretraining/model/test_attention.py::test_attention_over_ragged_sequences
attention: one way sees what follows | pretraining/model/attention.py
    - one_way or number < first
    + number < first
    pretraining/model/test_attention.py::test_attention_over_ragged_sequences
attention: a window too wide | pretraining/model/attention.py
    - (at - at[:, None]).abs() <= window
    + (at - at[:, None]).abs() <= window + 1
    pretraining/model/test_attention.py::test_attention_over_ragged_sequences
LAMB: the trust ratio | pretraining/model/kernels/lamb.h
    - std::sqrt(squares[0] / squares[1])
    + squares[0] / squares[1]
    pretraining/optimizers/test_lamb.py
weight decay: not of biases | pretraining/model/shape.py
    - return self.kind not in ("norm", "bias")
    + return self.kind != "norm"
    pretraining/optimizers/test_optimizers.py
warm-up: one step late | pretraining/config/schedule.py
    - (now if self.by_clock else step + 1)
    + (now if self.by_clock else step)
    pretraining/config/test_schedule.py
gradients: clipping | pretraining/engine/gradients.py
    - find_clip_factor(norm, self.clip_grad)
    + find_clip_factor(norm * self._ranks, self.clip_grad)
    pretraining/engine/test_gradients.py::test_ranks_move_by_the_sum_of_their_gradients
same bits: the limit of a gradient | pretraining/engine/fixed_point.py
    - return LARGEST / self.addends
    + return LARGEST
    pretraining/engine/test_fixed_point.py
same bits: where shares end | pretraining/engine/fixed_point.py
    - begin = border if size <= BLOCK else -(-begin // BLOCK) * BLOCK
    + pass
    pretraining/engine/test_fixed_point.py
export: the name of a weight | pretraining/architectures/bert.py
    - for name in ("query", "key", "value")]
    + for name in ("key", "query", "value")]
    pretraining/architectures/test_counterparts.py::test_logits_and_gradients_are_those_of_transformers
export: the id that pads | pretraining/huggingface/config.py
    - "pad_token_id": special.pad
    + "pad_token_id": special.unk
    pretraining/architectures/test_published_folders.py
code in a file of weights | pretraining/huggingface/folders.py
    - torch.load(path, map_location="cpu", weights_only=True)
    + torch.load(path, map_location="cpu", weights_only=False)
    pretraining/huggingface/test_folders.py::test_damage_is_named
MCC | finetuning/tasks/scores.py
    - items * right.sum() - true @ given
    + items * right.sum() - true @ true
    finetuning/tasks/test_scores.py
NER: where an entity begins | finetuning/tasks/ner.py
    - if tag[0] == "I" and tag[1:] != before[1:] else tag
    + if tag[0] == "I" and before == OUTSIDE else tag
    finetuning/tasks/test_ner.py
SQuAD: where an answer begins | finetuning/tasks/spans.py
    - first = np.searchsorted(offsets[:, 1], start, side="right")
    + first = np.searchsorted(offsets[:, 1], start, side="left")
    finetuning/tasks/test_squad.py
"""
"""The breaks: name and file, the text there, the text in its place, and tests."""


def read_table() -> dict[str, Break]:
    """Reads the breaks, by their names."""
    lines = iter(map(str.strip, TABLE.strip().splitlines()))
    rows = ((*head.split(" | "), old[2:], new[2:], tests) for head, old, new, tests in zip(*[lines] * 4, strict=True))
    return {name: Break(*others) for name, *others in rows}


def copy_checkout(folder: Path) -> Path:
    """Copies the files that git tracks, as they are in this checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in (Path(name) for name in listed.split("\0") if (ROOT / name).is_file()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    return folder


def run_python(copy: Path, compiled: str, *words: str) -> tuple[int, str]:
    """Runs Python in the copy, whose product it imports; returns its code and output. `compiled` names the folder in
    which numba keeps what it compiles."""
    folder = copy.parent
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "NUMBA_CACHE_DIR": str(folder / compiled)}
    environment = {**os.environ, **caches, "PYTHONPATH": str(copy)}
    command = [sys.executable, *words]
    ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def run_tests(copy: Path, compiled: str, tests: Sequence[str]) -> tuple[int, str]:
    """Runs tests of the copy until one fails; returns pytest's code and output."""
    return run_python(copy, compiled, "-m", "pytest", "-xq", "-n0", "-p", "no:cacheprovider", "--timeout=200", *tests)


def try_break(copy: Path, each: Break) -> tuple[str, str]:
    """Breaks the copy, runs the tests and mends it; returns the test that fails, empty if none does, and what is said.

    numba does not notice that what a function calls in another file has changed: after a change in a file with compiled
    functions it compiles all anew.
    """
    path = copy / each.file
    text = path.read_text()
    if text.count(each.old) != 1:
        return "", f"{each.file}: the text to replace is there {text.count(each.old)} times"
    path.write_text(text.replace(each.old, each.new))
    shutil.rmtree(copy.parent / "anew", ignore_errors=True)
    try:
        compiled = "anew" if "@compiled" in text else "compiled"
        code, output = run_tests(copy, compiled, [f"tests/{test}" for test in each.tests.split()])
    finally:
        shutil.copy2(ROOT / each.file, path)
    found = FAILED.search(output)
    return found[1] if found and code == 1 else "", f"pytest ended with {code}\n{output[-3000:]}"


def main(names: Sequence[str]) -> int:
    """Tries the breaks of these names, or all; returns the exit code."""
    breaks = read_table()
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_checkout(Path(folder).resolve() / "checkout")
        _, there = run_python(copy, "compiled", "-c", "import data_prep; print(data_prep.__file__)")
        assert there.startswith(str(copy)), f"not the copy is imported: {there}"
        caught = []
        for name in names or breaks:
            begin = time.monotonic()
            test, output = try_break(copy, breaks[name])
            found = f"caught by {test}" if test else "NOT CAUGHT"
            print(f"{name:38} {time.monotonic() - begin:3.0f} s  {found}", flush=True)
            caught.append(test)
            if not test:
                print(output, file=sys.stderr)
        code, output = run_tests(copy, "compiled", [*dict.fromkeys(filter(None, caught))]) if any(caught) else (0, "")
    print(f"{sum(map(bool, caught))} of {len(caught)} are caught; without a break these tests ", end="")
    print(f"do not pass either:\n{output}" if code else "pass")
    return int(bool(code) or not all(caught))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
