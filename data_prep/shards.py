"""The contract between data preparation and everything after it: what a folder of shards holds.

    DATA/
      manifest.json                                what was made from what, with every file's checksum and counts
      vocab.txt  tokenizer.json                    the vocabulary, for us and for transformers
      documents.arrow                              number (= row), id, title and source of every document
      filtered.csv                                 some documents that filters left out while the text was read
      near-copies.csv                              some documents that were left out as near copies of others
      report.html                                  a page of all this, where show.py --report was asked for one
      documents/                                   the documents in pieces, of which other shards can be made
      length-128/duplicate-0/shard-00000.arrow     training examples, shuffled over the whole corpus
      length-128/validation/shard-00000.arrow      examples of the documents held out

A shard is one Arrow record batch, so that a reader maps it into memory and finds any row at once. A row is an example:

    pieces        `[CLS] A [SEP] B [SEP]` as the model reads it: masks applied, no padding; A of
                  `--pairs full-sentences` has a [SEP] between two documents
    masked        the predicted positions, ascending, with the pieces that stood there
    boundary      where B begins (segment 1); the length of `pieces` where there is no B
    random_next   the NSP label: whether B was drawn from another document
    document      the number of the document that A comes from, or begins in
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from data_prep.arrow_files import make_list_type, make_schema
from data_prep.common.arrays import smallest_type
from data_prep.common.errors import DamageError, UserError, quote
from data_prep.common.files import Amount, FileRecord, read_json, write_json
from data_prep.common.toml_text import dotted
from data_prep.seals import seal

FORMATS = (1, 2)  # 2: with `--pairs full-sentences`, where 1.0 would take what follows a separator for a segment B
MANIFEST = "manifest.json"
DOCUMENTS = "documents.arrow"
DOCUMENTS_SCHEMA = make_schema(id=pa.string(), title=pa.string(), source=pa.string())
NEAR_REPORT = "near-copies.csv"  # some near copies that were left out
REPORT = "report.html"  # a page of the folder for readers, which is no content of it: the manifest has no record of it
KEPT = "documents"  # the folder of documents in pieces
KEPT_FORMATS = (1, 2)  # versions of its files and of the rules by which text is cut: that of 1.0, and that of today
WORK = ".cloze-work"  # the folder of what a run needs until it is finished
PLAN = f"{WORK}/plan.json"  # there from the beginning of a run to its end

ANOTHER_NAME = "another name of"
"""How a manifest begins the reason for which a file is left out that is read by its first name."""
LONGEST_SHOWN = 60  # characters of a wrong value in a message
Positive = Annotated[Amount, Field(ge=1)]


@dataclass(frozen=True, order=True)
class ShardSet:
    """A set of shards: those of one length and one masking duplicate, or of the documents held out for validation."""

    length: int
    duplicate: int
    validation: bool = False

    @property
    def folder(self) -> str:
        """Names the folder of the set, relative to the output folder."""
        name = "validation" if self.validation else f"duplicate-{self.duplicate}"
        return f"{name_length_folder(self.length)}/{name}"

    def shard(self, index: int) -> str:
        """Names a shard by its path, relative to the output folder."""
        return f"{self.folder}/shard-{index:05}.arrow"


def name_length_folder(length: int) -> str:
    """Names the folder of all shards of one length, relative to the output folder."""
    return f"length-{length}"


def example_schema(length: int, vocabulary_size: int, num_documents: int) -> pa.Schema:
    """Gives the columns of the shards of one length, in the smallest types that hold their numbers."""
    piece, position, document = (
        pa.from_numpy_dtype(smallest_type(largest)) for largest in (vocabulary_size - 1, length, num_documents - 1)
    )
    return make_schema(
        pieces=make_list_type(piece),
        masked=make_list_type(pa.struct(list(make_schema(position=position, piece=piece)))),
        boundary=position,
        random_next=pa.bool_(),
        document=document,
    )


Kind = TypeVar("Kind", bound="JsonObject")


class JsonObject(BaseModel):
    """A JSON object of a manifest, a plan or a journal."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def from_content(cls: type[Kind], content: Any, place: Path | str) -> Kind:
        """Takes what was read at a place; raises DamageError where it lacks what is relied on."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            *above, name = first["loc"] or ("it",)
            fault = f"{dotted((*above, name))} is {repr(first['input'])[:LONGEST_SHOWN]}: {first['msg']}"
            if first["type"] == "missing":
                fault = f"{dotted(tuple(above)) or 'it'} lacks {name}"
        raise DamageError(f"{place}: {fault}: it was edited or is damaged")

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that were given, as JSON has them."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Counts(JsonObject):
    """Counts of the examples of a set of shards, or of a part of them."""

    examples: Amount
    pieces: Amount
    masked: Amount
    random_next: Amount
    """Examples whose segment B was drawn from another document."""
    histogram: list[Amount]
    """Examples of every number of pieces, from 0 to the length."""
    split: list[int] = []
    """How many of the masked pieces became [MASK], became a random piece, stayed."""
    text: int = 0
    """Pieces of the documents that the examples are made of."""
    own: int = 0
    """Pieces of the text that are in segment A, or in a B that follows it."""
    lost_parted: int = 0
    """Pieces of the text that truncation took from sentences that were parted before words."""
    parted: int = 0
    """Sentences that were longer than an example."""


class SetFigures(Counts):
    """A set of shards, with what is counted in it and the records of its files."""

    length: Annotated[Positive, Field(le=2**16)]
    duplicate: Amount
    validation: StrictBool
    shards: list[FileRecord]

    @property
    def set(self) -> ShardSet:
        """Names the set."""
        return ShardSet(self.length, self.duplicate, self.validation)


class TextCounts(JsonObject):
    """Counts of text that is cut into pieces, and of its documents that are left out."""

    sentences: int = 0
    pieces: int = 0
    unknown: int = 0
    """Pieces that stand for unknown words."""
    text_bytes: int = 0
    characters: int = 0
    """Characters of the words that were read, where the vocabulary has words that it cannot spell."""
    unknown_characters: int = 0
    """Those of words that became [UNK]."""
    empty: int = 0
    """Documents without text, or without any piece, which are left out."""
    copies: int | None = None
    """Documents left out since an earlier one has their text, where such are left out."""
    near_copies: int | None = None
    """Documents left out since an earlier one has almost all of their text, where such are left out."""
    over_share: int | None = None
    """Documents left out of sources that were to have a smaller share, where there are such sources."""


class CorpusFigures(TextCounts):
    """Counts of the text that shards are made of."""

    documents: Positive
    validation_documents: Amount
    """Documents or passages that are held out."""
    replaced: int = 0
    """Documents in which bad characters were replaced."""
    skipped: list[str] = []
    """Places that could not be read, with the reasons."""
    lost: int | None = None
    """How many of these, at the end, are files of documents of other folders."""
    documents_by_source: dict[str, int] = {}
    filtered: dict[str, int] | None = None
    """Documents that each filter left out while the text was read, where there were filters."""
    no_text: dict[str, int] = {}
    """Numbers of pages, lines and files that are no text by the rules of their formats, by what they are."""
    passages: int | None = None
    """Documents once passages for validation are cut out of them, where they are."""
    weighed: int | None = None
    """Rows of documents once they are repeated by the weights of their sources, where there are such weights."""

    @property
    def unreadable(self) -> list[str]:
        """Lists the places that could not be read: the skipped ones but for files that were read by another name."""
        return [fault for fault in self.skipped if f": {ANOTHER_NAME} " not in fault]


class VocabularyFigures(JsonObject):
    """The vocabulary of shards."""

    size: Annotated[Positive, Field(le=2**31)]
    sha256: str
    cased: StrictBool
    base_size: int | None = None
    """The size of the vocabulary that was given, where it was extended."""


class RecordedSettings(JsonObject):
    """The settings that decided what is in the shards; other modules read those with a type here."""

    model_config = ConfigDict(extra="allow")

    pairs: str
    cased: StrictBool = False
    tokenizer: str | None = None
    """The kind of the vocabulary, where it is not WordPiece."""
    duplicates: Positive = 1
    lengths: list[Positive] = []
    max_predictions: list[int] = []
    """Most masked pieces of an example of each of the lengths."""
    mask_rate: float = 0.0
    masking: str = "token"
    validation: float = 0.0
    near_copies: float | None = None
    max_share: dict[str, float] = {}
    weight: dict[str, float] = {}
    errors: str = "fail"
    language: str | dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A file of the text, without paths or dates, so that runs on other machines can be compared."""

    source: str
    name: str
    size: int
    format: str
    content: str = ""
    """The key of the content, which decides nothing of what is made of it."""


