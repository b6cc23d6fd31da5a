"""The settings of shard.py: what they mean, which values they cannot have, and how flags and a TOML file give them."""

from __future__ import annotations

import math
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from pydantic import BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter

from data_prep.common.errors import Checks, UserError
from data_prep.common.flags import Heading, Shown, read_flags
from data_prep.common.languages import language_fault
from data_prep.common.reading import Form, read_settings
from data_prep.common.sections import Removed, Section, list_settings, whole
from data_prep.common.toml_text import Key

SHORTEST, LONGEST = 8, 8192  # lengths of examples; ModernBERT has as many positions
TEXT_FIELD = "text"  # the field with the text, where nothing else is said
LEAST_NEAR = 0.5  # share that near copies have in common: below it, most pairs that are compared are none
MOST_WEIGHT = 20  # times that a document is repeated at most

FEWEST_HELD_OUT = 10  # documents or passages for a meaningful validation score
LARGEST_SHARE = 0.05  # share of the text that validation should have at most, since training lacks it

MASK_SPLIT = (80.0, 10.0, 10.0)
"""Of the masked pieces, how many become [MASK], become a random piece, stay, in percent: BERT's, and RoBERTa's."""
SHORT = 0.1
"""Share of the documents that are made into pairs of a random, shorter length, as in BERT's code."""
NO_FORMULAS = {"formulas": "drop"}
"""What manifests say of paragraphs of wikitext with formulas, which are left out; in older ones it may be "word"."""

Errors = Literal["fail", "replace", "skip"]
MaskedUnit = Literal["token", "whole-word"]
Pairing = Literal["nsp", "none", "full-sentences"]


def group_values(value: Any) -> Any:
    """Groups the values of a repeatable flag as a command line does; a file of settings has one value or a list."""
    if isinstance(value, str | list):
        return ((value,),) if isinstance(value, str) else (tuple(value),)
    return value


Several = tyro.conf.UseAppendAction[
    Annotated[tuple[tuple[str, ...], ...], Field(strict=False), BeforeValidator(group_values)]
]
Whole = Annotated[int, BeforeValidator(whole)]
File = Annotated[Path, Field(strict=False)]


TEXT, DOCUMENTS, VOCABULARY = Heading("Which text"), Heading("Which of its documents"), Heading("Vocabulary")
EXAMPLES, RUNNING = Heading("Training examples"), Heading("How it runs")


class Fact(Enum):
    """What is true of a setting of shard.py; it stands in the annotation of the setting."""

    NOT_IN_PLANS = "It changes nothing in the shards, or it names a file whose content is in the plan instead."
    CUTS = "It decides how text is cut into pieces."
    READS = "It decides which text is read."
    BY_SOURCE = "Each source may have its own value."
    FILTERS = "It leaves documents out while they are read; the filters are asked in the order of the settings."
    KEPT = "Shards that are made of documents in pieces take it over from these."
    RENAMES_TASKS = "It is part of the names of the tasks that read a file, so that another value reads the file anew."
    LATER = "It came after the first shards, and is in a fingerprint only where it is not the default."


