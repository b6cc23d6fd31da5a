"""Reads pages of HTML as a browser shows them: their tables, their text and what they are made of."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser


class ShownPage(HTMLParser):
    """What a page shows."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.marks: Counter[str] = Counter()
        self.tables: dict[str, list[list[str]]] = {}
        """The rows of the tables, by the names of the boxes around them."""
        self._words: list[str] = []
        self._box = ""
        self._open: list[str] = []
        self.feed(content)

    @property
    def text(self) -> str:
        """All that can be read, with single spaces."""
        return " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        values = {name: value or "" for name, value in attrs}
        self.attributes += values.items()
        self.anchors.add(values.get("id", ""))
        self._open.append(tag)
        if tag == "mark":
            self.marks[values["class"]] += 1
        if tag == "div" and values.get("role") == "region":
            self._box = values["aria-label"]
            self.tables[self._box] = []
        if tag == "tr":
            self.tables[self._box].append([])
        if tag in ("td", "th"):
            self.tables[self._box][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & {*self._open}:
            return
        self._words.append(data)
        if {"td", "th"} & {*self._open}:
            self.tables[self._box][-1][-1] += data

    def column(self, table: str, name: str) -> dict[str, str]:
        """A column of a table, by the first column."""
        head, *rows = self.tables[table]
        return {row[0]: row[head.index(name)] for row in rows}
