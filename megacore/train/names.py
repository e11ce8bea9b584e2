"""Names of fields that were not meant as they were written."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

NEAR = 0.7  # of difflib's ratio: `precison`, `n_layers` and `num_heads` are near, `recompute` is near nothing


def advice(name: str, known: Sequence[str], aliases: Mapping[str, str]) -> str:
    """What to say of a name that is no field: the one field that is near, else the fields of its section, else the
    sections. Leaves are compared with leaves: a section that two names share makes them no nearer."""
    section, _, leaf = name.rpartition(".")
    here = {full.rpartition(".")[2]: full for full in known if full.rpartition(".")[0] == section}
    everywhere = dict(aliases)
    for full in known:
        everywhere.setdefault(full.rpartition(".")[2], full)
    for candidates in (here, everywhere):
        for found in difflib.get_close_matches(leaf[:100], candidates, n=1, cutoff=NEAR):
            return f"nearest valid name: {candidates[found]}"
    if here:
        return f"no name is near it, there are {', '.join(here.values())}"
    sections = ", ".join(f"[{s}]" for s in dict.fromkeys(full.partition(".")[0] for full in known))
    return f"no name is near it; the sections are {sections}, and `megacore train --help` lists their fields"
