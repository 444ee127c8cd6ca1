"""What the README and its neighbours say is there, is there: a stale reading order sends people nowhere."""

import re
from pathlib import Path

import pytest

from myriad.cli.main import build_app
from myriad.job import recipe_names

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/decisions.md"])
def test_every_link_to_a_file_leads_to_one(page):
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def test_the_table_of_commands_is_the_command_line():
    shown = re.findall(r"^\| `myriad (\w+)`", README, re.MULTILINE)
    app = build_app()
    verbs = [command.name for command in app.registered_commands]
    verbs += [group.name for group in app.registered_groups]
    assert sorted(shown) == sorted(verbs)


def test_jobs_of_the_examples_are_recipes():
    jobs = re.findall(r"^    myriad (?:train|parity) ([\w-]+)", README, re.MULTILINE)
    assert jobs and set(jobs) <= set(recipe_names("jobs"))


def test_commands_that_the_pages_name_are_targets_of_make():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"\bmake (train|test|check|clean)\b", pages)) <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_decisions_are_numbered_in_order_and_each_says_when_to_look_again():
    text = (ROOT / "docs" / "decisions.md").read_text()
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [int(entry.split(".")[0]) for entry in entries] == list(range(1, len(entries) + 1))
    parts = ["**Context.**", "**Decision.**", "**Rejected.**", "**Consequence.**", "**Revisit when**"]
    assert [entry.splitlines()[0] for entry in entries if not all(part in entry for part in parts)] == []
