"""All that is timed of the network's models, part by part.

    python benchmarks/network/network.py [PART...]     flows, packets, ...: those in `network_*.py`

A part is a file that names its own command in its first lines; each runs alone, in its own process.
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def find_parts() -> dict[str, Path]:
    """By what follows ``network_`` in their names."""
    found = {}
    for path in sorted(HERE.glob("network_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"python benchmarks/network/{path.name}" in docstring:
            found[path.stem.removeprefix("network_")] = path
    return found


def main() -> int:
    """Exits 1 if a part did."""
    parts = find_parts()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="*", choices=[[], *parts], help="those to run; none named: all")
    failed = []
    for name in parser.parse_args().part or parts:
        print(f"== {name}: python benchmarks/network/{parts[name].name}", flush=True)
        if subprocess.run([sys.executable, str(parts[name])], check=False).returncode:
            failed.append(name)
        print(flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
