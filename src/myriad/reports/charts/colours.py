"""Colours of a step's losses and of compute actions, the same in the terminal, the report and the page.

Losses are distinguishable with colour blindness (`tests/browser/test_page_colours.py`). Of a compute
action, the hue shows the kind, and the lightness the stage: light for a rank's first stage, dark for its
last.
"""

from myriad.program.actions import Action, Kind, Program

__all__ = ["COLOURS", "KIND_NAMES", "MEANING", "USEFUL", "box_colour", "ink_colour"]

USEFUL = "#17407a"
"""Colour of model FLOPs at the peak."""
COLOURS = {
    "slower than peak": "#5ea1ff",
    "bubble": "#cba305",
    "slower ranks": "#8f7fc9",
    "tensor": "#7a4fa3",
    "experts": "#84180f",
    "context": "#aa5500",
    "pipeline": "#dd7f52",
    "data parallel": "#f2cda9",
    "data": "#e9cd21",
    "optimizer": "#909fb2",
    "other": "#7d8894",
}
MEANING = {
    "slower than peak": "compute below the peak FLOP/s, and recomputation",
    "bubble": "waiting for another stage's output",
    "slower ranks": "waiting for the slowest peer",
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed context-parallel communication: keys, values and heads of other ranks' positions",
    "experts": "tokens on their way to experts on other ranks, and back",
    "pipeline": "exposed messages between stages",
    "data parallel": "exposed data-parallel communication",
    "data": "waits for the batch",
    "optimizer": "the step of the optimizer, and the norm of all gradients",
    "other": "nothing was recorded, or the job's own spans",
}


KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
    Kind.PAIRED_FORWARD: "forward, in a pair",
    Kind.PAIRED_BACKWARD: "backward, in a pair",
}
"""Kinds of compute actions in the order in which legends show them."""

_LIGHT_AND_DARK = {
    Kind.FORWARD: ((157, 195, 240), (33, 86, 158)),
    Kind.BACKWARD: ((160, 215, 165), (28, 112, 62)),
    Kind.BACKWARD_INPUT: ((137, 211, 204), (15, 108, 104)),
    Kind.BACKWARD_WEIGHT: ((250, 205, 130), (196, 110, 20)),
    Kind.PAIRED_FORWARD: ((184, 186, 240), (72, 66, 158)),
    Kind.PAIRED_BACKWARD: ((196, 215, 140), (84, 112, 28)),
}


def box_colour(program: Program, action: Action) -> str:
    """Return ``#rrggbb`` of a compute action."""
    red, green, blue = _mixed(program, action)
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink_colour(program: Program, action: Action) -> str:
    """Return ``#rrggbb`` of a number that is readable on that box."""
    red, green, blue = _mixed(program, action)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#16202c"


def _mixed(program: Program, action: Action) -> tuple[int, int, int]:
    light, dark = _LIGHT_AND_DARK[action.kind]
    steps = max(1, program.virtual_stages - 1)
    depth = (action.stage // program.num_ranks) / steps if program.virtual_stages > 1 else 0.25
    red, green, blue = (round(a + (b - a) * depth) for a, b in zip(light, dark, strict=True))
    return red, green, blue
