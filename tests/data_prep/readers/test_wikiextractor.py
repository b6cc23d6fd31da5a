"""WikiExtractor's output, with tags and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.reading import detected, read, write

from data_prep.common.errors import UserError
from data_prep.readers.reader import Document


def test_wikiextractor_with_tags(tmp_path: Path) -> None:
    path = write(
        tmp_path / "wiki_00",
        """<doc id="12" url="https://x.org/?curid=12" title="Tom &amp; Jerry">
Tom &amp; Jerry

Tom &amp; Jerry is a show&lt;br /&gt; of cats<br>and mice.
Where a < b and b > c, H<sub>2</sub>O stays.</li>
<br clear=all>
See <http://x.org/a> and <THE END>.<ref name="a"/> More<nowiki/>.

</doc>
<doc id="13" url="u" title="Empty">
Empty

</doc>
<doc id="14" url="u" title="The "best" of it">
The "best" of it

One.
</doc>
<doc id="15" url="u" title="A">
Another first line.
</doc>
""",
    )
    assert detected(path) == "wikiextractor"
    documents, _ = read(path, "wikiextractor")
    shown = ["Tom & Jerry is a show of cats and mice.", "Where a < b and b > c, H2O stays."]
    assert documents == [
        Document("12", "Tom & Jerry", [*shown, "See <http://x.org/a> and <THE END>. More."]),
        Document("13", "Empty", []),
        Document("14", 'The "best" of it', ["One."]),
        Document("15", "A", ["Another first line."]),
    ]


def test_wikiextractor_with_other_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeff<doc id="1" url="u" title="A">\nA\n\nOne.\nTwo.\n</doc>\n<doc id="2" url="u" title="B">\nB\n</doc>\n'
    text = text.replace("\n", "\r\n")
    path = write(tmp_path / "wiki_00", text)
    assert detected(path) == "wikiextractor"
    for step in (1 << 20, 7):
        assert read(path, "wikiextractor", step=step)[0] == [
            Document("1", "A", ["One.", "Two."]),
            Document("2", "B", []),
        ]


def test_wikiextractor_json(tmp_path: Path) -> None:
    lines = [
        {"id": "1", "revid": "2", "url": "u", "title": "A & B", "text": "A &amp; B\n\nCats &amp; dogs<br>bark.\nTwo."},
        {"id": "2", "url": "u", "title": "C", "text": "C"},
        {"id": "3", "url": "u", "title": "D", "text": ""},
    ]
    path = write(tmp_path / "wiki_00", "".join(json.dumps(line) + "\n" for line in lines))
    assert detected(path) == "jsonl"
    first, *empty = read(path, "jsonl")[0]
    assert first == Document("1", "A & B", ["Cats & dogs bark.", "Two."])
    assert empty == [Document("2", "C", []), Document("3", "D", [])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<doc id="1" title="A">\nA\n\nText.\n', "byte 0: a <doc> without its </doc>: the file is cut short"),
        ('half a text\n</doc>\n<doc id="1" title="A">\nA\n</doc>\n', "byte 0: text that is in no <doc>"),
        ('<doc id="1" title="A">\nA\n</doc>\nstray\n', "byte 25: text after </doc> that is in no <doc>: b'stray"),
    ],
)
def test_broken_wikiextractor_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "wiki_00", text)
    with pytest.raises(UserError, match=f"wiki_00: {message}"):
        read(path, "wikiextractor")
    assert len(read(path, "wikiextractor", "skip")[1].skipped) == 1


@pytest.mark.realdata
def test_real_wikipedia(real_data: Path) -> None:
    for path in sorted((real_data / "wiki/AA").iterdir()):
        documents, _ = read(path, "wikiextractor", step=300_000)
        assert len(documents) == sum(line.startswith(b"<doc ") for line in path.read_bytes().split(b"\n"))
        assert not any(
            re.search("<br|</?ref|</li>", text, re.IGNORECASE) for document in documents for text in document.passages
        )
