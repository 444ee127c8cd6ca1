"""If these fail, the check that keeps rooms of the library apart, which `make check` runs, is blind."""

import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "scripts" / "check_imports.py"


def check(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, CHECK, *arguments], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def tree(folder: Path, files: dict[str, str]) -> str:
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "myriad" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / "myriad")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"model/gpt.py": "import math\nfrom myriad.parallel import runtime\n", "parallel/runtime.py": ""},
            "gpt.py:2: model (floor 3) imports parallel (floor 4)",
        ),
        (
            {
                "checkpoint/load/collective_load.py": "def f():\n    import myriad.parallel.chunk\n",
                "parallel/chunk.py": "",
            },
            "load.py:2: checkpoint (floor 4) imports parallel (floor 4)",
        ),
        (
            {"train/trainer.py": "from myriad.supervise import messages\n", "supervise/messages.py": ""},
            "trainer.py:1: train (floor 12) imports supervise (floor 9)",
        ),
        (
            {"cli/plan.py": "from myriad.planner.cost import layers\n", "planner/cost/layers.py": ""},
            "plan.py:1: cli imports planner.cost.layers, not planner's public names",
        ),
        ({"shed/tools.py": ""}, "tools.py:1: shed stands on no floor"),
        (
            {"supervise/policy/now.py": "import time\n"},
            "now.py:1: supervise.policy.now is pure, and imports time",
        ),
        (
            {
                "supervise/policy/a.py": "from myriad.supervise.authenticated_link import b\n",
                "supervise/authenticated_link.py": "",
            },
            "a.py:1: supervise.policy.a is pure, and imports supervise.authenticated_link",
        ),
        ({"model/gpt.py": "from . import config\n"}, "gpt.py:1: relative import"),
        (
            {"model/a.py": "from myriad.model import b\n", "model/b.py": "import myriad.model.a\n"},
            "import cycle",
        ),
        ({"model/a.py": "print('hello')\n"}, "a.py:1: prints"),
        ({"program/a.py": "\nimport torch.nn\n"}, "a.py:2: needs torch to be imported: program.a -> torch"),
        (
            {
                "job.py": "from myriad.model.config import C\n",
                "model/config.py": "",
                "model/__init__.py": "import torch",
            },
            "job.py:1: needs torch to be imported: job -> model.config -> torch",
        ),
    ],
)
def test_each_breach_is_found_with_its_place(tmp_path: Path, files: dict[str, str], says: str) -> None:
    code, output = check(tree(tmp_path, files))
    assert code == 1 and says in output, output


def test_what_is_allowed_is_not_found(tmp_path: Path) -> None:
    files = {
        "errors.py": "import sys\n",
        "model/gpt.py": "import torch\nfrom myriad.model.config import C\nfrom myriad.errors import E\n",
        "model/config.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "job.py": "from myriad.model.config import C\nfrom myriad.recipes import r\n",
        "recipes/__init__.py": "from myriad import errors\n",
        "cli/main.py": "import myriad.job\n\ndef f():\n    import torch\n    print(1)\n",
    }
    code, output = check(tree(tmp_path, files))
    assert code == 0, output


def test_no_dependency_may_change_its_major_version_by_itself() -> None:
    """A release of a dependency that breaks what was tested must not arrive on its own."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = declared["project"]
    every = [*declared["build-system"]["requires"], *project["dependencies"]]
    every += chain.from_iterable(project["optional-dependencies"].values())
    assert [one for one in every if "<" not in one.split(";")[0]] == []
