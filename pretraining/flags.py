"""The flags of the commands of pre-training, which load no PyTorch: a help is there at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from data_prep.common.flags import Heading, Shown
from data_prep.common.sections import Removed

PLANNER = "benchmarks/planner.py plans for other machines"
OF_PLAN, OF_SCORES, OF_TEXT = Heading("What --check plans for"), Heading("Scores of shards"), Heading("A text")
OF_SEARCH = Heading("Retrieval")


@dataclass(frozen=True)
class Train:
    """Pre-trains an encoder on shards. Every value of the recipe can be given as --section.key VALUE; those that matter
    most are --phases.0.steps of the first phase (.batch, .micro_batch, .learning_rate), --model.size, --optimizer.name,
    --objective.name, --precision.dtype, --parallel.zero and --checkpoints.every. docs/recipes.md has all of them.

        python pretraining/train.py --recipe bert_mini --data data/wiki --out runs/mini

    The same command continues after any interruption.
    """

    removed: ClassVar = {"gpus_per_node": Removed(8, PLANNER), "network": Removed(None, PLANNER)}
    recipe: Path
    """TOML file that says how to train, or the name of one in pretraining/recipes: demo, bert_mini, …"""
    data: tuple[str, ...] = ()
    """Folder of shards, made by shard.py, or several with names: wiki=data/wiki books=data/books; needed to train."""
    out: Path | None = None
    """Folder of the run: checkpoints, metrics, the exported model; needed to train."""
    init: str | None = None
    """Begin with the weights and sizes of this model: a folder of transformers, a run, a checkpoint, or a name on the
    Hugging Face hub. It is `base_model` in the recipe."""
    branch: str | None = None
    """Begin with all of another run's state at a checkpoint, RUN or RUN@STEP; phases not begun there may differ."""
    stop_after: Annotated[str | None, Shown.SELDOM] = None
    """Stop after the phase of this name; the same command without it goes on."""
    time_limit: str = "auto"
    """Save and stop ahead of this, counted from the start: 90m, 2h (default: the end of the Slurm job)."""
    shorten: float = 1.0
    """Train this share of the steps or hours of every phase, warm-up included: 0.05 tries the recipe."""
    profile: Annotated[int, Shown.SELDOM] = 0
    """Write a trace of this many steps, and a table of what took the time, into the run folder."""
    check: bool = False
    """Print the plan of the run, and stop."""
    ranks: Annotated[int | None, OF_PLAN] = None
    """With --check: the ranks to plan for (default: those it is started with)."""
    gpu: Annotated[str | None, OF_PLAN] = None
    """With --check: plan memory and hours for these GPUs, 8 a node: v100-32, a100-80, h100-80, h200, …"""
    price_per_gpu_hour: Annotated[float | None, OF_PLAN] = None
    """With --check: price of a GPU, or of a rank without one, for an hour, in any currency."""
    json: Annotated[bool, OF_PLAN] = False
    """With --check: print JSON, for a file: `> FILE`."""


@dataclass(frozen=True)
class Export:
    """Makes a folder that transformers loads from a run, and checks that it computes the same."""

    removed: ClassVar = {
        "checkpoint": Removed(None, "name the checkpoint in place of the run: RUN@1000"),
        "average": Removed(None, "give the train.py command of the run again, with --checkpoints.average N"),
    }
    run: Annotated[Path, tyro.conf.Positional]
    """A run, a checkpoint of one (RUN@STEP), or a folder of transformers."""
    out: Path
    """Folder to write; an earlier export of the same model in it is renewed."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the numbers that are written."""
    licence: str | None = None
    """Licence of the model, for its card, as the hub spells it: apache-2.0 (default: that of the recipe)."""
    replace: Annotated[bool, Shown.SELDOM] = False
    """Replace an export of another model."""
    sees: Annotated[Literal["both", "before"] | None, Shown.SELDOM] = None
    """For a hybrid model: whether a piece sees both sides or only earlier pieces (default: both)."""


@dataclass(frozen=True)
class Evaluate:
    """Scores a pre-trained model on shards or by retrieval, or lets it fill in or continue a text."""

    removed: ClassVar = {
        "best": Removed(5, "five pieces show what a model expects"),
        "pieces": Removed(40, "continue what it says, for more"),
        "temperature": Removed(0.0, "the likeliest pieces continue a text; transformers draws from an export"),
        "seed": Removed(None, "nothing is drawn"),
    }
    model: Annotated[str, tyro.conf.Positional]
    """A run, a checkpoint, a folder of transformers, or a name on the Hugging Face hub."""
    data: Annotated[tuple[str, ...], OF_SCORES] = ()
    """Folder of shards, made by shard.py with the vocabulary of the model, or several: wiki=data/wiki
    books=data/books."""
    split: Annotated[Literal["validation", "train"], OF_SCORES] = "validation"
    """The examples that are held out, or those for training."""
    length: Annotated[int | None, OF_SCORES] = None
    """Length of the examples (default: the longest of the shards that the model was trained on)."""
    examples: Annotated[int | None, OF_SCORES] = None
    """Score the first so many (default: all of the first duplicate)."""
    retrieval: Annotated[Path | None, OF_SEARCH] = None
    """Folder with queries.jsonl, corpus.jsonl and qrels/test.tsv, as BEIR's: finds passages by their vectors."""
    fill: Annotated[str | None, OF_TEXT] = None
    """A text with [MASK], for which the likeliest pieces are printed."""
    continue_: Annotated[str | None, tyro.conf.arg(name="continue"), OF_TEXT] = None
    """A text that a model which predicts the piece after continues, by 40 pieces at most."""
    sees: Annotated[Literal["both", "before"] | None, Shown.SELDOM] = None
    """Of a model of the objective hybrid: whether a piece sees both sides or those before it (default: shards are
    scored either way, and a text is filled in by what both sides tell)."""
    json: bool = False
    """Print JSON, for a file: `> FILE`."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Shown.SELDOM] = "auto"
    """Where the model computes, in fp32."""
