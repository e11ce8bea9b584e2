"""Text of others on a screen: shown as it is, and nothing but text.

A path, a JSON key or the words of an exception may hold what a console takes for markup ([/b]), for an emoji (:x:), for
a command to the terminal (ESC), or half a surrogate pair that no encoding can write.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from rich.console import Console

ACTING = {"Cc", "Cs", "Cf", "Zl", "Zp"}  # control, surrogate, format (text direction), line and paragraph separators


def plain(value: Any) -> str:
    """str(value) in one line of visible characters; those that would act instead of being shown are spelled: \\n,
    \\x1b, \\udc80. ASCII and letters of any script stay as they are."""
    text = str(value)
    if text.isprintable():  # also true of every ordinary name, at the speed of C
        return text
    return "".join(_spelled(c) if unicodedata.category(c) in ACTING else c for c in text)


def shortened(text: str, most: int = 400) -> str:
    """Words of others in an error's line: their two ends, where they go on for pages."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 4) :]}"


def screen(**options: Any) -> Console:
    """A console on which a string is its characters: no markup, no emoji codes, no highlighting, in tables and titles
    too. The only way a Console is made here (a test holds that)."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
