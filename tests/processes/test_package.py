"""What is published runs without the rest of the repository: package data that is left out is found here."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--train.steps", "4", "--model.layers", "1", "--model.hidden", "32", "--model.sequence", "32")
BUILD = "import setuptools.build_meta as b; b.build_{kind}('dist')"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, built from the source distribution."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("not in a git repository")
    for name in listed.stdout.splitlines():
        if name.startswith(("src/", "pyproject.toml", "README.md", "LICENSE")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)

    def build(kind: str, folder: Path) -> None:
        command = [sys.executable, "-c", BUILD.format(kind=kind)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=200)

    build("sdist", source)
    (sdist,) = (source / "dist").glob("myriad_train-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(source / "unpacked")
    (unpacked,) = (source / "unpacked").iterdir()
    build("wheel", unpacked)
    (wheel,) = (unpacked / "dist").glob("myriad_train-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture
def environment(installed: Path) -> dict[str, str]:
    """The wheel beside the libraries of this environment, without the repository's own sources."""
    libraries = sysconfig.get_paths()["purelib"]
    return {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{libraries}"}


def myriad(folder: Path, environment: dict[str, str], *words: str) -> str:
    command = [sys._base_executable, "-m", "myriad", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_plans_trains_and_shows_a_run(
    tmp_path: Path, installed: Path, environment: dict[str, str]
) -> None:
    program = "import myriad; print(myriad.__file__)"
    where = subprocess.run(
        [sys._base_executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(installed)), where.stdout + where.stderr
    assert "0.1.0" in myriad(tmp_path, environment, "--version")
    assert json.loads(myriad(tmp_path, environment, "plan", "tiny", "--cluster", "one-node-8xh100", "--json"))
    trained = json.loads(myriad(tmp_path, environment, "train", "tiny", *SMALL, "--json"))
    assert trained["state"] == "finished"
    command = [sys._base_executable, "-m", "myriad", "watch", "runs/tiny", "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None
            told = json.loads(watch.stdout.readline())
            bearer = {"Authorization": f"Bearer {told['token']}"}
            with urllib.request.urlopen(
                urllib.request.Request(told["url"], headers=bearer), timeout=30
            ) as page:
                assert b"/static/app.js" in page.read()
        finally:
            watch.terminate()
