"""Print figures of the source as a mirror for maintainers: sizes, docstrings, words and names, room by room.

    python scripts/house_figures.py [SOURCE] [--json]

A figure is a place to look, never a limit: nothing in CI compares them. Splitting, merging or padding a file
to improve one makes the source worse.
"""

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

_ODD = re.compile(r"\b(told|tells?|mend(?:s|ed)?|nobody|somebody|whom)\b", re.IGNORECASE)
_LONG_FILE, _SMALL_FILE = 450, 40


@dataclass
class _Figures:
    """What was counted."""

    lines: dict[str, int] = field(default_factory=dict)
    docstrings: list[str] = field(default_factory=list)
    odd_words: int = 0
    comment_lines: int = 0
    function_lines: list[int] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    users: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def measure(package: Path) -> _Figures:
    """Read every module of a package."""
    paths = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    found = _Figures()
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        found.lines[name] = text.count("\n")
        found.odd_words += len(_ODD.findall(text))
        found.comment_lines += sum(line.lstrip().startswith("#") for line in text.splitlines())
        _read(ast.parse(text), name, found)
    return found


def _dotted(path: Path, package: Path) -> str:
    name = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
    return name.removesuffix(".__init__")


def _read(tree: ast.Module, name: str, found: _Figures) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                found.docstrings.append(" ".join(node.value.value.split()))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                if target != name:
                    found.users[target].add(name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.users[alias.name].add(name)
    found.classes.update(
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def table(found: _Figures) -> dict[str, object]:
    """Return each figure by what it says."""
    modules = {name: lines for name, lines in found.lines.items() if lines > 1}
    lone = [name for name in modules if len(found.users[name] & modules.keys()) == 1]
    folders = Counter(name.rpartition(".")[0] for name in modules)
    folder, most = folders.most_common(1)[0]
    words = [text.split() for text in found.docstrings]
    bases = Counter(name.rpartition(".")[2] for name in modules if not name.endswith(".config"))
    return {
        "modules": len(modules),
        "lines": sum(modules.values()),
        "lines of the median module": int(median(modules.values())),
        f"modules above {_LONG_FILE} lines": sum(lines > _LONG_FILE for lines in modules.values()),
        f"modules of {_SMALL_FILE} lines or fewer": sum(lines <= _SMALL_FILE for lines in modules.values()),
        "modules with one importer": f"{len(lone)} ({len(lone) / len(modules):.0%})",
        "modules in the fullest folder": f"{most} ({folder})",
        "lines of the median function": int(median(found.function_lines)),
        "docstrings": len(words),
        "docstrings of three words or fewer": sum(len(one) <= 3 for one in words),
        "docstrings that begin with Of": sum(one[:1] == ["Of"] for one in words),
        "told, tell, mend, nobody, somebody, whom": found.odd_words,
        "lines that are comments": found.comment_lines,
        "public class names used twice": sum(count > 1 for count in found.classes.values()),
        "file names used twice": sum(count > 1 for count in bases.values()),
    }


def rooms(found: _Figures) -> dict[str, tuple[int, int]]:
    """Return modules and lines of each folder at the top of the package."""
    counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, lines in found.lines.items():
        parts = name.split(".")
        room = parts[1] if len(parts) > 2 else ""
        counted[room][0] += 1
        counted[room][1] += lines
    return {
        room or "(modules at the top)": (files, lines) for room, (files, lines) in sorted(counted.items())
    }


def main(arguments: list[str]) -> int:
    """Print the figures of the package folder given, or of this repository's."""
    places = [argument for argument in arguments if not argument.startswith("--")]
    found = measure(Path(places[0]) if places else Path(__file__).parents[1] / "src" / "myriad")
    if "--json" in arguments:
        print(json.dumps({"figures": table(found), "rooms": rooms(found)}))
        return 0
    for name, figure in table(found).items():
        print(f"{name:44} {figure}")
    print(f"\n{'room':24} {'files':>6} {'lines':>7}")
    for room, (files, lines) in rooms(found).items():
        print(f"{room:24} {files:6} {lines:7}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
