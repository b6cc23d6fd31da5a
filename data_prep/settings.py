"""What a user can set: flags of shard.py, or the same names in a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from data_prep.common.errors import UserError
from data_prep.readers import READERS

SHORTEST, LONGEST = 8, 512
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
Format = Literal["mediawiki", "wikiextractor", "parquet", "jsonl", "sentences", "text", "demo"]

NOT_IN_THE_BYTES = ("config", "docs", "out", "vocab", "workers")
"""settings that do not change what comes out, or that the plan records in a better form"""


@dataclass(frozen=True)
class Settings:
    """Turns text into training shards: split into sentences, cut into pieces, paired, masked, shuffled.

    Restart it with the same command after any interruption; it goes on where it was.
    """

    docs: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Files, folders or globs to read; NAME=PATH names a source; `demo` is a corpus that every machine has."""
    out: Path | None = None
    """Output folder (default: data/<names of the sources>)."""
    config: Path | None = None
    """TOML file with any of these settings; flags come before it."""
    format: Format | None = None
    """Format of the files (default: found out from their content)."""
    text_field: str = "text"
    """Field or column with the text, in JSON lines and Parquet."""
    language: str = "en"
    """Language of the text, for the ends of sentences: a code such as en, de or zh."""
    errors: Literal["fail", "replace", "skip"] = "fail"
    """What to do with what cannot be read: stop, replace bad characters, or leave the document out and list it."""
    vocab: Path | None = None
    """A vocab.txt to use (default: train one from the text)."""
    vocab_size: int = 30522
    """Number of pieces of a vocabulary that is trained."""
    cased: bool = False
    """Keep case and accents."""
    lengths: tuple[int, ...] = (128, 512)
    """Lengths of the examples, one set of shards for each."""
    duplicates: int = 5
    """How many times the text is masked anew, one set of shards for each."""
    max_predictions: tuple[int, ...] = ()
    """Most masked pieces of an example, one number for each length (default: 20 at 128, 80 at 512)."""
    masking: Literal["token", "whole-word"] = "token"
    """What is masked: single pieces, or all pieces of a word."""
    mask_rate: float = 0.15
    """Share of the pieces that is masked."""
    mask_split: tuple[float, float, float] = (80, 10, 10)
    """Of the masked pieces, how many become [MASK], become a random piece, stay; in percent."""
    short_probability: float = 0.1
    """Share of the documents that are made into examples of a random, shorter length."""
    pairs: Literal["nsp", "none"] = "nsp"
    """Pairs of segments for next-sentence prediction, or full sentences up to the length."""
    validation: float = 0.005
    """Share of the documents held out for validation; at least one of them, unless 0."""
    shard_size: str = "64MB"
    """Size of a shard, about."""
    workers: int | None = None
    """Processes (default: one for each core); under mpirun or srun the ranks count instead."""
    seed: int = 12345
    """Seed of everything random."""

    @property
    def shard_bytes(self) -> int:
        return parse_size(self.shard_size)

    @property
    def sources(self) -> list[str]:
        """All that was given as --docs."""
        return [each for group in self.docs for each in group]

    def predictions(self, length: int) -> int:
        """The most masked pieces of an example of this length."""
        if self.max_predictions:
            return self.max_predictions[self.lengths.index(length)]
        return math.ceil(length * self.mask_rate * 25 / 24)  # 20 of 128 and 80 of 512 at a rate of 0.15

    def recorded(self) -> dict[str, Any]:
        """What decides the output, for the manifest and for comparison with an earlier run."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_IN_THE_BYTES}
        values["max_predictions"] = [self.predictions(length) for length in self.lengths]
        values["mask_split"] = [float(share) for share in self.mask_split]
        values["shard_size"] = self.shard_bytes
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse_size(text: str) -> int:
    """Bytes from `64MB`; raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(text)
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_settings(arguments: list[str]) -> Settings:
    """From the command line and the TOML file it may name; every fault of them is reported at once."""
    settings = tyro.cli(
        Settings, args=arguments, default=_defaults(arguments), prog="shard.py", config=(tyro.conf.FlagCreatePairsOff,)
    )
    faults = find_faults(settings)
    if faults:
        raise UserError("\n".join(faults))
    return settings


def _defaults(arguments: list[str]) -> Settings:
    """The settings of the file given as --config, if one is."""
    path: str | None = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else next(iter(arguments[at + 1 :]), None)
    if path is None:
        return Settings()
    settings = read_config(Path(path))
    given = any(argument.partition("=")[0] == "--docs" for argument in arguments)
    return dataclasses.replace(settings, docs=()) if given else settings


