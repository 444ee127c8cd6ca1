"""If these fail, something is shipped or installed that no list names, or that differs from what it names."""

import hashlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import lock  # noqa: E402
import sbom  # noqa: E402

VENDOR = sbom.VENDOR


def test_each_script_of_others_is_in_the_table_with_its_hash_and_licence() -> None:
    rows = sbom.vendored()
    names = {row["file"] for row in rows} | {row["licence_file"] for row in rows} | {"README.md"}
    assert names == {path.name for path in VENDOR.iterdir()}
    for row in rows:
        assert hashlib.sha256((VENDOR / row["file"]).read_bytes()).hexdigest() == row["sha256"], row["file"]
        first = (VENDOR / row["licence_file"]).read_text()[:300]
        assert {"MIT": "MIT License", "Apache-2.0": "Apache License"}[row["licence"]] in first


def test_no_other_script_of_the_page_is_from_elsewhere() -> None:
    """Minified code has long lines; a reference to the network would be refused by the page's policy."""
    for path in VENDOR.parent.rglob("*.js"):
        if path.parent != VENDOR:
            text = path.read_text()
            assert max(map(len, text.splitlines()), default=0) < 400, path
            assert "@license" not in text and "sourceMappingURL" not in text, path


def test_the_locks_have_each_direct_dependency_in_its_range_and_a_hash_for_all() -> None:
    assert list(lock.problems()) == [], "run `make lock`"
    for name in lock.LOCKS:
        text = (lock.FOLDER / name).read_text()
        for block in text.split("\n")[1:]:
            if block[:1].isalnum():
                assert block.endswith("\\"), f"{name}: {block} has no hash"
    torch = (lock.FOLDER / "torch.txt").read_text().splitlines()[-1]
    ranges = lock.direct(())
    assert torch.startswith("torch==") and "torch" not in {one.name for one in ranges}


def test_the_bill_of_materials_has_all_that_is_needed(tmp_path: Path) -> None:
    out = tmp_path / "build" / "sbom.json"
    subprocess.run([sys.executable, ROOT / "scripts" / "sbom.py", out], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    refs = [one["bom-ref"] for one in found["components"]]
    assert len(refs) == len(set(refs))
    named = {one["name"]: one for one in found["components"]}
    installed = {one.metadata["Name"].lower().replace("_", "-") for one in metadata.distributions()}
    for one in sbom.direct_dependencies():
        if one.name.lower() in installed:
            assert named[one.name.lower()]["version"] == metadata.version(one.name)
    assert {"torch", "numpy", "preact", "htm", "sympy"} <= set(named), "also what dependencies need"
    known = {"myriad-train", *refs}
    for each in found["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= known


def test_the_bill_follows_the_schema() -> None:
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    pytest.importorskip("jsonschema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(sbom.bill())) is None
