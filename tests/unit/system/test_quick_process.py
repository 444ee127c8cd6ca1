"""If this fails, a user's plugins for Pydantic stay off although he has asked for them."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "found"), [({}, "__all__"), ({"PYDANTIC_DISABLE_PLUGINS": "one"}, "one")])
def test_a_process_searches_for_plugins_only_as_the_user_has_set(given, found):
    environment = {key: value for key, value in os.environ.items() if key != "PYDANTIC_DISABLE_PLUGINS"}
    program = (
        "import os; from myriad.system.quick_process import start_quickly; start_quickly();"
        "print(os.environ['PYDANTIC_DISABLE_PLUGINS'])"
    )
    command = [sys.executable, "-Pc", program]
    done = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
