"""If these break: the pages that explain programs and passes show other programs than those that run."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples"))

from show_program import program_lines  # noqa: E402

PAGES = [ROOT / "docs" / "concepts" / name for name in ("program.md", "overlap.md")]
TEXT = "\n".join(page.read_text() for page in PAGES)


def shown() -> dict[str, list[str]]:
    """Return the lines of each program on the pages by its keys, with wrapped lines joined."""
    blocks = re.findall(r"^    # (layout.*)\n((?:    .*\n)+)", TEXT, re.MULTILINE)
    return {
        keys: [" ".join(line.split()) for line in re.split(r"\n(?=    rank)", text)] for keys, text in blocks
    }


@pytest.mark.parametrize("keys", shown())
def test_programs_on_the_page_are_those_that_run(keys):
    assert shown()[keys] == program_lines(keys.split())


def test_the_page_has_a_program_before_and_after_each_pass_that_rewrites():
    switches = {key for keys in shown() for key in keys.split() if key.endswith("false")}
    assert {f"overlap.{name}=false" for name in ("pipeline", "data", "optimizer")} <= switches


def test_scripts_that_the_pages_run_exist():
    scripts = re.findall(r"`(?:python|pytest) ((?:benchmarks|examples|tests)/[\w/]+\.py)", TEXT)
    assert scripts and [script for script in scripts if not (ROOT / script).exists()] == []
