"""Drawing of a program as rows of coloured characters, as wide as the terminal allows.

Each row is a list of cells, side by side. A box is one cell; idle time is a cell without an action. From wide
to narrow, a cell shows ``F3`` (kind and micro-batch), ``3``, or the kind's letter. In the narrowest form each
column shows the action at its middle.
"""

from dataclasses import dataclass

from myriad.program.actions import COMPUTE, Action, Kind, Program
from myriad.program.timeline import ActionSpan, Timeline

__all__ = ["LETTERS", "Cell", "text_rows"]

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
"""Letter of each kind, for output without colour."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The characters of one action, or of idle time if ``action`` is None."""

    text: str
    action: Action | None


def text_rows(program: Program, times: Timeline, most_columns: int) -> list[list[Cell]]:
    """Return one row per rank. All rows have equal length, at most ``most_columns``."""
    unit = 1 / program.virtual_stages
    num_units = round(times.makespan / unit)
    digits = len(str(program.num_micro_batches - 1))
    width = min(digits + 2, most_columns // max(1, num_units))
    if width < 1:
        return [_sampled_row(spans, times.makespan, max(1, most_columns)) for spans in times.ranks]
    return [_exact_row(spans, unit, num_units, width, digits) for spans in times.ranks]


def _exact_row(
    spans: tuple[ActionSpan, ...], unit: float, num_units: int, width: int, digits: int
) -> list[Cell]:
    cells, reached = [], 0
    for span in spans:
        if span.action.kind not in COMPUTE:
            continue
        start, length = round(span.start / unit), round(span.duration / unit)
        if start > reached:
            cells.append(Cell(" " * width * (start - reached), None))
        cells.append(Cell(_label(span.action, width, digits).ljust(width * length), span.action))
        reached = start + length
    if num_units > reached:
        cells.append(Cell(" " * width * (num_units - reached), None))
    return cells


def _label(action: Action, width: int, digits: int) -> str:
    letter = LETTERS[action.kind]
    if width > digits:
        return f"{letter}{action.micro_batch}"
    return str(action.micro_batch) if width == digits else letter


def _sampled_row(spans: tuple[ActionSpan, ...], makespan: float, columns: int) -> list[Cell]:
    """Return a row in which each column shows the action at the column's middle."""
    computes = [span for span in spans if span.action.kind in COMPUTE]
    cells, index = [], 0
    for column in range(columns):
        time = (column + 0.5) * makespan / columns
        while index < len(computes) and computes[index].end <= time:
            index += 1
        inside = index < len(computes) and computes[index].start <= time
        action = computes[index].action if inside else None
        cells.append(Cell(LETTERS[action.kind] if action else " ", action))
    return cells
