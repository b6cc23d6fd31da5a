"""The table of languages says what the installed sentencex does."""

from __future__ import annotations

import string

import pytest
import sentencex

from data_prep.common.languages import DEFAULT, NAMES, RULES, language_fault, language_label

WORDS = [*string.ascii_lowercase, *"абвгджзийклмнпрстухц", *"αδκμνπρστ", *"աբգդհմն", *"دامو", *"कखगडपश"]
WORDS += (
    "bzw usw etc pag sra srta pan mgr inż gde dhr mevr prof esim nro huom sig dott ecc mme mlle env tlf fx ul".split()
)
PROBE = "\n\n".join(f"It is {word}. On 3. May! so? so։ so؟ so۔ so। so; on" for word in WORDS)
"""What may be an abbreviation, and what may end a sentence, in many scripts."""


@pytest.fixture(scope="module")
def split() -> dict[str, list[str]]:
    """How the languages with rules of their own split the probe."""
    return {code: sentencex.segment(code, PROBE) for code in NAMES}


def test_the_rules_are_those_of_the_splitter(split: dict[str, list[str]]) -> None:
    wrong = [code for code, rules in RULES.items() if sentencex.segment(code, PROBE) != split[rules]]
    assert not wrong


def test_relatives_have_rules_unlike_english(split: dict[str, list[str]]) -> None:
    assert {rules for code, rules in RULES.items() if split[rules] == split[DEFAULT]} == {DEFAULT}


def test_what_is_said_of_a_language() -> None:
    assert language_label(None) == "sentences as in English (no --language)"
    assert language_label("de") == "sentences as in German"
    assert language_label("cs") == "sentences as in Slovak (cs has no rules of its own)"
    assert language_label("zh") == "sentences as in English (zh has no rules of its own)"
    assert language_fault("zh") == ""
    assert language_fault("xx").startswith("no language of this code; with rules of their own: am Amharic, ")
