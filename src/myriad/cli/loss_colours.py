"""What a step's losses look like, in the terminal and on the page alike. Told apart without red and green."""

__all__ = ["COLOURS", "MEANING", "USEFUL"]

USEFUL = "#2f6fb3"
"""Model FLOPs at the peak."""
COLOURS = {
    "slower than peak": "#8fb8de",
    "bubble": "#e0a526",
    "slower ranks": "#b3403a",
    "tensor": "#6f5aa8",
    "pipeline": "#a58fd0",
    "data parallel": "#4a9a9a",
    "data": "#d98cb3",
    "optimizer": "#8a9099",
    "checkpoint": "#c9b458",
    "garbage": "#7a4f2a",
    "evaluation": "#4fb0c6",
    "other": "#c9ced6",
}
MEANING = {
    "slower than peak": "computes that take longer than at the peak, and what is computed again",
    "bubble": "waits for another stage, which had nothing to send yet",
    "slower ranks": "waits for the last of ranks that do the same",
    "tensor": "tensor-parallel communication that nothing hides",
    "pipeline": "messages between stages that nothing hides",
    "data parallel": "gathers and reductions that nothing hides",
    "data": "waits for the batch",
    "optimizer": "the step of the optimizer, and the norm of all gradients",
    "checkpoint": "training stood for a copy",
    "garbage": "Python's garbage collector",
    "evaluation": "the loss on held-out text",
    "other": "nothing was recorded, or the job's own spans",
}
