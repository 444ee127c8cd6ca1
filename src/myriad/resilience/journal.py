"""What the driver decided, on disk before it is done: a line each, with the state that follows.

    {"time": ..., "plan": {...}}                              the engine has started the run
    {"time": ..., "actions": [{...}], "state": {...}}         a decision

A new driver begins with the plan and the state that were written last. A torn last line was not acted upon.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from myriad.jsonl import JsonlTail, append_line
from myriad.resilience.actions import Action
from myriad.resilience.codec import encode, plain, read
from myriad.resilience.state import Plan, State

__all__ = ["Journal"]


class Journal:
    """Of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, plan: Plan) -> None:
        """A new start of the run: earlier decisions are over."""
        self.append({"time": time.time(), "plan": plain(plan)})

    def write(self, actions: Sequence[Action], state: State) -> None:
        """To be called before the first action."""
        self.append(self.entry(actions, state))

    @staticmethod
    def entry(actions: Sequence[Action], state: State) -> dict[str, Any]:
        """What is to be written, as it is now: whoever writes may be a thread that comes to it later."""
        decided = {"actions": [encode(action) for action in actions], "state": plain(state)}
        return {"time": time.time(), **decided}

    def append(self, entry: dict[str, Any]) -> None:
        """On disk when this returns. Raises ``OSError``."""
        append_line(self.path, entry)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def left_over(self) -> tuple[int | None, tuple[int, ...]]:
        """What the last start of the run has found and the next must know: the newest step that can be
        trusted, where the ranks had not gone back to it (``None``: any can), and the steps that are
        skipped."""
        try:
            plan, state = self.replay()
        except (OSError, ValueError):  # there was none, or one of another version
            return None, ()
        last = plan if state is None else state
        return last.newest_step, last.skipped_steps

    def replay(self) -> tuple[Plan, State | None]:
        """The newest plan and what has become of it; ``None``: nothing was decided. Raises ``ValueError``
        when there is no plan."""
        plan, state = None, None
        for record in JsonlTail(self.path).poll():
            if "plan" in record:
                plan, state = record["plan"], None
            else:
                state = record.get("state", state)
        if plan is None:
            raise ValueError(f"{self.path} has no plan")
        return read(Plan, plan), None if state is None else read(State, state)
