"""If these fail, the check that the library runs no code from a message or a file is blind. `make check` runs
it on the library."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "scripts" / "check_unpickling.py"


def check(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, CHECK, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import pickle\n\npickle.loads(b'')\n", "a.py:3: pickle.loads can unpickle"),
        ("from pickle import load as read\nread(f)\n", "a.py:2: pickle.load can unpickle"),
        ("import pickle as p\nclass A(p.Unpickler): pass\n", "a.py:2: pickle.Unpickler can unpickle"),
        ("import pickle as p\nclass A(p._Unpickler): pass\n", "a.py:2: pickle._Unpickler can unpickle"),
        ("import torch\ntorch.load(f)\n", "a.py:2: torch.load without weights_only=True can unpickle"),
        ("import torch\ntorch.load(f, weights_only=False)\n", "a.py:2: torch.load without weights_only=True"),
        (
            "import numpy as np\nnp.load(f, allow_pickle=True)\n",
            "a.py:2: numpy.load without allow_pickle=False",
        ),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)\n", "a.py:2: all_gather_object can"),
        ("from multiprocessing import Pipe\n", "a.py:1: multiprocessing can unpickle"),
        (
            "import pickle, torch, numpy\npickle.dumps(1)\ntorch.load(f, weights_only=True)\nnumpy.load(f)",
            "",
        ),
    ],
)
def test_each_way_to_unpickle_is_found(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.py").write_text(text)
    code, output = check(str(tmp_path))
    assert (code, says in output) == (1 if says else 0, True), output
