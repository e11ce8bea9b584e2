"""`megacore train`'s arguments before a parser sees them: every option with its full name and its value in one word, so
that a value may begin with a minus, a known name of another system means its field, and each mistake is one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megacore.train.config import ALIASES, field_names, nearest
from megacore.train.plain import plain

WORDS = {"true": True, "false": False}


def spelled(argv: Sequence[str], own: Mapping[str, type]) -> tuple[list[str], list[str]]:
    """(words that belong to no option, options as --section.field=VALUE, and --section.field or --section.no-field for
    true and false). `own`: the command's own options. Of an option given twice the last counts. ValueError for an
    unknown name, a field under two names, an option without a value, a true-or-false one with another value."""
    kinds = {**field_names(), **own}
    words: list[str] = []
    values: dict[str, str] = {}
    by_other_name: dict[str, bool] = {}  # fields given so far: whether by a name of another system
    left = list(argv)
    while left:
        argument = left.pop(0)
        if not argument.startswith("-") or argument == "-":
            words.append(argument)
            continue
        name, equals, value = argument.partition("=")
        full, inverted = _field(name, kinds)
        borrowed = name.lstrip("-").replace("-", "_") in ALIASES
        if borrowed != by_other_name.setdefault(full, borrowed):  # under one name the last counts, as everywhere
            raise ValueError(f"command line: {full} is given twice, under two names; keep one")
        if kinds[full] is bool:
            if not equals and left and left[0].lower() in WORDS:
                value = left.pop(0)
            if (value := value.lower() or "true") not in WORDS:
                raise ValueError(f"command line: {plain(argument)}: neither true nor false; give one of them")
            values[full] = _switch(full, WORDS[value] != inverted)
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise ValueError(f"command line: {full} has no value; give --{full} VALUE")
            value = left.pop(0)
        values[full] = f"--{_dashed(full)}={value}"
    return words, list(values.values())


def _field(option: str, kinds: Mapping[str, type]) -> tuple[str, bool]:
    """(full name, is it the --no- form) of an option."""
    name = option.lstrip("-").replace("-", "_")
    section, dot, leaf = name.rpartition(".")
    positive = f"{section}{dot}{leaf.removeprefix('no_')}"
    if option.startswith("--"):
        if name in kinds:
            return name, False
        if name in ALIASES:
            return ALIASES[name], False
        if leaf.startswith("no_") and kinds.get(positive) is bool:
            return positive, True
    raise ValueError(f"command line: unknown field '{plain(name)}'; {nearest(name)}")


def _switch(full: str, on: bool) -> str:
    section, dot, leaf = full.rpartition(".")
    return "--" + _dashed(section + dot + ("" if on else "no-") + leaf)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
