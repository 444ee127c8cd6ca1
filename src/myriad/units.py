"""Parse and format quantities with units: ``"64 MiB"`` in a config, ``1.2 GB`` on the screen."""

import math
import re
import sys
from collections.abc import Iterable
from fractions import Fraction
from itertools import groupby

__all__ = [
    "format_bytes",
    "format_count",
    "format_duration",
    "format_energy",
    "format_flops",
    "format_number",
    "format_ranges",
    "format_ranks",
    "format_seconds",
    "parse_bytes",
    "parse_count",
    "parse_ranges",
    "parse_rate",
    "time_unit",
]

_MOST_RANKS = 8
_LARGEST_WRITTEN = 1e21
"""Larger numbers are written with a power of ten."""
_LARGEST_FLOAT = sys.float_info.max
_FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: object) -> int:
    """``"64 MiB"`` to 67108864; an ``int`` is bytes already. Raises ``ValueError`` with what is allowed."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match.group(2).upper() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size: a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(_finite(float(match.group(1)) * _FACTORS[match.group(2).upper()]))


def _finite(number: float) -> float:
    """Return a number as a ``float``. Raises ``ValueError`` if it is too large for one."""
    if abs(number) > _LARGEST_FLOAT:
        raise ValueError("a number with fewer digits")
    return float(number)


def parse_count(text: object) -> object:
    """``"2B"`` to 2,000,000,000: text of a number with k, M, B or T. Other values stay. Raises ``ValueError``
    with what is allowed."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,12})?)\s*([kKMBT]?)\s*", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a count: a number, also with k, M, B or T")
    count = Fraction(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")
    if count.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(count)


def parse_ranges(text: str, end: int) -> list[range]:
    """``"3,7"`` or ``"0-15,20"``: numbers and ranges of them, below ``end``. Raises ``ValueError``."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < end:
            raise ValueError(f"{part!r} is no number below {end}, nor two with - between them")
        found.append(range(first, last + 1))
    return found


def format_ranges(numbers: Iterable[int], most: int = 12) -> str:
    """``0-15, 20``: each number once, in order; of more parts than ``most`` the first ones."""
    ordered = enumerate(sorted(set(numbers)))
    runs = [[n for _, n in run] for _, run in groupby(ordered, key=lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most]]
    return ", ".join(parts) + (" and others" if len(runs) > most else "")


def parse_rate(text: object) -> float:
    """Bits per second: ``"200 Mbit/s"`` to 2e8, ``"200Gbps"`` and ``"25 GB/s"`` to 2e11; a number is bits per
    second already. Raises ``ValueError`` with what is allowed."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return _finite(text)
    pattern = r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(bit|b(?=ps)|B)(/s|ps)?\s*"
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a rate: a number with kbit/s, Mbit/s, Gbit/s, Gbps, MB/s or GB/s")
    number, factor, unit, _ = match.groups()
    rate = float(number) * _FACTORS[f"{factor.upper()}B" if factor else ""]
    return _finite(rate * (8 if unit == "B" else 1))


def format_bytes(count: float) -> str:
    """Bytes as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} PiB"


def format_number(value: float, digits: int = 3) -> str:
    """A number with this many significant digits and never an exponent: ``0.00042``, ``3.42``, ``12,300``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= _LARGEST_WRITTEN:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e+")
        return f"{mantissa} x 10^{power}"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    if decimals <= 0:
        return f"{value if decimals else rounded:,.0f}"
    return f"{rounded:,.{decimals}f}".rstrip("0").rstrip(".")


def format_count(count: float) -> str:
    """A plain number as ``1.3M``."""
    for unit in ("", "k", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.0f}" if unit == "" else f"{format_number(count)}{unit}"
        count /= 1000
    return f"{format_number(count)}T"


def format_flops(flops_per_second: float) -> str:
    """A rate as ``156 GFLOP/s`` or ``1.2 PFLOP/s``."""
    return _prefixed(flops_per_second, "FLOP/s")


def format_energy(watt_hours: float) -> str:
    """Energy as ``340 kWh`` or ``1.2 GWh``."""
    return _prefixed(watt_hours, "Wh")


def _prefixed(value: float, unit: str) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{format_number(value)} {prefixes[power]}{unit}"


def format_seconds(seconds: float) -> str:
    """A duration as ``7.2 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_duration(seconds: float) -> str:
    """As `format_seconds`, from two days on as ``7.8 days``."""
    days = seconds / 86400
    return format_seconds(seconds) if days < 2 else f"{format_number(days)} days"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which times of this order are read, and its seconds."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)


def format_ranks(ranks: Iterable[int]) -> str:
    """ "rank 5", "ranks 8 to 15", "ranks 1, 5 and 9": a short list of at most `_MOST_RANKS` ranks."""
    numbers = sorted(int(rank) for rank in ranks)
    if len(numbers) < 2:
        return f"rank {numbers[0]}" if numbers else "no rank"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    shown = [str(number) for number in numbers[:_MOST_RANKS]]
    if len(numbers) > _MOST_RANKS:
        return f"ranks {', '.join(shown)} and {len(numbers) - _MOST_RANKS} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