class Settings(Section):
    """Turns text into training shards: splits it into sentences, cuts these into pieces, and makes examples, masked and
    shuffled.

        python data_prep/shard.py --docs wiki/

    The same command continues after any interruption.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # reported with all other faults by find_faults
    removed: ClassVar = {
        "formulas": Removed("drop", "sentences around a word in place of a formula teach little"),
        "max_predictions": Removed(None, "20 at length 128, 80 at 512, and likewise at others; --mask-rate changes it"),
        "mask_split": Removed(MASK_SPLIT, "BERT, RoBERTa and their successors have it"),
        "short_probability": Removed(None, f"{SHORT} with --pairs nsp, 0 without pairs; leave it out"),
    }

    docs: Annotated[Several, TEXT, Fact.NOT_IN_PLANS] = ()
    """Files, folders or globs to read; NAME=PATH names a source; `demo` is a small corpus that every machine has."""
    origins: Annotated[Several, TEXT, Shown.SELDOM, tyro.conf.arg(name="from"), Fact.NOT_IN_PLANS] = ()
    """Folders of shards whose tokenized documents are used again, without reading their text."""
    out: Annotated[File | None, TEXT, Fact.NOT_IN_PLANS] = None
    """Output folder (default: data/<names of the sources>)."""
    format: Annotated[Several, TEXT, Fact.READS, Fact.BY_SOURCE, Fact.RENAMES_TASKS] = ()
    """Format of the files, or of those of one source as NAME=FORMAT, such as text, jsonl, parquet or mediawiki
    (default: detected for each file)."""
    text_field: Annotated[Several, TEXT, Shown.SELDOM, Fact.READS, Fact.BY_SOURCE, Fact.RENAMES_TASKS] = ()
    """Field or column with the text, in JSON lines, Parquet and CSV, or NAME=FIELD for one source (default: text)."""
    language: Annotated[Several, TEXT, Fact.READS, Fact.BY_SOURCE] = ()
    """Language by whose rules sentences end: a code such as de, or NAME=CODE for one source (default: English)."""
    errors: Annotated[Errors, TEXT, Shown.SELDOM, Fact.KEPT] = "fail"
    """What to do with what cannot be read: stop, replace bad characters, or leave document or file out and list it."""
    min_words: Annotated[Whole | None, DOCUMENTS, Shown.SELDOM, Fact.READS, Fact.FILTERS, Fact.LATER] = None
    """Leave out documents with fewer words, such as 50; white space separates words."""
    max_words: Annotated[Whole | None, DOCUMENTS, Shown.SELDOM, Fact.READS, Fact.FILTERS, Fact.LATER] = None
    """Leave out documents with more words, such as 100000."""
    min_letters: Annotated[float | None, DOCUMENTS, Shown.SELDOM, Fact.READS, Fact.FILTERS, Fact.LATER] = None
    """Leave out documents in which a smaller share of words has a letter, such as 0.8."""
    max_repeated_lines: Annotated[float | None, DOCUMENTS, Shown.SELDOM, Fact.READS, Fact.FILTERS, Fact.LATER] = None
    """Leave out documents in which a larger share of lines repeats earlier lines, such as 0.3."""
    without_words: Annotated[
        File | None, DOCUMENTS, Shown.SELDOM, Fact.READS, Fact.FILTERS, Fact.LATER, Fact.NOT_IN_PLANS
    ] = None
    """Leave out documents that have a word of this file: a word or a phrase a line, whatever its case."""
    only_language: Annotated[str | None, DOCUMENTS, Shown.SELDOM, Fact.READS, Fact.FILTERS, Fact.LATER] = None
    """Leave out documents that are in another language than that of this code, such as en; it takes a package with a
    model: pip install py3langid."""
    drop_copies: Annotated[bool, DOCUMENTS, Fact.LATER] = False
    """Leave out documents whose text an earlier document has, and count them."""
    near_copies: Annotated[float | None, DOCUMENTS, Fact.LATER] = None
    """Leave out near copies of earlier documents: at least this share of all groups of five words of the two documents
    is in both, such as 0.8. Count them, and list some."""
    max_share: Annotated[Several, DOCUMENTS, Shown.SELDOM, Fact.LATER] = ()
    """Largest share of the text that a source may have, as NAME=SHARE: random documents above it are left out and
    counted."""
    weight: Annotated[Several, DOCUMENTS, Shown.SELDOM, Fact.LATER] = ()
    """How many times the documents of a source are to be there for training, as NAME=WEIGHT: 2 repeats each, 0.5 leaves
    out half of them, drawn at random."""
    vocab: Annotated[str | None, VOCABULARY, Fact.CUTS, Fact.NOT_IN_PLANS] = None
    """Vocabulary to use (default: train one from the text): a vocab.txt, a folder of transformers, of shards or of a
    run, or the name of a model on the Hugging Face hub."""
    tokenizer: Annotated[str | None, VOCABULARY, Fact.CUTS, Fact.LATER] = None
    """Kind of vocabulary to train: wordpiece, as BERT's, bytelevel, as RoBERTa's, or another file of
    data_prep/vocabulary/kinds (default: wordpiece)."""
    extend: Annotated[Whole, VOCABULARY, Shown.SELDOM, Fact.CUTS, Fact.LATER] = 0
    """With --vocab: add this many words of the text, those cut into most pieces."""
    vocab_size: Annotated[Whole, VOCABULARY, Fact.CUTS] = 30522
    """Pieces of the vocabulary to train."""
    cased: Annotated[bool, VOCABULARY, Fact.CUTS] = False
    """Keep case and accents."""
    lengths: Annotated[tuple[Whole, ...], EXAMPLES, Field(strict=False)] = (128, 512)
    """Lengths of the examples in pieces, a set of shards for each."""
    duplicates: Annotated[Whole, EXAMPLES] = 5
    """How many times the text is masked, a set of shards for each; 1 if training draws the masks itself."""
    masking: Annotated[MaskedUnit, EXAMPLES] = "token"
    """What is masked: single pieces, or all pieces of a word."""
    mask_rate: Annotated[float, EXAMPLES, Shown.SELDOM] = 0.15
    """Share of the pieces that is masked."""
    pairs: Annotated[Pairing, EXAMPLES] = "nsp"
    """Examples of two segments for next-sentence prediction, as BERT's; of sentences of one document (none); or of one
    document after another with a separator between them, as RoBERTa's (full-sentences)."""
    validation: Annotated[float, EXAMPLES] = 0.005
    """Share of the documents held out for validation; at least one of them, unless 0."""
    shard_size: Annotated[str, EXAMPLES, Shown.SELDOM] = "64MB"
    """Size of a shard, about."""
    seed: Annotated[Whole, EXAMPLES, Shown.SELDOM] = 12345
    """Seed of everything random."""
    workers: Annotated[Whole | None, RUNNING, Fact.NOT_IN_PLANS] = None
    """Processes (default: one for each core, as memory allows). Under mpirun or srun the ranks do the work instead."""
    check: Annotated[bool, RUNNING, Fact.NOT_IN_PLANS] = False
    """Print the time and disk that a run will take, and stop."""
    documents_only: Annotated[bool, RUNNING, Shown.SELDOM, Fact.NOT_IN_PLANS] = False
    """Make no shards: keep the documents in pieces, for --from."""
    no_documents: Annotated[bool, RUNNING, Shown.SELDOM, Fact.NOT_IN_PLANS] = False
    """Keep no documents beside the shards, where the disk has no room for them."""
    config: Annotated[File | None, RUNNING, Shown.SELDOM, Fact.NOT_IN_PLANS] = None
    """TOML file with any of these settings; flags override it."""

    @property
    def shard_bytes(self) -> int:
        """Parses the size of a shard in bytes; raises ValueError if it is no size."""
        return TypeAdapter(ByteSize).validate_python(self.shard_size)

    @property
    def short_probability(self) -> float:
        """Returns the share of the documents made into shorter examples: none without pairs, as in RoBERTa."""
        return SHORT if self.pairs == "nsp" else 0.0

    @property
    def sources(self) -> list[str]:
        """Lists all that was given as --docs, however often the flag was given."""
        return join_values(self.docs)

    @property
    def formats(self) -> dict[str, str]:
        """Maps the names of sources to their formats, as given; "" stands for all others."""
        return map_by_source(join_values(self.format))

    @property
    def text_fields(self) -> dict[str, str]:
        """Maps the names of sources to the fields that have their texts; "" stands for all others."""
        return {"": TEXT_FIELD, **map_by_source(join_values(self.text_field))}

    @property
    def max_shares(self) -> dict[str, float]:
        """Maps the names of sources to the largest shares of the text that they may have."""
        return {name: float(share) for name, share in map_by_source(join_values(self.max_share)).items()}

    @property
    def weights(self) -> dict[str, float]:
        """Maps the names of sources to their weights."""
        return {name: float(weight) for name, weight in map_by_source(join_values(self.weight)).items()}

    @property
    def languages(self) -> dict[str, str]:
        """Maps the names of sources to their languages, as given; "" stands for all others."""
        return map_by_source(join_values(self.language))

    def language_of(self, source: str) -> str | None:
        """Returns the language of a source, if it was given."""
        return self.languages.get(source, self.languages.get(""))

    def text_field_of(self, source: str) -> str:
        """Names the field or column that has the texts of a source."""
        return self.text_fields.get(source, self.text_fields[""])

    def predictions(self, length: int) -> int:
        """Returns the most masked pieces of an example of this length."""
        return math.ceil(length * self.mask_rate * 25 / 24)  # 20 of 128 and 80 of 512 at a rate of 0.15

    def record_values(self) -> dict[str, Any]:
        """Lists what decides the output, for the manifest and for comparison with an earlier run."""
        values = {name: value for name, value in self if name not in list_by(Fact.NOT_IN_PLANS)}
        values |= {"mask_split": MASK_SPLIT, "short_probability": self.short_probability, **NO_FORMULAS}
        values["max_predictions"] = [self.predictions(length) for length in self.lengths]
        values["shard_size"] = self.shard_bytes
        if values["tokenizer"] is None:  # manifests name a kind since there are several
            del values["tokenizer"]
        values["max_share"], values["weight"] = self.max_shares, self.weights
        by_name = {"format": self.formats, "text_field": self.text_fields, "language": self.languages}
        for name, named in by_name.items():
            values[name] = named if named.keys() - {""} else named.get("")
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def list_by(*facts: Fact) -> list[str]:
    """Lists the settings of which any of these facts is true."""
    return list_settings(Settings, *facts)