@dataclass(frozen=True)
class KeptFile(FileRecord):
    """A file of documents in pieces, before any document was left out, cut up or repeated."""

    source: str
    empty: int
    """Documents of the source that had no piece, which are not in the file."""
    sentences: int
    pieces: int
    unknown: int
    text_bytes: int
    characters: int = 0
    unknown_characters: int = 0


@dataclass(frozen=True)
class OriginRecord:
    """Another folder whose documents shards are made of."""

    folder: str
    """Where it was, as seen from the folder of the shards."""
    key: str
    """Hash of its documents and their vocabulary."""
    sources: int = 0
    """Number of files of its text; the manifest lists them before those of the shards' own text."""
    skipped: int = 0
    """Number of its faults, which are listed in the same order."""
    replaced: int = 0
    filtered: dict[str, int] | None = None
    empty: int = 0
    no_text: dict[str, int] = field(default_factory=dict)


class Ingredients(JsonObject):
    """The settings and sources of shards: a run is continued only with the same ones."""

    settings: RecordedSettings
    sources: list[SourceRecord]
    given_vocabulary: str | None
    """The checksum of the vocabulary that the user named, if any."""
    origins: list[OriginRecord] = []


class Manifest(Ingredients):
    """The content of manifest.json of a finished folder of shards."""

    format: int = FORMATS[0]
    corpus: CorpusFigures
    vocabulary: VocabularyFigures
    vocabulary_source: str | None = None
    """Where the vocabulary was taken from."""
    tables: list[FileRecord] = Field(alias="files")
    """The files that are no shards: the vocabulary and the table of documents."""
    kept: list[KeptFile] = []
    """The documents in pieces, in the order of the corpus."""
    kept_format: int = 0
    figures: list[SetFigures] = Field(alias="sets")
    bytes: Amount
    """The size of the shards, of their vocabulary and of the table of documents."""
    versions: dict[str, str] = {}
    """Versions of the libraries that the shards were made with."""
    fingerprint: str
    """Hash of the data: another fingerprint means other settings, vocabulary or examples."""
    checksum: str = ""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a finished folder; raises UserError where the folder is anything else."""
        path = folder / MANIFEST
        try:
            content = read_json(path)
        except FileNotFoundError:
            if not folder.is_dir():
                raise UserError(f"{folder}: no such folder") from None
            if is_unfinished(folder):
                raise UserError(f"{folder}: not finished; run the same shard.py command again to continue") from None
            raise UserError(f"{folder}: no {MANIFEST}: not a folder of shards (make one with shard.py)") from None
        if not isinstance(content, dict) or content.get("format") not in FORMATS:
            found = content.get("format", "unknown") if isinstance(content, dict) else "unknown"
            raise UserError(f"{path}: of format {found}; this version reads {' and '.join(map(str, FORMATS))}")
        return cls.from_content(content, path)

    def write(self, folder: Path) -> None:
        """Seals the manifest and writes it, which makes the folder a finished one."""
        content = self.as_json()
        seal(content)
        write_json(folder / MANIFEST, content)

    @property
    def vocabulary_size(self) -> int:
        """Counts the pieces of the vocabulary."""
        return self.vocabulary.size

    @property
    def num_documents(self) -> int:
        """Counts the rows of the table of documents; passages that were cut out and repetitions have their own."""
        counts = (self.corpus.weighed, self.corpus.passages, self.corpus.documents)
        return next(count for count in counts if count is not None)

    def lengths(self) -> list[int]:
        """Lists the lengths of the training examples, the shortest first."""
        return sorted({figures.length for figures in self.figures if not figures.validation})

    def require_examples(self, folder: Path) -> None:
        """Raises UserError where the folder has documents, and no examples yet."""
        if not self.figures:
            raise UserError(
                f"{folder}: has documents in pieces, but no examples\n"
                f"make shards of them: python data_prep/shard.py --from {quote(folder)} --out ANOTHER"
            )

    def length_for(self, length: int) -> int | None:
        """Finds the length whose examples serve for a wanted one: the same, or the next longer, to be cut."""
        return next((stored for stored in self.lengths() if stored >= length), None)

    @property
    def has_pairs(self) -> bool:
        """Returns whether examples are pairs of segments, for next-sentence prediction."""
        return self.settings.pairs == "nsp"

    def files(self) -> list[FileRecord]:
        """Lists the records of the files that training needs: all but the manifest itself and the kept documents."""
        return [*self.tables, *(record for figures in self.figures for record in figures.shards)]

    def sets(self) -> dict[ShardSet, list[FileRecord]]:
        """Lists the records of the shards of every set, in their order."""
        return {figures.set: figures.shards for figures in self.figures}


def is_unfinished(folder: Path) -> bool:
    """Returns whether a run began in the folder and has not finished: it has a plan and no manifest."""
    return not (folder / MANIFEST).exists() and (folder / PLAN).exists()
