"""If this breaks, each rank of a node compiles every kernel at a cold start, or waits for a dead one."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("triton")

from myriad.kernels.triton import compile_once
from myriad.kernels.triton.compile_once import SharedCache

SCRIPT = Path(__file__).with_name("compile_together.py")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[str]]]:
    """What each of two processes compiled, which both want the same three kernels at once."""
    given = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("caches"))]
    given |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(time, names) for time, *names in lines]


@pytest.mark.slow
def test_processes_of_a_node_compile_each_kernel_once(compiled: list[tuple[str, list[str]]]) -> None:
    cold, warm = ([names for time, names in compiled if time == which] for which in ("cold", "warm"))
    assert len(cold) == len(warm) == 2
    assert sorted(chain(*cold)) == ["adamw_kernel", "facts_kernel", "turn_kernel"]
    assert not any(warm)


@pytest.mark.slow
def test_without_it_processes_compile_the_same_kernels(compiled: list[tuple[str, list[str]]]) -> None:
    """What is prevented does happen in this test's processes."""
    assert len([name for time, names in compiled if time == "own" for name in names]) > 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


class Holder:
    """Another process that compiles an entry and never ends."""

    def __init__(self) -> None:
        ready, written = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            cache = SharedCache("entry")
            assert cache.get_group("kernel.json") is None
            os.write(written, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.close(ready)
        os.close(written)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def store(cache: SharedCache) -> None:
    cache.put_group("kernel.json", {"kernel.json": cache.put("{}", "kernel.json")})


def test_a_compiler_that_is_killed_delays_no_rank(folder: Path) -> None:
    holder = Holder()
    holder.kill()
    start = time.monotonic()
    cache = SharedCache("entry")
    assert cache.get_group("kernel.json") is None
    assert time.monotonic() - start < 5
    store(cache)
    assert SharedCache("entry").get_group("kernel.json") is not None


def test_a_slow_compiler_is_waited_for_so_long_and_no_longer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_once, "PATIENCE_SECONDS", 0.3)
    holder = Holder()
    try:
        start = time.monotonic()
        assert SharedCache("entry").get_group("kernel.json") is None
        assert 0.3 <= time.monotonic() - start < 5
        assert "kernel.json" in caplog.text
    finally:
        holder.kill()


def test_other_entries_and_complete_ones_are_not_waited_for(folder: Path) -> None:
    holder = Holder()
    try:
        start = time.monotonic()
        assert SharedCache("another").get_group("kernel.json") is None
        plain = compile_once.FileCacheManager("entry")
        plain.put_group("kernel.json", {"kernel.json": plain.put("{}", "kernel.json")})
        assert SharedCache("entry").get_group("kernel.json") is not None
        assert time.monotonic() - start < 5
    finally:
        holder.kill()


def test_a_compilation_that_fails_lets_the_others_continue(folder: Path) -> None:
    cache = SharedCache("entry")
    assert cache.get_group("kernel.json") is None
    del cache
    start = time.monotonic()
    Holder().kill()
    assert time.monotonic() - start < 5


def test_a_cache_that_cannot_be_locked_is_used_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(compile_once.fcntl, "lockf", refuse)
    cache = SharedCache("entry")
    assert cache.get_group("kernel.json") is None
    store(cache)
    assert cache.get_group("kernel.json") is not None
