"""Where `checkpoint.py` writes: a folder, an S3 server behind a link, a disk that is too small.

The S3 server is moto's, in a host of its own (`hosts.py`); the ranks share another host and its one link. It
keeps objects in memory several times over (1.4 GB for one of 0.4 GB) and is slower than a link of 1 Gbit/s:
figures of S3 are those of this server, and the state is smaller there (``--s3-megabytes``).

    host 0: all ranks  eth0 ═══ rate ═══ bridge ═══ rate ═══ eth0  host 1: S3 server
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from checkpoint_crew import CrewError, run_crew

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from host_ranks import enter_host
from hosts import Hosts, missing

__all__ = ["Storage", "disk", "drop_caches", "full", "make_room", "remove", "s3", "size_of"]

_PORT, _BUCKET = 5000, "checkpoints"


@dataclass(frozen=True)
class Storage:
    """Where checkpoints go, and how ranks get there."""

    root: str
    enter: Callable[[], None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def disk(folder: Path) -> Iterator[Storage]:
    """A new folder in ``folder``, which is removed at the end."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoints-") as path:
        yield Storage(path)


@contextmanager
def full(folder: Path, num_bytes: int) -> Iterator[Storage]:
    """A file system in memory with room for ``num_bytes``."""
    if os.geteuid() != 0:
        raise CrewError("mounting a small file system needs root")
    with tempfile.TemporaryDirectory(dir=folder, prefix="full-") as path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", path], check=True)
        try:
            yield Storage(path)
        finally:
            subprocess.run(["umount", "--lazy", path], check=True)


def make_room(root: str, num_bytes: int) -> None:
    """Lets the file system of `full` grow."""
    subprocess.run(["mount", "-o", f"remount,size={num_bytes}", root], check=True)


@contextmanager
def s3(rate: str | None) -> Iterator[Storage]:
    """A bucket on a server of its own."""
    problem = missing()
    for module in ("moto", "s3fs", "flask"):
        problem = problem or (f"{module} is not installed" if find_spec(module) is None else None)
    if problem:
        raise CrewError(problem)
    import_module("s3fs")  # once, for all ranks
    with Hosts(2, rate=rate) as hosts:
        command = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(_PORT)]
        hosts.start(1, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        endpoint = f"http://{hosts.address(1)}:{_PORT}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
        enter = partial(enter_host, hosts.namespace(0), "host0", os.getpid())
        run_crew(1, partial(_make_bucket, endpoint), 60, enter=enter, group=False)
        yield Storage(f"s3://{_BUCKET}", enter, environment)


def _make_bucket(endpoint: str, rank: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT"), timeout=5)
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def size_of(path: str) -> int:
    """Bytes of all files of a checkpoint."""
    import fsspec  # starts threads: only in ranks

    system, inner = fsspec.core.url_to_fs(path)
    system.invalidate_cache()
    return int(system.du(inner))


def remove(path: str) -> None:
    """A checkpoint that is no longer needed, if it is there."""
    if "://" not in path:
        shutil.rmtree(path, ignore_errors=True)
        return
    import fsspec

    system, inner = fsspec.core.url_to_fs(path)
    system.invalidate_cache()
    if system.exists(inner):
        system.rm(inner, recursive=True)


def drop_caches() -> None:
    """Has the kernel forget all files; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