def count_held_out(num_documents: int, share: float) -> int:
    """Returns the number of documents to hold out: a share of all, but at least FEWEST_HELD_OUT.

    If those are too large a part of all documents, it is at least one.
    """
    if not share:
        return 0
    fewest = FEWEST_HELD_OUT if LARGEST_SHARE * num_documents >= FEWEST_HELD_OUT else 1
    return min(max(fewest, round(num_documents * share)), num_documents - 1)


def join_values(groups: tuple[tuple[str, ...], ...]) -> list[str]:
    """Lists all values of a flag that may be given several times, each time with several values."""
    return [value for group in groups for value in group]


def map_by_source(values: list[str]) -> dict[str, str]:
    """Maps the names of sources to values given as NAME=VALUE; a VALUE alone is for all others, under the name ""."""
    return {name: value for name, _, value in (given.rpartition("=") for given in values)}


def spell_flag(name: str) -> str:
    """Spells a setting as its flag."""
    return "--from" if name == "origins" else f"--{name.replace('_', '-')}"


def find_faults(settings: Settings) -> list[str]:
    """Lists all settings that cannot be, with what they can be instead, so that a user corrects them in one go."""
    checks = (_check_text, _check_documents, _check_sources, _check_examples, _check_numbers)
    return [message for check in checks for holds, message in check(settings) if not holds]


