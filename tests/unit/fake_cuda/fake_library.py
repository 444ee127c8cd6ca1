"""Compiles and loads `fake_driver.cpp`, with which a CPU build of PyTorch takes "cuda:0" for a device.

To be loaded before torch: PyTorch asks for the hooks of CUDA once. One compiler call of about three seconds,
kept in a folder for each version of torch; no torch is imported here.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_driver.cpp")
LIBRARY = "MYRIAD_FAKE_CUDA"
"""Names the library in the environment of a process that is to load it."""


def missing() -> str:
    """Return why there can be no fake CUDA device here, in words; empty: nothing."""
    if not sys.platform.startswith("linux"):
        return f"the fake CUDA driver is compiled on Linux only, this is {sys.platform}"
    if _compiler() is None:
        return "no C++ compiler (c++, g++ or clang++) to compile the fake CUDA driver with"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not (_torch() / "include" / "c10").is_dir():
        return "this PyTorch has no C++ headers"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this PyTorch has a CUDA driver of its own"
    return ""


def library(folder: Path) -> Path:
    """Return the compiled driver in ``folder``, compiled now unless it is there. Raises
    `subprocess.CalledProcessError` when the compiler fails."""
    key = hashlib.sha256(f"{version('torch')} {_torch()}".encode() + SOURCE.read_bytes()).hexdigest()
    path = folder / f"fake_cuda_{key[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        compiler = _compiler()
        assert compiler is not None, "`missing` is asked first"
        include, libraries = _torch() / "include", _torch() / "lib"
        command = [compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", str(SOURCE), f"-I{include}"]
        command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}", "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        partial.replace(path)
    return path


def load() -> None:
    """Load the library that the environment names into this process, which must not have imported torch."""
    assert "torch" not in sys.modules, "PyTorch would have asked for the hooks already"
    ctypes.CDLL(os.environ[LIBRARY], ctypes.RTLD_GLOBAL)


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
