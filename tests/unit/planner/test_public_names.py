"""If these break: a public name of the planner is missing, or importing the planner loads all of it."""

import subprocess
import sys

import pytest

import myriad.planner


@pytest.mark.parametrize("name", myriad.planner.__all__)
def test_every_public_name_is_the_object_of_its_module(name: str) -> None:
    found = getattr(myriad.planner, name)
    assert found.__name__ == name and found.__module__.startswith("myriad.planner.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        myriad.planner.no_such_name  # noqa: B018


def test_importing_the_planner_loads_none_of_its_modules() -> None:
    code = "import sys, myriad.planner; print([m for m in sys.modules if m.startswith('myriad.planner.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