def _check_text(s: Settings) -> Checks:
    """Checks what is read, and as what."""
    nothing = "nothing to read: give --docs a file, a folder or a glob (or try --docs demo)"
    yield s.sources or join_values(s.origins), nothing
    for name in list_by(Fact.BY_SOURCE):
        values = join_values(getattr(s, name))
        once = len(map_by_source(values)) == len(values)
        yield once, f"{spell_flag(name)} {' '.join(values)}: once for each source (as NAME=VALUE), once for all others"
    for said in join_values(s.language):
        fault = language_fault(said.rpartition("=")[2])
        yield not fault, f"--language {said}: {fault}"


def _check_documents(s: Settings) -> Checks:
    """Checks the thresholds of filters, whether documents in pieces are kept, and the folders of --from."""
    for flag, number in (("--min-words", s.min_words), ("--max-words", s.max_words)):
        yield number is None or number >= 1, f"{flag} {number}: at least 1"
    between = s.min_words is None or s.max_words is None or s.min_words <= s.max_words
    yield between, f"--max-words {s.max_words}: not below --min-words {s.min_words}"
    letters, repeated = s.min_letters, s.max_repeated_lines
    yield letters is None or 0 < letters <= 1, f"--min-letters {letters}: a share above 0, up to 1; 0.8 is usual"
    fit = repeated is None or 0 <= repeated < 1
    yield fit, f"--max-repeated-lines {repeated}: a share from 0, below 1; 0.3 is usual"
    yield not (s.documents_only and s.no_documents), "--no-documents: leaves nothing of --documents-only"
    yield s.out or not s.origins, "--from: name the folder of the new shards: --out FOLDER"
    both = s.documents_only and s.origins
    yield not both, "--documents-only: those of --from are there already; leave one of the two out"
    near = s.near_copies is None or LEAST_NEAR <= s.near_copies < 1
    yield near, f"--near-copies {s.near_copies}: from {LEAST_NEAR}, below 1; --drop-copies leaves out what is the same"


def _check_sources(s: Settings) -> Checks:
    """Checks the shares and weights of sources."""
    for said in join_values(s.max_share):
        name, _, share = said.rpartition("=")
        yield name and _is_between(share, 0, 1), f"--max-share {said}: NAME=SHARE, such as wiki=0.5"
    for said in join_values(s.weight):
        name, _, weight = said.rpartition("=")
        fit = name and _is_between(weight, 0, math.nextafter(MOST_WEIGHT, math.inf))
        yield fit, f"--weight {said}: NAME=WEIGHT above 0, up to {MOST_WEIGHT}, such as books=2"
    for flag, values in (("--max-share", join_values(s.max_share)), ("--weight", join_values(s.weight))):
        yield len(map_by_source(values)) == len(values), f"{flag} {' '.join(values)}: once for each source"


