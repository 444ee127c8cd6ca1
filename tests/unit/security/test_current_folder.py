"""If these fail, who can write into the folder in which a command starts runs code as its user: Python looks
for the modules of ``python -m`` and ``python -c`` in the current folder first."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import myriad
from myriad.cli.main import main
from myriad.launchers.supervised_process import of_module

_SOURCES = Path(myriad.__file__).parent


def test_no_process_looks_for_modules_in_the_current_folder() -> None:
    found = {
        f"{path.relative_to(_SOURCES)}:{node.lineno}"
        for path in _SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value == "-m" or node.value.startswith(" -m ")
    }
    assert not found, "-Pm instead of -m"


def test_a_process_imports_nothing_that_others_have_put_into_the_current_folder(tmp_path: Path) -> None:
    for name in ("msgspec", "json", "myriad"):
        (tmp_path / f"{name}.py").write_text("open('attacked', 'w')\nraise SystemExit('attacked')\n")
    command = of_module("myriad.system.child_process", os.getpid(), "true")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "attacked").exists()


def test_a_command_hands_this_on_to_processes_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.setattr(sys, "argv", ["myriad", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["PYTHONSAFEPATH"]
