"""Real services of the test's own, gone when the test is: a Redis server, an S3 server."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import free_port

from myriad.resilience.engines import child

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))  # tiny_corpora

if TYPE_CHECKING:
    import redis
    from hdfs_server import HdfsServer
    from object_store import ObjectStore


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_corpora import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


class Server:
    """redis-server without a disk, on a port of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/1"

    @property
    def client(self) -> "redis.Redis":
        import redis

        return redis.Redis("127.0.0.1", self.port, 1)

    def start(self) -> "Server":
        """Returns when it answers."""
        import redis

        options = ["--port", self.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [sys.executable, "-S", child.__file__, os.getpid(), "redis-server", *options]
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return self
            except redis.RedisError:
                assert time.monotonic() < deadline and self.process.poll() is None, (
                    "redis-server does not start"
                )
                time.sleep(0.02)

    def kill(self) -> None:
        """As a lost machine: no goodbye."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("redis", reason="needs the package redis (pip install 'myriad[redis]')")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    running = Server().start()
    try:
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ObjectStore]":
    """What a user sets in the environment leads to it, and nowhere else."""
    for package in ("moto", "flask", "boto3", "s3fs"):
        pytest.importorskip(package, reason=f"needs the package {package} (pip install 'myriad[dev]')")
    from object_store import ObjectStore

    store = ObjectStore(free_port(), tmp_path_factory.mktemp("object-store"))
    variables = {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        try:
            store.start()
            yield store
        finally:
            store.stop()


@pytest.fixture(scope="module")
def hdfs() -> "Iterator[HdfsServer]":
    """``hdfs://`` leads to it, as a user that the environment names."""
    pytest.importorskip("requests", reason="needs the package requests (pip install 'myriad[hdfs]')")
    from hdfs_server import HdfsServer

    server = HdfsServer()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MYRIAD_WEBHDFS", server.url)
        environment.setenv("HADOOP_USER_NAME", "trainer")
        try:
            server.start()
            yield server
        finally:
            server.stop()
