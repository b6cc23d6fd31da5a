"""Proves that a change loses nothing: two checkouts do the same work by their commands, and the results are compared.

python tests/support/same_results.py BEFORE AFTER [OUT]

Shards, first weights, twenty steps in eight ways to train, exported folders and plans must be the same; what one
checkout began, the other one must end with the same weights. Only cards, seconds, speeds and memory may differ. It ends
with 1 where something differs, and names it. OUT keeps what was made (default: a temporary folder). Takes 6 minutes on
2 cores; neither checkout is imported.
"""

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PHASES = enumerate([(12, 8), (6, 8), (2, 4)])
PHASE = "--phases.{0}.steps {1} --phases.{0}.batch {2} --phases.{0}.micro_batch {3}"
SHRUNK = """
--recipe bert_mini --model.size tiny --model.dropout 0.1 --model.attention_dropout 0.1 --precision.dtype fp32
--logging.every 1 --checkpoints.every 10 --evaluation.every 10 --evaluation.examples 32
""".split()
SHRUNK += [word for number, (steps, batch) in PHASES for word in PHASE.format(number, steps, batch, batch // 2).split()]
WAYS: dict[str, tuple[int, list[str]]] = {
    "adamw-fp32": (1, []),
    "adamw-bf16-2-ranks": (2, ["--precision.dtype", "bf16"]),
    "adamw-zero-3": (2, ["--parallel.zero", "3"]),
    "lamb-fp32-2-ranks": (2, ["--optimizer.name", "lamb"]),
    "lamb-bf16": (1, ["--optimizer.name", "lamb", "--precision.dtype", "bf16"]),
    "lamb-bf16-zero-3": (1, ["--optimizer.name", "lamb", "--precision.dtype", "bf16", "--parallel.zero", "3"]),
    "muon-fp32": (1, ["--optimizer.name", "muon"]),
    "muon-bf16-2-ranks": (2, ["--optimizer.name", "muon", "--precision.dtype", "bf16"]),
}
"""Ranks and options of each way to train."""
FIRST_WEIGHTS = ["--phases.0.learning_rate", "1e-30", "--phases.0.steps", "1", "--stop-after", "start"]
"""A step that moves no weight: its checkpoint has the weights that a run starts with."""
BEGUN = "lamb-bf16"
"""The way to train that BEFORE begins and AFTER ends."""
SAME_BITS = ["--parallel.same_bits", "true", "--compute.threads", "1"]
PLANS = {
    "bert_mini": ["--logging.peak_flops", "1e12"],
    "bert_base_adam": ["--gpu", "a100-80", "--ranks", "8"],
    "bert_large_lamb": ["--gpu", "h100-80", "--ranks", "64"],
}
"""Recipes whose plans are compared, with the options of `--check`."""
VARIES = re.compile(r"second|time|per_|memory|utilisation|waiting|sha256")
"""Names of values that differ from run to run; checksums cover such values, and the files themselves are compared."""


class Checkout:
    """A checkout whose commands are run, and the folder that gets what they make."""

    def __init__(self, root: Path, out: Path):
        self.root = root.resolve()
        self.out = out
        out.mkdir(parents=True)

    def run(self, script: str, words: Sequence[str], ranks: int = 1) -> str:
        """Runs a command of the checkout; returns what it printed."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(self.root), "COLUMNS": "200"}
        command = [sys.executable, *launcher, str(self.root / script), *words]
        done = subprocess.run(command, env=os.environ | variables, cwd=self.out, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout

    def train(self, name: str, shards: Path, *words: str, ranks: int = 1) -> None:
        """Trains the small model, in the folder of this name."""
        data = ["--data", str(shards), "--out", str(self.out / name)]
        self.run("pretraining/train.py", [*SHRUNK, *data, *words], ranks)

    def make(self, shards: Path) -> None:
        """Trains in all ways, and plans; each checkout reads the same shards."""
        self.train("first-weights", shards, *FIRST_WEIGHTS)
        for name, (ranks, words) in WAYS.items():
            self.train(name, shards, *words, ranks=ranks)
        for recipe, options in PLANS.items():
            words = ["--recipe", recipe, "--data", str(shards), "--check", *options]
            (self.out / f"{recipe}.plan").write_text(self.run("pretraining/train.py", words))


def differences(before: Path, after: Path) -> Iterator[str]:
    """Names what differs between all that two checkouts have made."""
    files = ((side, path) for side in (before, after) for path in side.rglob("*") if path.is_file())
    names = sorted({str(path.relative_to(side)) for side, path in files})
    for name in names:
        one, other = before / name, after / name
        if not (one.exists() and other.exists()):
            if compares(name):
                yield f"{name}: only {'before' if one.exists() else 'after'}"
        elif Path(name).name in ("checkpoint.json", "metrics.jsonl"):
            yield from (f"{name}: {difference}" for difference in differing_values(read(one), read(other)))
        elif name.endswith(".plan"):
            if (found := numbers(one)) != (now := numbers(other)):
                yield f"{name}: {sorted(set(found) ^ set(now))}"
        elif compares(name) and not filecmp.cmp(one, other, shallow=False):
            yield f"{name}: other bytes"


def compares(name: str) -> bool:
    """Whether a file belongs to the results: shards, weights, and all of an exported folder but its card."""
    return name.startswith("shards/") or name.endswith(".safetensors") or ("/export/" in name and "README" not in name)


def read(path: Path) -> Any:
    """The values of a file with JSON, or with a line of JSON for each record."""
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def differing_values(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Names the values that differ, but for those that differ from run to run."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if not VARIES.search(key):
                yield from differing_values(one.get(key), other.get(key), f"{place}.{key}" if place else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differing_values(*pair, f"{place}[{number}]")
    elif one != other:
        yield f"{place}: {one!r} is now {other!r}"


def numbers(path: Path) -> list[str]:
    """All numbers that a plan prints, in their order."""
    return re.findall(r"\d[\d,.]*", path.read_text())


def compare(before_root: Path, after_root: Path, folder: Path) -> list[str]:
    """Lets both checkouts work, one core for each; returns what differs."""
    before, after = Checkout(before_root, folder / "before"), Checkout(after_root, folder / "after")
    sides = (before, after)
    shards = before.out / "shards"
    with ThreadPoolExecutor(2) as pool:
        words = ["--docs", "demo", "--duplicates", "2", "--vocab-size", "2000", "--workers", "1", "--out", "shards"]
        list(pool.map(lambda side: side.run("data_prep/shard.py", words), sides))
        list(pool.map(lambda side: side.make(shards), sides))
    ranks, options = WAYS[BEGUN]
    before.train("begun", shards, *options, "--stop-after", "start", ranks=ranks)
    shutil.copytree(before.out / "begun", after.out / "begun")
    after.train("begun", shards, *options, ranks=ranks)
    shutil.rmtree(before.out / "begun")
    shutil.copytree(before.out / BEGUN, before.out / "begun")
    found = list(differences(before.out, after.out))
    for ranks in (1, 3):  # by AFTER alone, which compares itself
        after.train(f"on-{ranks}", shards, *SAME_BITS, ranks=ranks)
    one, three = (after.out / f"on-{ranks}" / "export" / "model.safetensors" for ranks in (1, 3))
    if not filecmp.cmp(one, three, shallow=False):
        found.append("parallel.same_bits: three ranks have exported other bits than one")
    if not any((after.out / name / "export" / "model.safetensors").exists() for name in WAYS):
        found.append("nothing was exported")
    return found


def main(words: list[str]) -> int:
    """Compares two checkouts; returns 1 where something differs."""
    before, after, *out = map(Path, words)
    with tempfile.TemporaryDirectory() as scratch:
        folder = out[0].resolve() if out else Path(scratch)
        found = compare(before, after, folder)
    print("\n".join(found) or f"{len(WAYS)} ways to train, shards, exports and plans are the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