def read_config(path: Path) -> Settings:
    """The settings of a TOML file; keys are the names of the flags, with - or _."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path}: cannot be read: {error}") from error
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values, faults = {}, []
    for key, value in content.items():
        name = key.replace("-", "_")
        if name == "config":
            faults.append(f"--config {path}: a file of settings cannot name another one")
            continue
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            faults.append(f"--config {path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            continue
        try:
            values[name] = _typed(name, value)
        except (TypeError, ValueError):
            faults.append(f"--config {path}: {key} = {value!r}: not a value for this setting (see shard.py --help)")
    if faults:
        raise UserError("\n".join(faults))
    return Settings(**values)


def _typed(name: str, value: Any) -> Any:
    """A value from TOML as the type that the setting has; raises TypeError or ValueError."""
    if name == "docs":
        return ((value,) if isinstance(value, str) else tuple(str(each) for each in value),)
    if name in ("out", "vocab"):
        return Path(value)
    default = 1 if name == "workers" else Settings.__dataclass_fields__[name].default
    if isinstance(default, bool) or isinstance(value, bool):
        if type(default) is not type(value):
            raise TypeError(name)
        return value
    if isinstance(default, tuple):
        kind = float if name == "mask_split" else int
        return tuple(_number(kind, each) for each in value)
    if isinstance(default, int | float):
        return _number(type(default), value)
    if default is not None and not isinstance(value, type(default)):
        raise TypeError(name)
    return value


def _number(kind: type, value: Any) -> Any:
    """A number that loses nothing by being of this kind; raises TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise TypeError(value)
    return kind(value)


def find_faults(settings: Settings) -> list[str]:
    """All that cannot be, each with its cure."""
    s = settings
    faults = []

    def check(holds: bool, message: str) -> None:
        if not holds:
            faults.append(message)

    check(bool(s.sources), "nothing to read: give --docs a file, a folder or a glob (or try --docs demo)")
    check(s.format in (None, *READERS), f"--format {s.format}: there is {', '.join(READERS)}")
    check(bool(s.lengths), "--lengths: give at least one, such as 128")
    for length in s.lengths:
        check(
            SHORTEST <= length <= LONGEST, f"--lengths {length}: from {SHORTEST} to {LONGEST}, the positions BERT has"
        )
    check(len(set(s.lengths)) == len(s.lengths), "--lengths: each length once")
    check(
        len(s.max_predictions) in (0, len(s.lengths)),
        f"--max-predictions: one number for each of the {len(s.lengths)} lengths",
    )
    for number, length in zip(s.max_predictions, s.lengths, strict=False):
        check(0 < number <= length - 3, f"--max-predictions {number}: from 1 to {length - 3} at length {length}")
    check(1 <= s.duplicates <= 1000, f"--duplicates {s.duplicates}: from 1 to 1000")
    check(len(s.mask_split) == 3, "--mask-split: three shares, such as 80 10 10")
    check(0 < s.mask_rate < 1, f"--mask-rate {s.mask_rate}: a share between 0 and 1")
    check(
        min(s.mask_split) >= 0 and math.isclose(sum(s.mask_split), 100, abs_tol=1e-6),
        f"--mask-split {' '.join(map(str, s.mask_split))}: three shares in percent that make 100",
    )
    check(0 <= s.short_probability <= 1, f"--short-probability {s.short_probability}: from 0 to 1")
    check(0 <= s.validation < 1, f"--validation {s.validation}: a share from 0, below 1")
    check(s.workers is None or s.workers >= 1, f"--workers {s.workers}: at least 1")
    check(0 <= s.seed < 2**63, f"--seed {s.seed}: from 0 to 2^63 - 1")
    check(s.vocab_size >= 100, f"--vocab-size {s.vocab_size}: at least 100; 30522 is usual")
    for name, allowed in (
        ("errors", ("fail", "replace", "skip")),
        ("masking", ("token", "whole-word")),
        ("pairs", ("nsp", "none")),
    ):
        check(getattr(s, name) in allowed, f"--{name} {getattr(s, name)}: one of {', '.join(allowed)}")
    try:
        check(64_000 <= s.shard_bytes <= 10**9, f"--shard-size {s.shard_size}: from 64KB to 1GB")
    except ValueError:
        faults.append(f"--shard-size {s.shard_size}: a number and a unit, such as 64MB")
    return faults
