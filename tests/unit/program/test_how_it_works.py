"""The page that explains programs shows the ones that run, or it explains something else."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples"))

from show_program import program_lines  # noqa: E402

PAGE = (ROOT / "docs" / "how-it-works.md").read_text()


def shown() -> dict[str, list[str]]:
    """Keys of each program on the page to its lines, each whole again."""
    blocks = re.findall(r"^    # (layout.*)\n((?:    .*\n)+)", PAGE, re.MULTILINE)
    return {
        keys: [" ".join(line.split()) for line in re.split(r"\n(?=    rank)", text)] for keys, text in blocks
    }


@pytest.mark.parametrize("keys", shown())
def test_programs_on_the_page_are_those_that_run(keys):
    assert shown()[keys] == program_lines(keys.split())


def test_the_page_has_a_program_before_and_after_each_pass_that_rewrites():
    switches = {key for keys in shown() for key in keys.split() if key.endswith("false")}
    assert {f"overlap.{name}=false" for name in ("pipeline", "data", "optimizer")} <= switches


def test_what_the_page_links_to_and_runs_is_there():
    files = [target for target in re.findall(r"\]\(([^)#]+)\)", PAGE) if "://" not in target]
    assert [target for target in files if not (ROOT / "docs" / target).exists()] == []
    scripts = re.findall(r"`(?:python|pytest) ((?:benchmarks|examples|tests)/[\w/]+\.py)", PAGE)
    assert scripts and [script for script in scripts if not (ROOT / script).exists()] == []
