"""Real services of the test's own, gone when the test is: a Redis server, an S3 server."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import free_port
from redis_server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))  # tiny_corpora

if TYPE_CHECKING:
    from hdfs_server import HdfsServer
    from object_store import ObjectStore


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_corpora import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("redis", reason="needs the package redis (pip install 'myriad-train[redis]')")
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
        pytest.importorskip(package, reason=f"needs the package {package} (pip install 'myriad-train[dev]')")
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
    pytest.importorskip("requests", reason="needs the package requests (pip install 'myriad-train[hdfs]')")
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
