"""If these break: the README or a page of the documentation names something that does not exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from myriad.cli.main import build_app
from myriad.job import recipe_names

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


PAGES = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "benchmarks/README.md", *PAGES],
    ids=str,
)
def test_every_link_to_a_file_leads_to_one(page):
    text = re.sub(r"^(```|~~~).*?^\1", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def test_the_list_of_commands_is_the_command_line():
    listed = README.partition("## All commands")[2].partition(": each with")[0]
    shown = re.findall(r"`(\w+)`", listed)
    app = build_app()
    verbs = [command.name for command in app.registered_commands]
    verbs += [group.name for group in app.registered_groups]
    assert sorted(shown) == sorted(verbs)


def test_jobs_of_the_examples_are_recipes():
    jobs = re.findall(r"^    \$ myriad (?:train|parity) ([\w-]+)", README, re.MULTILINE)
    assert jobs and set(jobs) <= set(recipe_names("jobs"))


def test_commands_that_the_pages_name_are_targets_of_make():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"\bmake (train|test|check|clean)\b", pages)) <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_decisions_are_listed_with_area_and_status_and_each_has_revisit_when():
    folder = ROOT / "docs" / "decisions"
    found, incomplete = {}, []
    for page in sorted(folder.glob("*.md")):
        for entry in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            number, title = entry.splitlines()[0].split(". ", 1)
            status = re.search(r"^\*Status: (.+)\.\*$", entry, re.MULTILINE)
            parts = ["**Context.**", "**Decision.**", "**Rejected.**", "**Consequence.**", "**Revisit when**"]
            if status is None or not all(part in entry for part in parts):
                incomplete.append(number)
            found[int(number)] = (title, page.name, status[1] if status else "")
    rows = re.findall(
        r"^\| (\d+) \| \[(.+)\]\(([\w-]+\.md)#.*?\) \| [^|]+ \| (.+) \|$",
        (folder / "index.md").read_text(),
        re.MULTILINE,
    )
    assert incomplete == []
    assert [(int(number), (title, page, status)) for number, title, page, status in rows] == sorted(
        found.items()
    )
    assert sorted(found) == list(range(1, len(found) + 1))


def test_the_code_that_the_glossary_names_is_there():
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `([^`|]+)`(?: `(\w+)`)? \|$", GLOSSARY, re.MULTILINE)
    assert len(rows) > 20
    for path, name in rows:
        module = ROOT / "src" / "myriad" / path
        assert module.is_file(), path
        assert not name or re.search(rf"^(class {name}\b|{name}\b)", module.read_text(), re.MULTILINE), (
            path,
            name,
        )


@pytest.mark.parametrize(
    "page", ["architecture.md", *(f"howto/{p.name}" for p in PAGES if p.parent.name == "howto")]
)
def test_modules_that_a_page_names_exist(page):
    folders = ("src/myriad", "tests", "scripts")
    sources = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / page).read_text())
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in sources)] == []


def test_each_term_of_the_glossary_stands_there_once():
    terms = re.findall(r"^\| ([^|]+) \| [A-Z]", GLOSSARY, re.MULTILINE)
    assert terms and len(terms) == len(set(terms))


def test_the_reference_is_that_of_the_code():
    command = [sys.executable, str(ROOT / "scripts" / "reference_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_is_built_and_no_link_in_it_leads_nowhere(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "architecture" / "index.html").is_file()
