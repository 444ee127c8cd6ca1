"""Imports only point to lower floors: checks every module of ``src/myriad`` against the order declared here.

A room (a folder, or a module beside them) may import itself and rooms on lower floors, never a neighbour or a room
above. Some rooms must also stay free of torch, so that a job can be read and explained where it cannot run.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "myriad"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("__init__", "errors", "units", "config", "toml_text"),
    ("program", "kernels", "network", "telemetry"),
    ("comm", "model", "optim", "data"),
    ("parallel", "planner", "checkpoint"),
    ("recipes", "job", "run"),
    ("train", "resilience", "dashboard"),
    ("cli",),
)
"""Lowest first."""

WITHOUT_TORCH = (
    "errors",
    "units",
    "config",
    "toml_text",
    "program",
    "network",
    "planner",
    "job",
    "run",
    "cli",
)


def main() -> int:
    """Prints each wrong import; 1 when there is one."""
    problems = [problem for path in sorted(SOURCE.rglob("*.py")) for problem in check_module(path)]
    for problem in problems:
        sys.stderr.write(problem + "\n")
    return 1 if problems else 0


def check_module(path: Path) -> Iterator[str]:
    """One line for each import that points up or sideways, or that brings torch where it must not be."""
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room not in (known := floor_of()):
        yield f"{path}:1: room {room!r} has no floor: add it to FLOORS in {Path(__file__).name}"
        return
    tree = ast.parse(path.read_text())
    for line, name in imports(tree):
        top, _, rest = name.partition(".")
        if top == "torch" and room in WITHOUT_TORCH and is_top_level(tree, line):
            yield f"{path}:{line}: {room} must not import torch"
        target = rest.partition(".")[0]
        if top == "myriad" and target in known and target != room and not allowed(room, target):
            yield f"{path}:{line}: {room} (floor {known[room]}) imports {target} (floor {known[target]})"


def floor_of() -> dict[str, int]:
    """Number of each room's floor."""
    return {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def allowed(room: str, target: str) -> bool:
    """Lower floors; on the lowest, and between the modules of floor 4, neighbours too: they are single files."""
    floors = floor_of()
    singles = {"errors", "units", "config", "toml_text", "job", "run", "recipes"}
    return floors[target] < floors[room] or (floors[target] == floors[room] and {room, target} <= singles)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import, wherever it stands, as line and dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_top_level(tree: ast.Module, line: int) -> bool:
    """Whether the statement at this line runs when the module is imported."""
    return any(node.lineno == line for node in tree.body)


if __name__ == "__main__":
    sys.exit(main())
