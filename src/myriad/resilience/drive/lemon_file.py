"""What is remembered of machines, on disk: a line for each accusation, and for each time one was cleared.

    ~/.local/share/myriad/lemons.jsonl    beside the doctor's baseline; drivers add, doctor and people clear

A line is added with one write, so that drivers of several runs need no lock.
"""

import time
from dataclasses import asdict
from pathlib import Path

from myriad.jsonl import JsonlTail, append_line
from myriad.resilience.decide.lemons import Accusation, Lemons
from myriad.resilience.user_folder import user_folder

__all__ = ["accuse", "clear", "lemon_path", "read_lemons"]


def lemon_path() -> Path:
    """Of this user."""
    return user_folder() / "lemons.jsonl"


def read_lemons(path: Path | None = None) -> Lemons:
    """Nobody is accused where there is no file. Raises ``OSError``."""
    return Lemons(JsonlTail(path or lemon_path()).poll())


def accuse(accusation: Accusation, path: Path | None = None) -> None:
    """Raises ``OSError``."""
    path = path or lemon_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, asdict(accusation))


def clear(machine: str, by: str, path: Path | None = None) -> None:
    """``by``: "doctor", or a person. Raises ``OSError``."""
    append_line(path or lemon_path(), {"time": time.time(), "machine": machine, "cleared_by": by})
