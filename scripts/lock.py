"""Renew the locked requirements in requirements/ from the ranges in pyproject.toml, with uv.

python scripts/lock.py UV            UV: path of the uv program
python scripts/lock.py --check       exit 1 unless each direct dependency is locked, in its range
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
LOCKS = {"lock.txt": ("watch", "png"), "lock-dev.txt": ("dev",)}
_APART = re.compile(r"(torch|nvidia-.*|cuda-.*)==")
"""PyTorch and the packages that only its builds for CUDA need."""


def locked(text: str) -> dict[str, list[Requirement]]:
    """Return the requirements of a lock, by name. A name may have several, with different markers."""
    found: dict[str, list[Requirement]] = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            one = Requirement(line.rstrip("\\ "))
            found.setdefault(one.name, []).append(one)
    return found


def direct(extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield the direct dependencies of the package with some extras, without PyTorch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for text in [*project["dependencies"], *(one for extra in extras for one in optional[extra])]:
        one = Requirement(text)
        if one.name != "torch":
            yield one


def problems() -> Iterator[str]:
    """Yield a line for each direct dependency that a lock lacks, or has outside of its range."""
    for name, extras in LOCKS.items():
        lock = locked((FOLDER / name).read_text())
        for one in direct(extras):
            versions = [next(iter(each.specifier)).version for each in lock.get(one.name.lower(), ())]
            if not versions:
                yield f"{name} has no {one.name}"
            yield from (
                f"{name}: {one.name} {each} is not in {one.specifier}"
                for each in versions
                if each not in one.specifier
            )


def _renew(uv: str) -> None:
    torch = ""
    for name, extras in LOCKS.items():
        options = ["--universal", "--generate-hashes", "--python-version", "3.11", "--no-annotate"]
        options += ["--no-header", "--quiet", *(word for extra in extras for word in ("--extra", extra))]
        command = [uv, "pip", "compile", *options, "pyproject.toml", "requirements/build.in"]
        text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        blocks = re.split(r"(?m)^(?=[a-zA-Z0-9])", text)
        kept = [block for block in blocks if not _APART.match(block)]
        head = "# Written by `make lock`: see README.md\n"
        (FOLDER / name).write_text(head + "".join(kept))
        (torch,) = (block.split()[0] for block in blocks if block.startswith("torch=="))
    (FOLDER / "torch.txt").write_text(f"# Written by `make lock`: see README.md\n{torch}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        found = list(problems())
        sys.stderr.write("".join(f"{line}\n" for line in found))
        sys.exit(bool(found))
    _renew(sys.argv[1])