def _is_between(text: str, low: float, high: float) -> bool:
    """Returns whether a text is a number between two others."""
    try:
        return low < float(text) < high
    except ValueError:
        return False


def _check_examples(s: Settings) -> Checks:
    """Checks the lengths of examples, how many pieces of them are masked, and how."""
    yield bool(s.lengths), "--lengths: give at least one, such as 128"
    for length in s.lengths:
        yield SHORTEST <= length <= LONGEST, f"--lengths {length}: from {SHORTEST} to {LONGEST}"
    yield len(set(s.lengths)) == len(s.lengths), "--lengths: each length once"
    yield 1 <= s.duplicates <= 1000, f"--duplicates {s.duplicates}: from 1 to 1000"
    yield 0 < s.mask_rate < 1, f"--mask-rate {s.mask_rate}: a share between 0 and 1"


def _check_numbers(s: Settings) -> Checks:
    """Checks the settings that are one number."""
    yield 0 <= s.validation < 1, f"--validation {s.validation}: a share from 0, below 1"
    yield s.workers is None or s.workers >= 1, f"--workers {s.workers}: at least 1"
    yield 0 <= s.seed < 2**63, f"--seed {s.seed}: from 0 to 2^63 - 1"
    yield 0 <= s.extend <= 10**6, f"--extend {s.extend}: from 0 to 1000000"
    yield s.vocab or not s.extend, f"--extend {s.extend}: extends a vocabulary that exists; name it: --vocab"
    yield 100 <= s.vocab_size <= 10**6, f"--vocab-size {s.vocab_size}: from 100 to 1000000; 30522 is usual"
    try:
        yield 64_000 <= s.shard_bytes <= 10**9, f"--shard-size {s.shard_size}: from 64KB to 1GB"
    except ValueError:
        yield False, f"--shard-size {s.shard_size}: a number and a unit, such as 64MB"


def parse_settings(arguments: list[str]) -> Settings:
    """Reads the settings from the command line and the TOML file it may name; reports all faults of them at once."""
    read = partial(read_flags, Settings, arguments, "shard.py", "preparation")
    settings: Settings = read()
    if settings.config is not None:
        usual, kind = read_config(settings.config), tuple[tuple[str, ...], ...]
        several = [name for name, field in Settings.model_fields.items() if field.annotation == kind]
        settings = read(default=usual.model_copy(update=dict.fromkeys(several, ())))  # tyro would add to these
        not_given = {name: getattr(usual, name) for name in several if not getattr(settings, name)}
        settings = settings.model_copy(update=not_given)
    if faults := [*find_faults(settings), *_list_needing_text(settings, arguments)]:
        raise UserError("\n".join(faults))
    return settings


def _list_needing_text(s: Settings, arguments: list[str]) -> list[str]:
    """Lists what is asked of documents that are in pieces already, though it needs their text, as flag or in a file."""
    if not s.origins:
        return []
    usual, why = Settings(), "the documents of --from are in pieces already; it is for --docs beside them"
    names = list_by(Fact.CUTS) if s.sources else list_by(Fact.CUTS, Fact.READS)
    flags = {word.partition("=")[0].replace("_", "-") for word in arguments}
    asked = [name for name in names if spell_flag(name) in flags or getattr(s, name) != getattr(usual, name)]
    return [f"{spell_flag(name)} needs the text: {why}" for name in asked]


def read_config(path: Path) -> Settings:
    """Reads the settings of a TOML file, whose keys are the names of the flags, with - or _."""
    return read_settings(Form(Settings, flag="--config"), path, find_faults=lambda _: [], add=_name_as_flags)


def _name_as_flags(raw: dict[str, Any]) -> dict[Key, str]:
    """Spells the keys of a file as the settings are called here; returns what is wrong with them."""
    given = list(raw.items())
    faults: dict[Key, str] = {}
    raw.clear()
    for key, value in given:
        name = "origins" if key == "from" else key.replace("-", "_")
        if name == "config":
            faults[(name,)] = ": a file of settings cannot name another one"
        elif name in raw:
            faults[(name,)] = ": is there twice, with - and with _"
        else:
            raw[name] = value
    return faults
