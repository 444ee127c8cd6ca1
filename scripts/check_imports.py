"""Checks which part of the library imports which. Exits 1 with a line for each breach of the order.

    python scripts/check_imports.py [SOURCE]

A module imports its own room and lower floors only (also inside functions and for types), modules form no
cycle, the rooms in TORCH_FREE can be imported without torch (so that planning is quick and `--help` quicker),
what decides knows neither clock nor files nor sockets, and only `cli` prints. Read with `ast`: nothing is
imported, so a broken tree is checked too.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FLOORS = (
    ("errors units config system",),
    ("wire",),
    ("kernels", "program", "network", "telemetry", "alerts"),
    ("model", "optim", "data", "comm"),
    ("parallel", "planner", "checkpoint"),
    ("evaluation",),
    ("job recipes",),
    ("run",),
    ("doctor",),
    ("supervise",),
    ("launchers",),
    ("many_runs",),
    ("train", "faults", "dashboard"),
    ("forecasts",),
    ("reports",),
    ("cli __main__", "api", "notebook", "lm_eval_model"),
)
"""Lowest first; a string is a room: a folder, a file, or a few that belong together."""

TORCH_FREE = (
    "errors units config system wire program network planner job recipes run alerts many_runs dashboard "
    "forecasts reports cli notebook"
)

APART = {"train": ("doctor", "supervise", "launchers")}
"""Rooms that never run in the same process: the first imports none of the others, whatever their floors."""

BY_ITS_FACE = {"cli": ("planner",)}
"""Rooms of which the first uses only what the package itself offers, none of its modules."""

PURE = "supervise.policy."
KNOWN_TO_PURE = ("supervise.messages", "supervise.observations", "supervise.exit_causes")
"""Modules that begin so use, of their room, only each other and these, and nothing of the world outside."""
OUTSIDE = {
    ":asyncio",
    ":os",
    ":pathlib",
    ":random",
    ":socket",
    ":subprocess",
    ":threading",
    ":time",
    ":torch",
}

PLACES = {
    name: (floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms for name in room.split()
}


@dataclass(frozen=True)
class Import:
    """One imported module; ``now``: when the module is, not later inside a function and not for types
    only."""

    target: str
    line: int
    now: bool


@dataclass(frozen=True)
class Module:
    """One file: its dotted name without the package's, what it imports, and the lines where it prints."""

    name: str
    path: Path
    imports: tuple[Import, ...]
    prints: tuple[int, ...]

    @property
    def room(self) -> str:
        """First part of the name: the folder or the file."""
        return self.name.partition(".")[0]


def read_modules(package: Path) -> dict[str, Module]:
    """Every module of the package folder by dotted name; the package itself is ``""``."""
    paths = {_dotted(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    modules = {}
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
        found = tuple(_imports(tree, True, package.name, set(paths)))
        modules[name] = Module(name, path, found, _prints(tree) if "print" in text else ())
    return modules


def _prints(tree: ast.AST) -> tuple[int, ...]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print")


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST, now: bool, package: str, known: set[str]) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(_inside(alias.name, package), child.lineno, now)
        elif isinstance(child, ast.ImportFrom):
            base = _inside(child.module or "", package) if not child.level else "<relative>"
            for alias in child.names:
                part = f"{base}.{alias.name}".lstrip(".")
                yield Import(part if part in known else base, child.lineno, now)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types(child)
            yield from _imports(child, now and not later, package, known)


def _inside(name: str, package: str) -> str:
    """Without the package's name for its own modules; others keep theirs behind a colon."""
    head, _, rest = name.partition(".")
    return rest if head == package else f":{head}"


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def check_floors(modules: dict[str, Module]) -> Iterator[str]:
    """Every import that does not point to its own room or to a lower floor."""
    for module in modules.values():
        if module.name and module.room not in PLACES:
            yield f"{module.path}:1: {module.room} stands on no floor: add it to FLOORS"
            continue
        for found in module.imports:
            where, target = f"{module.path}:{found.line}", found.target.partition(".")[0]
            if found.target == "<relative>":
                yield f"{where}: relative import: write the whole name"
            elif module.name and target in PLACES and not _may(module.room, target):
                (floor, _), (above, _) = PLACES[module.room], PLACES[target]
                yield f"{where}: {module.room} (floor {floor}) imports {target} (floor {above})"


def check_faces(modules: dict[str, Module]) -> Iterator[str]:
    """Imports of a room's modules where only its public names may be used."""
    for module in modules.values():
        for target in BY_ITS_FACE.get(module.room, ()):
            for found in module.imports:
                if found.target.startswith(f"{target}."):
                    where = f"{module.path}:{found.line}"
                    yield f"{where}: {module.room} imports {found.target}, not {target}'s public names"


def _may(room: str, target: str) -> bool:
    if target in APART.get(room, ()):
        return False
    return PLACES[target][0] < PLACES[room][0] or PLACES[target] == PLACES[room]


def check_cycles(modules: dict[str, Module]) -> Iterator[str]:
    """A cycle of modules, if there is one."""
    graph = {name: {i.target for i in module.imports} & set(modules) for name, module in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
        first, second = modules[cycle[1]], cycle[0]
        line = next(found.line for found in first.imports if found.target == second)
        yield f"{first.path}:{line}: import cycle {' <- '.join(cycle)}"


def check_torch_free(modules: dict[str, Module]) -> Iterator[str]:
    """Modules of torch-free rooms whose import would import torch, with the way there."""
    for module in modules.values():
        if module.room in TORCH_FREE.split() and (way := _way_to_torch(module.name, modules, {module.name})):
            first = way[0]
            names = " -> ".join([module.name, *(step.target for step in way)])
            yield f"{module.path}:{first.line}: needs torch to be imported: {names.replace(':', '')}"


def _way_to_torch(name: str, modules: dict[str, Module], seen: set[str]) -> list[Import]:
    for found in modules[name].imports:
        if not found.now:
            continue
        if found.target == ":torch":
            return [found]
        for target in _with_parents(found.target):
            if target in modules and target not in seen:
                seen.add(target)
                if way := _way_to_torch(target, modules, seen):
                    return [found, *way]
    return []


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def check_pure(modules: dict[str, Module]) -> Iterator[str]:
    """Decisions that could not be made under another clock."""
    for module in modules.values():
        if not module.name.startswith(PURE):
            continue
        for found in module.imports:
            of_room = found.target.startswith(f"{module.room}.")
            mine = found.target.startswith((PURE, *KNOWN_TO_PURE))
            if found.target.partition(".")[0] in OUTSIDE or (of_room and not mine):
                what = found.target.lstrip(":")
                yield f"{module.path}:{found.line}: {module.name} is pure, and imports {what}"


def check_prints(modules: dict[str, Module]) -> Iterator[str]:
    """The library does not talk to the screen."""
    for module in modules.values():
        if module.room != "cli":
            yield from (f"{module.path}:{line}: prints: only cli does" for line in module.prints)


def main(arguments: list[str]) -> int:
    """Checks the package folder given, or this repository's."""
    package = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "src" / "myriad"
    modules = read_modules(package)
    checks = (check_floors, check_faces, check_cycles, check_torch_free, check_pure, check_prints)
    breaches = [line for check in checks for line in check(modules)]
    for line in breaches:
        print(line)
    print(f"{len(modules)} modules, {len(breaches)} breaches of the import order")
    return 1 if breaches or not modules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
