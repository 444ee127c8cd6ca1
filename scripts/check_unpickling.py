"""Checks that nothing in the library can unpickle what it did not write. Exits 1 with a line for each place.

    python scripts/check_unpickling.py [SOURCE]

A pickle runs code that its author chose, so no message and no file is ever unpickled: messages between ranks
are typed (`myriad.comm.typed_collectives`), and files of other tools are read by unpicklers that know a list
of classes. Read with `ast`: nothing is imported.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

UNPICKLERS = {
    "pickle": {"load", "loads", "Unpickler", "_Unpickler"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "dill": {"load", "loads"},
    "cloudpickle": {"load", "loads"},
    "joblib": {"load"},
}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""Functions of torch.distributed that unpickle what a peer sends."""
NEEDS = {"torch": ("load", "weights_only", True), "numpy": ("load", "allow_pickle", False)}
"""Functions that may unpickle unless this argument has this value."""
MODULES = ("multiprocessing", "concurrent.futures.process")
"""Modules whose pipes and queues unpickle."""

SUSPECTS = {*UNPICKLERS, *OBJECT_COLLECTIVES, *(name for name, _, _ in NEEDS.values())}
SUSPECTS |= {module.partition(".")[0] for module in MODULES}
"""A file without any of these words cannot unpickle, and is not parsed."""

ALLOWED = {
    "checkpoint/foreign/archives.py": {"pickle._Unpickler"},  # a subclass that knows a list of classes
    "data/tokenize_pieces.py": {
        "multiprocessing",
        "concurrent.futures.process",
    },  # pipes to processes that this one starts
    "train/calibration/measure_machine.py": {"multiprocessing"},
}


def find_unpickling(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything in a file that can unpickle."""
    text = path.read_text(encoding="utf-8")
    if SUSPECTS.isdisjoint(re.findall(r"\w+", text)):
        return
    nodes = list(ast.walk(ast.parse(text, str(path))))
    names = dict(_imported(nodes))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            yield from ((node.lineno, module) for module in modules if module.startswith(MODULES))
        if isinstance(node, ast.Attribute | ast.Name) and (found := _unpickles(_dotted(node, names))):
            yield node.lineno, found
        if isinstance(node, ast.Call):
            module, _, function = _dotted(node.func, names).rpartition(".")
            name, argument, value = NEEDS.get(module, ("", "", None))
            if function == name and function and not _passes(node, argument, value):
                yield node.lineno, f"{module}.{function} without {argument}={value}"


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each imported name with what it stands for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((one.asname, one.name) for one in node.names if one.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _unpickles(name: str) -> str:
    module, _, last = name.rpartition(".")
    if last in OBJECT_COLLECTIVES:
        return last
    return name if last in UNPICKLERS.get(module, ()) else ""


def _passes(call: ast.Call, argument: str, value: object) -> bool:
    """Whether the call sets the argument to this value; numpy's default is the safe one."""
    given = [one.value for one in call.keywords if one.arg == argument]
    if not given:
        return value is False
    return isinstance(given[0], ast.Constant) and given[0].value is value


def main(arguments: list[str]) -> int:
    """Check the package folder given, or this repository's."""
    package = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "src" / "myriad"
    paths = sorted(package.rglob("*.py"))
    places = [
        f"{path}:{line}: {name} can unpickle"
        for path in paths
        for line, name in sorted(set(find_unpickling(path)))
        if not name.startswith(tuple(ALLOWED.get(path.relative_to(package).as_posix(), ())))
    ]
    for place in places:
        print(place)
    print(f"{len(paths)} modules, {len(places)} places that can unpickle")
    return 1 if places or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
