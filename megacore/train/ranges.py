"""What values a field of the settings may have, declared once, beside its default.

    lr: float = within(1e-3, 0, 1e30)  # peak learning rate: default, least, most
    steps: int = within(100, 1, 10**9)

A number without a declaration is still bounded: whole numbers to 0 .. 2^31 - 1, others to what is finite. Every range
is finite at both ends, so that no infinity, no NaN and nothing past 64 bits gets past `check_value`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_args

from megacore.train.plain import plain


@dataclass(frozen=True)
class Range:
    """least <= value <= most, value < most with `below`; or `unset`, which asks for a value that depends on others."""

    least: float
    most: float
    below: bool = False
    unset: float | None = None

    def __contains__(self, value: float) -> bool:
        if self.unset is not None and value == self.unset:
            return True
        return self.least <= value and (value < self.most if self.below else value <= self.most)  # never true of NaN

    def broken(self, name: str, value: float) -> str:
        """Which rule a value outside breaks, and the remedy."""
        least, most, below = _number(self.least), _number(self.most), "<" if self.below else "<="
        if value != value or value in (math.inf, -math.inf):
            return f"is no finite number; give {least} <= {name} {below} {most}"
        if self.below:
            return f"is outside [{least}, {most}); give {least} <= {name} < {most}"
        return (
            f"is below {least}; give {name} >= {least}"
            if value < self.least
            else f"is above {most}; give {name} <= {most}"
        )


COUNTS = Range(0, 2**31 - 1)
FINITE = Range(-1.7e308, 1.7e308)


def within(default: Any, least: float, most: float, **options: Any) -> Any:
    """A dataclass field with a range."""
    return dataclasses.field(default=default, metadata={"range": Range(least, most, **options)})


def range_of(field: dataclasses.Field, kind: type) -> Range | None:
    """The range of a field, declared or not; None for what is no number."""
    numbers = {int: COUNTS, float: FINITE}
    default = next((numbers[k] for k in (get_args(kind) or (kind,)) if k in numbers), None)
    return field.metadata.get("range", default)


def check_value(name: str, value: Any, allowed: Range | None, source: str = "") -> None:
    """ValueError, one line, where a number is outside its range, or a text holds what no path and no prompt can."""
    where = f"{source}: " if source else ""
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{where}{name}='{plain(value)}' holds a NUL character; leave it out")
    if allowed is None or isinstance(value, str | bool | None) or value in allowed:
        return
    raise ValueError(f"{where}{name}={_number(value)} {allowed.broken(name, value)}")


def _number(value: float) -> str:
    """Whole numbers as they are where that is short: 10^400 has 400 digits, and str() refuses more than 4300."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else f"{'-' * (value < 0)}2^{abs(value).bit_length() - 1} or more"
    return repr(value)
