"""Partition of a list of layers into stages, by one of five rules. No torch here.

uniform        equal numbers of the most common kind of layer (the blocks); other layers join their neighbours
type:REGEX     equal numbers of the layers whose kind matches
parameters     the largest stage has as few parameters as possible
profile        the slowest stage is as fast as possible, by measured seconds per layer
manual:B1,B2   first layer of each later stage
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil

from myriad.errors import BadInputError

__all__ = ["cut_ranges", "num_recomputed", "partition_layers"]

_KEY = "layout.partition"
_RULES = "uniform, parameters, profile, type:REGEX or manual:B1,B2,... (first layer of each later stage)"


def partition_layers(
    rule: str, num_stages: int, kinds: Sequence[str], costs: Sequence[float] | None = None
) -> list[range]:
    """Return the layers of each stage; no stage is empty. ``costs``: parameters or seconds per layer, for the
    rules that balance a cost.

    Raises `BadInputError` if ``rule`` cannot make ``num_stages`` stages of these layers.
    """
    num_layers = len(kinds)
    if num_stages > num_layers:
        raise BadInputError("layout.pp x layout.virtual_stages", num_stages, f"at most {num_layers} layers")
    name, _, rest = rule.partition(":")
    if name == "manual" and re.fullmatch(r"[0-9]+(,[0-9]+)*", rest):
        cuts = _manual_cuts(rule, [int(cut) for cut in rest.split(",")], num_stages, kinds)
    elif name == "type" and rest:
        cuts = _even_cuts(_matching(rule, rest, num_stages, kinds), num_stages, num_layers)
    elif rule in ("parameters", "profile"):
        assert costs is not None
        cuts = _balanced_cuts(costs, num_stages)
    elif rule == "uniform":
        matching = _most_common(tuple(kinds))
        chosen = matching if len(matching) >= num_stages else range(num_layers)
        cuts = _even_cuts(chosen, num_stages, num_layers)
    else:
        raise BadInputError(_KEY, rule, _RULES)
    return [range(a, b) for a, b in pairwise(cuts)]


def cut_ranges(stages: Sequence[range], num_chunks: int) -> list[range]:
    """Cut each stage's layers into ``num_chunks`` ranges of nearly equal length, in order."""
    found = []
    for own in stages:
        cuts = [own.start + len(own) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        found += [range(a, b) for a, b in pairwise(cuts)]
    return found


def _manual_cuts(rule: str, inner: list[int], num_stages: int, kinds: Sequence[str]) -> list[int]:
    last = len(kinds) - 1
    cuts = [0, *inner, last + 1]
    if num_stages == 1:
        raise BadInputError(_KEY, rule, "uniform with one stage: layout.pp x layout.virtual_stages is 1")
    if len(inner) != num_stages - 1 or any(a >= b for a, b in pairwise(cuts)):
        example = ",".join(str((last + 1) * stage // num_stages) for stage in range(1, num_stages))
        numbers = "1 number" if num_stages == 2 else f"{num_stages - 1} rising numbers"
        allowed = (
            f"{num_stages} stages need {numbers} from 1 to {last}, the first layer of each later stage, "
            f"e.g. manual:{example} (layer 0 is the {kinds[0]}, layer {last} the {kinds[-1]})"
        )
        raise BadInputError(_KEY, rule, allowed)
    return cuts


def _matching(rule: str, pattern: str, num_stages: int, kinds: Sequence[str]) -> list[int]:
    try:
        matching = [layer for layer, kind in enumerate(kinds) if re.search(pattern, kind)]
    except re.error as error:
        raise BadInputError(_KEY, rule, f"not a regular expression: {error}") from None
    if len(matching) < num_stages:
        known = ", ".join(dict.fromkeys(kinds))
        allowed = f"at least {num_stages} layers must match; kinds are {known}"
        raise BadInputError(_KEY, rule, allowed)
    return matching


@lru_cache(maxsize=8)
def _most_common(kinds: tuple[str, ...]) -> Sequence[int]:
    """Return the layers of the most common kind."""
    common = Counter(kinds).most_common(1)[0][0]
    return [layer for layer, kind in enumerate(kinds) if kind == common]


def _even_cuts(chosen: Sequence[int], num_stages: int, num_layers: int) -> list[int]:
    """Return cuts before the chosen layers that start each stage. Earlier stages get the larger shares."""
    share, extra = divmod(len(chosen), num_stages)
    starts = [stage * share + min(stage, extra) for stage in range(1, num_stages)]
    return [0, *(chosen[start] for start in starts), num_layers]


def _balanced_cuts(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the cuts that minimize the cost of the costliest stage, by dynamic programming over prefixes."""
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    n = len(costs)
    best: list[tuple[float, tuple[int, ...]]] = [(prefix[end], (0,)) for end in range(n + 1)]
    for stage in range(2, num_stages + 1):
        best = [
            min(
                (
                    (max(best[cut][0], prefix[end] - prefix[cut]), (*best[cut][1], cut))
                    for cut in range(stage - 1, end)
                ),
                default=(float("inf"), ()),
            )
            for end in range(n + 1)
        ]
    return [*best[n][1], n]


def num_recomputed(num_layers: int, ratio: float) -> int:
    """Return how many of a stage's layers are recomputed: the share ``ratio``, rounded up."""
    return min(num_layers, ceil(ratio * num_layers - 1e-9))
