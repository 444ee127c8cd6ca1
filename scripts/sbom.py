"""Write a software bill of materials: what the installed package needs, as CycloneDX 1.6 in JSON.

    python scripts/sbom.py FILE

It lists the distributions that are installed here and reached from myriad-train with the extras of `make
train`, with the hashes of requirements/lock-dev.txt where the release is the locked one, and the scripts of
others that the page has (dashboard/page/vendor/README.md).
"""

import json
import re
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
VENDOR = ROOT / "src" / "myriad" / "dashboard" / "page" / "vendor"
NAME, EXTRAS = "myriad-train", ("watch", "png")
_ROW = re.compile(r"\| `([^`]+)` \| (\S+) (\S+), `([^`]+)` \| (\S+) \(`([^`]+)`\) \| `([0-9a-f]{64})` \|")


def vendored() -> list[dict[str, str]]:
    """Return the rows of the table of scripts that come from others."""
    keys = ("file", "package", "version", "source", "licence", "licence_file", "sha256")
    return [dict(zip(keys, row, strict=True)) for row in _ROW.findall((VENDOR / "README.md").read_text())]


def direct_dependencies() -> list[Requirement]:
    """Return the direct dependencies, those of `EXTRAS` included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [
        Requirement(text)
        for text in [*project["dependencies"], *(one for extra in EXTRAS for one in optional[extra])]
    ]


def needed() -> dict[str, tuple[metadata.Distribution, list[str]]]:
    """Return the installed distributions that the package needs, each with the names of those it needs."""
    found: dict[str, tuple[metadata.Distribution, list[str]]] = {}
    todo = direct_dependencies()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name in found and not one.extras:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform, or an extra that is not installed
        below = [
            each
            for each in map(Requirement, distribution.requires or ())
            if each.marker is None or any(each.marker.evaluate({"extra": ex}) for ex in ("", *one.extras))
        ]
        found[name] = distribution, sorted({canonicalize_name(each.name) for each in below})
        todo += below
    return found


def locked_hashes() -> dict[tuple[str, str], list[str]]:
    """Return the hashes of each release in the lock, by name and version."""
    text = (ROOT / "requirements" / "lock-dev.txt").read_text()
    blocks = re.findall(r"(?m)^([\w.-]+)==(\S+)((?:.*\\\n)+(?:.*\n))", text)
    return {(name, version): re.findall(r"sha256:([0-9a-f]{64})", rest) for name, version, rest in blocks}


def bill() -> dict[str, Any]:
    """Return the document."""
    packages, hashes = needed(), locked_hashes()
    refs = {name: f"pkg:pypi/{name}@{each.version}" for name, (each, _) in packages.items()}
    components = [
        _component(name, refs[name], each, hashes.get((name, each.version.partition("+")[0]), []))
        for name, (each, _) in sorted(packages.items())
    ]
    scripts = vendored()
    components += [
        {
            "type": "library",
            "bom-ref": f"vendor/{row['file']}",
            "name": row["package"],
            "version": row["version"],
            "purl": f"pkg:npm/{row['package']}@{row['version']}",
            "licenses": [{"license": {"id": row["licence"]}}],
            "hashes": [{"alg": "SHA-256", "content": row["sha256"]}],
            "properties": [
                {"name": "myriad:file", "value": (VENDOR / row["file"]).relative_to(ROOT).as_posix()}
            ],
        }
        for row in scripts
    ]
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "src" / "myriad" / "__init__.py").read_text())
    assert version is not None
    own = {"type": "application", "bom-ref": NAME, "name": NAME, "version": version[1]}
    below = {canonicalize_name(one.name) for one in direct_dependencies()}
    top = sorted(refs[name] for name in below if name in refs) + [f"vendor/{row['file']}" for row in scripts]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": own | {"licenses": [{"license": {"id": "Apache-2.0"}}]},
        },
        "components": components,
        "dependencies": [
            {"ref": NAME, "dependsOn": top},
            *(
                {"ref": refs[name], "dependsOn": sorted(refs[one] for one in below if one in refs)}
                for name, (_, below) in sorted(packages.items())
            ),
        ],
    }


def _component(name: str, ref: str, each: metadata.Distribution, hashes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "library", "bom-ref": ref, "name": name, "version": each.version}
    found["purl"] = ref.replace("+", "%2B")
    licence = each.metadata.get("License-Expression")
    text = each.metadata.get("License") or ""
    if licence:
        found["licenses"] = [{"expression": licence}]
    elif text and "\n" not in text and len(text) < 80:
        found["licenses"] = [{"license": {"name": text}}]
    if hashes:  # of all files of the release, of which one is installed
        found["properties"] = [{"name": "myriad:locked-sha256", "value": one} for one in sorted(hashes)]
    return found


def main(path: Path) -> None:
    """Write the document."""
    found = bill()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: {len(found['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
