"""With several machines, each socket of a run is in the table of docs/security.md, and at a node's address;
with ``resilience.encrypt``, someone who taps the network reads neither orders nor weights.

If this fails, a port is open to networks of which the table says nothing, or a link is in clear text.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_streams import Recorder, Stream, is_tls
from tiny_corpora import make_corpus

from hosts import Hosts
from myriad.checkpoint.checkpoint_files import load_model
from myriad.job import load_job
from myriad.run import Run
from myriad.supervise.authenticated_link import AuthenticatedLink
from myriad.supervise.driver_address import read_address
from myriad.wire.framing import HEADER_BYTES, Refused
from myriad.wire.handshake import NONCE_BYTES
from myriad.wire.run_secret import run_secret

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))

from seen_sockets import COPIES, DRIVER, GLOO, LOCAL, MARK, STORE, Watch, row_of
from watching import wait_until

KEYS = (
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    "train.steps=12",
    "optimizer.learning_rate=1e-30",  # the weights stay: each copy has those of the checkpoint
    "layout.dp=2",
    "layout.zero=3",
    "layout.micro_batch=2",
    "comm.hierarchy=flat",
    "checkpoint.copies_every=5",
    "resilience.nodes=2",
    "resilience.engine=join",
    "resilience.listen=10.77.0.1",
    "resilience.encrypt=true",
)


def refusal(made: Hosts, run: Run, secret: bytes, *, encrypts: bool) -> str:
    """What a stranger on the driver's host is told, or what ends the connection."""
    address = read_address(run.path)

    async def connect() -> None:
        with made.network_of(0):  # the connection begins before another task can run
            reader, writer = await asyncio.open_connection(address["host"], address["port"])
        link = AuthenticatedLink(reader, writer)
        try:
            await asyncio.wait_for(link.connect(secret, encrypts=encrypts), 30)
        finally:
            link.abort()

    with pytest.raises((OSError, Refused)) as error:
        asyncio.run(connect())
    return str(error.value)


def test_training_on_two_hosts(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    made, run = hosts(3), Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *KEYS]))
    with Recorder(made) as recorder, Watch() as watch:
        mark = f"{MARK}={watch.environment[MARK]}"

        def start(host: int, *words: object) -> "subprocess.Popen[Any]":
            command = ["env", "-u", "GLOO_SOCKET_IFNAME", mark, sys.executable, "-m", "myriad.cli.main"]
            return made.start(host, [*command, *map(str, words)])

        train = start(0, "train", run.path, "--oversubscribe", "--json")
        wait_until(lambda: train.poll() is not None or (run.path / "driver.json").exists(), 150.0)
        secret = run_secret(run.path / "secret")
        stranger = b"0123456789abcdef" * 4
        assert "does not know the secret" in refusal(made, run, stranger, encrypts=True)
        assert refusal(made, run, secret, encrypts=False) is not None  # it strips TLS
        joined = [start(1 + node, "join", run.path, "--node", node) for node in (0, 1)]
        assert [each.wait(150) for each in (train, *joined)] == [0, 0, 0]
    nodes = {made.address(host) for host in range(3)}
    rows = {each: row_of(each, each.host if each.host in nodes else "") for each in watch.found}
    assert [each for each, row in rows.items() if row is None] == []
    started_by = {row.started_by for row in rows.values() if row is not None}
    assert started_by == {DRIVER, STORE, GLOO, LOCAL, COPIES}
    assert {each.host for each in watch.found if each.kind == "tcp"} == nodes
    for name, content in ((DRIVER, b'"node"'), (COPIES, weights(run))):
        ends = {(each.host, each.port) for each, row in rows.items() if row and row.started_by == name}
        assert_encrypted(recorder.streams(), ends, content)


def weights(run: Run) -> bytes:
    """Weights that no other tensor has."""
    return load_model(run.checkpoints_path / "step-12")["embedding.tokens.weight"].numpy().tobytes()[:64]


def assert_encrypted(streams: dict[Stream, bytes], listeners: set[tuple[str, int]], content: bytes) -> None:
    """Assert that the connections to some listeners are all TLS after their first frame, and never have a
    content."""
    theirs = {stream: data for stream, data in streams.items() if data and listeners & {*stream}}
    assert len(theirs) >= 4 and sum(map(len, theirs.values())) > 4096, "both nodes connect, both ways"
    assert not any(content in data for data in theirs.values())
    for stream, data in theirs.items():
        begun = HEADER_BYTES + NONCE_BYTES if stream[0] in listeners else 0
        if sent := data[begun:]:  # else it ended before it had sent anything that could be either
            assert is_tls(sent), stream
