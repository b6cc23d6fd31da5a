"""The corpus that every machine has."""

from __future__ import annotations

from pathlib import Path

from support.reading import read, write

from data_prep.readers import demo


def test_demo_reads_documentation_strings(tmp_path: Path) -> None:
    first, second = "This module does a number of things that are described here.", "It does them well. " * 12
    function = 'def f():\n    """Does the one thing that it is for."""\n'
    path = write(tmp_path / "module.py", f'"""{first}\n\n    >>> code\n\n{second}"""\nx = 1\n{function}')
    (document,) = read(path, "demo")[0]
    assert document.title == "module"
    assert document.passages == [first, second.strip(), "Does the one thing that it is for."]
    assert read(write(tmp_path / "short.py", '"""Too short."""'), "demo")[0] == []


def test_demo_is_on_every_machine() -> None:
    files = demo.files()
    assert len(files) > 100
    assert files == sorted(set(files))
    assert not any("test" in path.parts for path in files)
