"""Documents are kept in pieces, and shards made of them are those that the text would make."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.commands import run_main
from support.damage import flip, truncate
from support.marks import slow
from support.shards import interrupted_at, make, tell, tree, write_sources

from data_prep import origins, shard, show, verify
from data_prep.arrow_files import write_batches
from data_prep.common.errors import UserError
from data_prep.inspection.lookup import find_document
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, KEPT, KEPT_FORMATS, MANIFEST, Manifest
from data_prep.vocabulary.source import read_vocabulary
from data_prep.work import WorkFolder
from pretraining.config.overrides import RECIPES, load_recipe_and_data

ASKED = ["--lengths", "32", "--duplicates", "2", "--shard-size", "64KB"]
OTHERS = [
    ["--lengths", "48", "24", "--duplicates", "1", "--masking", "whole-word", "--pairs", "none", "--mask-rate", "0.2"],
    ["--drop-copies", "--max-share", "wiki=0.6", "--seed", "3", "--validation", "0.1", "--weight", "more=2.5"],
    ["--pairs", "full-sentences", "--weight", "more=2"],
]


def shards(folder: Path) -> dict[str, str]:
    """Hashes all that training reads."""
    return {path: found for path, found in tree(folder).items() if path != MANIFEST and not path.startswith(f"{KEPT}/")}


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_sources(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def made(docs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "both", "--docs", *docs, *ASKED, "--vocab-size", "400")


@pytest.fixture
def moved(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "moved"))


@pytest.mark.parametrize("settings", [ASKED, *map(slow, OTHERS)])
def test_shards_of_documents_are_of_the_text(settings: list[str], docs: list[str], made: Path, tmp_path: Path) -> None:
    before = tree(made)
    asked = settings if "--lengths" in settings else [*ASKED, *settings]
    of_text = make(tmp_path / "text", "--docs", *docs, *asked, "--vocab-size", "400", "--no-documents")
    of_documents = make(tmp_path / "documents", "--from", made, *asked, "--workers", "2")
    assert shards(of_documents) == shards(of_text)
    assert Manifest.read(of_documents).fingerprint == Manifest.read(of_text).fingerprint
    assert tree(made) == before
    assert not (of_text / KEPT).exists()
    assert not (of_documents / KEPT).exists()
    [origin] = Manifest.read(of_documents).origins
    assert (of_documents / origin.folder).resolve() == made
    run_main(verify.main, of_documents)


def test_documents_alone_are_made_of_text_and_are_enough(docs: list[str], made: Path, tmp_path: Path) -> None:
    words = ["--docs", *docs, "--vocab-size", "400"]
    sifted = make(tmp_path / "sifted", *words, *ASKED, *OTHERS[1])  # which has all, though it left some out
    assert tree(sifted / KEPT) == tree(made / KEPT)
    kept = Manifest.read(sifted).kept
    assert (sum(file.rows for file in kept), {file.source for file in kept}) == (240, {"wiki", "more"})
    alone = make(tmp_path / "all of it", *words, "--documents-only")
    assert tree(alone / KEPT) == tree(made / KEPT)
    run_main(verify.main, alone)
    assert shards(make(tmp_path / "out", "--from", alone, *ASKED)) == shards(made)
    assert "complete already" in tell(alone, *words, "--documents-only")
    for said in (tell(alone, *words, code=2), run_main(show.main, alone, code=2)):
        assert f"python data_prep/shard.py --from '{alone}' --out ANOTHER" in said
    with pytest.raises(UserError, match=f"--data {alone}: has documents in pieces, but no examples"):
        load_recipe_and_data(RECIPES / "demo.toml", data=[alone])


def test_corpora_are_joined_as_if_their_text_were_read_at_once(docs: list[str], made: Path, tmp_path: Path) -> None:
    vocabulary = ["--vocab", made]
    together = make(tmp_path / "together", "--docs", *docs, *ASKED, *vocabulary)
    wiki = make(tmp_path / "wiki", "--docs", docs[0], "--documents-only", *vocabulary)
    more = make(tmp_path / "more", "--docs", docs[1], "--documents-only", *vocabulary)
    joined = make(tmp_path / "joined", "--from", wiki, "--from", more, *ASKED)
    beside = make(tmp_path / "beside", "--from", wiki, "--docs", docs[1], *ASKED)
    again = make(tmp_path / "again", "--from", beside, *ASKED)
    third = make(tmp_path / "third", "--from", again, *ASKED)
    for folder in (joined, beside, again, third):
        assert shards(folder) == shards(together)
        assert Manifest.read(folder).fingerprint == Manifest.read(together).fingerprint
    assert {file.source for file in Manifest.read(beside).kept} == {"more"}
    assert shown(third, "Article 8") == shown(wiki, "Article 8")
    assert Manifest.read(third).sources == Manifest.read(together).sources
    french = make(tmp_path / "french", "--from", wiki, "--docs", docs[1], *ASKED, "--language", "more=fr")
    assert Manifest.read(french).settings.language == {"more": "fr"}


NEED_TEXT = "--vocab-size 30522|--cased|--vocab x|--extend 9|--language de|--text-field word".split("|")
NEED_TEXT += ["--format text", "--min-words 9"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(([*row.split()], f"{row.split()[0]} needs the text: the documents of --from") for row in NEED_TEXT),
        (["--documents-only"], "--documents-only: those of --from are there already"),
        (["--weight", "other=2"], "--weight other=2.0: there is no source other, only wiki, more"),
        (["--max-share", "other=0.5"], "there is no source other"),
        (["--from", "nowhere"], "--from nowhere: no such folder"),
        (["--from", "HERE"], "is named twice, or documents of it are; each text counts once"),
        (["--from", "HERE/manifest.json"], "manifest.json: not a folder"),
        (["--out", "HERE"], "shards of its documents need an --out outside of it"),
        (["--out", "HERE/inner"], "shards of its documents need an --out outside of it"),
        (["--docs", "HERE/vocab.txt", "--language", "wiki=de"], "--language wiki=de: there is no source wiki"),
        (["--docs", "HERE/vocab.txt", "--format", "wiki=csv"], "--format wiki=csv: there is no source wiki"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], message: str, made: Path, tmp_path: Path) -> None:
    words = [word.replace("HERE", str(made)) for word in words]
    assert message in run_main(shard.main, "--out", tmp_path / "out", "--from", made, *words, code=2)


def test_shards_of_documents_need_a_name(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--from: name the folder of the new shards: --out FOLDER" in run_main(shard.main, "--from", made, code=2)
    assert not [*tmp_path.iterdir()]


def test_a_text_that_two_folders_have_counts_once(docs: list[str], made: Path, tmp_path: Path) -> None:
    """Files that are twice in one folder, and some that two have, are what they would be in one run over the text."""
    double = tmp_path / "double"
    double.mkdir()
    for name in ("a.txt", "b.txt"):
        (double / name).write_text("The same sentence. And the next one.\n")
    kept = make(tmp_path / "kept", "--docs", double, "--documents-only", "--vocab", made)
    make(tmp_path / "joined", "--from", made, "--from", kept, *ASKED)
    (double / "c.txt").write_text("Another text. It is there once.\n")
    assert "note: --docs: a.txt is in" in tell(tmp_path / "some", "--from", kept, "--docs", double, *ASKED)
    other = make(tmp_path / "other", "--docs", docs[1], "--documents-only", "--vocab", made)
    for words in (["--from", other], ["--docs", docs[1]]):
        said = tell(tmp_path / "out", "--from", made, *words, code=2)
        assert "and so is all of its text; each text counts once" in said


def test_documents_that_were_made_anew_are_other_ones(docs: list[str], made: Path, moved: Path, tmp_path: Path) -> None:
    of_documents = make(tmp_path / "shards", "--from", moved, *ASKED)
    shutil.rmtree(moved)
    make(moved, "--docs", docs[1], "--documents-only", "--vocab-size", "300")
    assert "which was made anew since" in tell(tmp_path / "out", "--from", of_documents, code=2)
    run_main(show.main, of_documents, "--document", "5", code=2)
    assert "which was made anew since" in run_main(verify.main, of_documents)
    said = tell(tmp_path / "out", "--from", made, "--from", moved, code=2)
    assert f"--from {moved}: cut with another vocabulary than {made}" in said


def test_shards_find_documents_where_both_were_moved_and_through_links(made: Path, tmp_path: Path) -> None:
    """Also a run that is not finished."""
    (tmp_path / "real/deep").mkdir(parents=True)
    shutil.copytree(made, tmp_path / "real/deep/kept")
    (tmp_path / "link").symlink_to(tmp_path / "real/deep")
    with interrupted_at("examples"):
        make(tmp_path / "link/out", "--from", tmp_path / "link/kept", *ASKED, code=130)
    (tmp_path / "real").rename(tmp_path / "moved")
    make(tmp_path / "moved/deep/out", "--from", tmp_path / "moved/deep/kept", *ASKED)
    assert shards(tmp_path / "moved/deep/out") == shards(made)
    assert shown(tmp_path / "moved/deep/out", "3") == shown(made, "3")
    with interrupted_at("shards"):
        make(tmp_path / "elsewhere", "--from", tmp_path / "moved/deep/kept", *ASKED, code=130)
    (tmp_path / "moved/deep/kept").rename(tmp_path / "kept")
    make(tmp_path / "elsewhere", "--from", tmp_path / "kept", *ASKED)
    assert shards(tmp_path / "elsewhere") == shards(made)


@pytest.mark.parametrize("kept", [[], ["--no-documents"]])
def test_a_run_goes_on_that_is_killed_when_all_is_made(
    kept: list[str], docs: list[str], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = ["--docs", *docs, *ASKED, "--vocab-size", "400", *kept], tmp_path / "out"
    for place, name in ((Manifest, "write"), (WorkFolder, "delete_other_documents")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, Mock(side_effect=KeyboardInterrupt))
            make(out, *words, code=130)
    make(out, *words)
    assert shards(out) == shards(made)
    assert (out / KEPT).exists() != bool(kept)
    run_main(verify.main, out)


def test_what_a_run_of_documents_leaves_is_sound_at_each_step_and_goes_on(made: Path, tmp_path: Path) -> None:
    words = ["--from", made, *ASKED, *OTHERS[1], "--near-copies", "0.9"]
    for step in ("taken", "unique", "candidates", "distinct", "limited", "weighed", "examples", "shards"):
        with interrupted_at(step):
            make(tmp_path / "out", *words, code=130)
        run_main(verify.main, tmp_path / "out", code=3)
    make(tmp_path / "out", *words)
    assert tree(tmp_path / "out") == tree(make(tmp_path / "fresh", *words))


def test_documents_gone_or_edited_are_no_origin(moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_documents, out = make(tmp_path / "shards", "--from", moved, *ASKED), tmp_path / "out"
    with monkeypatch.context() as later:
        later.setattr(origins, "KEPT_FORMATS", (KEPT_FORMATS[-1] + 1,))
        said = f"its documents are of format {KEPT_FORMATS[-1]}, and this version reads {KEPT_FORMATS[-1] + 1}"
        assert said in tell(out, "--from", moved, code=2)
    (moved / MANIFEST).write_text((moved / MANIFEST).read_text().replace('"rows": ', '"rows": 1', 1))
    assert "it was edited" in tell(out, "--from", moved, code=2)
    moved.rename(tmp_path / "elsewhere")
    said = tell(out, "--from", of_documents, code=2)
    assert f"its documents were in {moved}, which is gone; name the folder that has them: --from" in said


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_documents_are_named_or_left_out(damage: Callable[[Path], None], moved: Path, tmp_path: Path) -> None:
    record = Manifest.read(moved).kept[-1]
    path = moved / record.path
    damage(path)
    assert str(path) in run_main(verify.main, moved, code=1)
    said = tell(tmp_path / "out", "--from", moved, *ASKED, code=2)
    assert str(path) in said
    assert "--errors skip" in said
    rest = tmp_path / "rest"
    assert f"left out: moved/{record.path}: " in tell(rest, "--from", moved, *ASKED, "--errors", "skip")
    corpus = Manifest.read(rest).corpus
    assert corpus.documents == 240 - record.rows
    assert [fault for fault in corpus.skipped if fault.startswith(f"moved/{record.path}: ")]
    assert str(tmp_path) not in (rest / MANIFEST).read_text()


def test_a_repaired_file_of_documents_is_taken_by_a_restart(moved: Path, tmp_path: Path) -> None:
    path = moved / Manifest.read(moved).kept[-1].path
    whole, words = path.read_bytes(), ("--from", str(moved), *ASKED, "--errors", "skip")
    path.unlink()
    with interrupted_at("examples"):
        make(tmp_path / "out", *words, code=130)
    path.write_bytes(whole)
    assert tree(make(tmp_path / "out", *words)) == tree(make(tmp_path / "fresh", *words))


def shown(folder: Path, document: str) -> str:
    return run_main(show.main, folder, "--document", document)


def test_a_document_is_shown_by_its_title_and_by_its_number(docs: list[str], made: Path, tmp_path: Path) -> None:
    """Also in a folder that left some out, where numbers are other ones."""
    text = shown(made, "Article 8")
    assert re.match(r"wiki 8 Article 8: \d+ sentences, \d+ pieces, in lower case\n", text)
    [article] = [part for part in Path(docs[0], "wiki_00").read_text().split("<doc ") if part.startswith('id="8"')]
    words = re.findall(r"\w+", article.split("\n\n", 1)[1].split("</doc>")[0].lower())
    assert re.findall(r"\w+", text.split("\n", 1)[1]) == words
    fewer = make(tmp_path / "fewer", "--from", made, *ASKED, "--max-share", "wiki=0.3", "--weight", "more=2")
    for folder in (made, fewer):
        told = re.search(r"document (\d+) (.*)", run_main(show.main, folder, "--index", "3").split("\n")[0])
        assert told
        assert shown(folder, told[1]).startswith(f"{told[2]}: ")
    run_main(show.main, made, "--document", "Nobody", code=2)
    assert "has 240 documents, from 0" in run_main(show.main, made, "--document", "240", code=2)
    write_batches(fewer, DOCUMENTS, DOCUMENTS_SCHEMA, [])
    assert f"{DOCUMENTS}: no row 3; " in run_main(show.main, fewer, "--document", "3", code=2)


def test_damaged_documents_are_shown_or_named(moved: Path) -> None:
    path = moved / Manifest.read(moved).kept[0].path
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with suppress(UserError, OSError):  # any other error would be a traceback
            _ = [*find_document(moved, "Article 8")[0].lines(read_vocabulary(moved))]


def test_a_title_of_digits_that_several_documents_have_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [{"title": title, "text": f"All of {name}, {title}. It goes on."} for title in ("1984", *"pqrstuvwxyz")]
        (tmp_path / name / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = make(tmp_path / "out", "--docs", tmp_path / "a", tmp_path / "b", *ASKED, "--vocab-size", "200")
    said = run_main(show.main, folder, "--document", "1984", code=2)
    assert "2 documents have this title; give the number of one" in said
