"""Colours of a step's losses, the same in the terminal, the report and the page. They are distinguishable
with colour blindness (`tests/browser/test_page_colours.py`)."""

__all__ = ["COLOURS", "MEANING", "USEFUL"]

USEFUL = "#17407a"
"""Colour of model FLOPs at the peak."""
COLOURS = {
    "slower than peak": "#5ea1ff",
    "bubble": "#cba305",
    "slower ranks": "#8f7fc9",
    "tensor": "#7a4fa3",
    "pipeline": "#dd7f52",
    "data parallel": "#f2cda9",
    "data": "#e9cd21",
    "optimizer": "#909fb2",
    "checkpoint": "#8c6d4f",
    "garbage": "#e75d9e",
    "evaluation": "#87c7d1",
    "other": "#7d8894",
}
MEANING = {
    "slower than peak": "compute below the peak FLOP/s, and recomputation",
    "bubble": "waiting for another stage's output",
    "slower ranks": "waiting for the slowest peer",
    "tensor": "exposed tensor-parallel communication",
    "pipeline": "exposed messages between stages",
    "data parallel": "exposed data-parallel communication",
    "data": "waits for the batch",
    "optimizer": "the step of the optimizer, and the norm of all gradients",
    "checkpoint": "training paused for a snapshot",
    "garbage": "Python's garbage collector",
    "evaluation": "the loss on held-out text",
    "other": "nothing was recorded, or the job's own spans",
}
