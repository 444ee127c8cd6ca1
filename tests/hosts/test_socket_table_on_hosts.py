"""With several machines, each socket of a run is in the table of docs/security.md, and at a node's address.

If this fails, a port is open to networks of which the table says nothing.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_corpora import make_corpus

from hosts import Hosts
from myriad.job import load_job
from myriad.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))

from seen_sockets import COPIES, DRIVER, GLOO, LOCAL, MARK, STORE, Watch, row_of

KEYS = (
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    "train.steps=30",
    "layout.dp=2",
    "layout.zero=3",
    "layout.micro_batch=2",
    "comm.hierarchy=flat",
    "checkpoint.copies_every=5",
    "resilience.nodes=2",
    "resilience.engine=join",
    "resilience.listen=10.77.0.1",
)


def test_training_on_two_hosts(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    made, run = hosts(3), Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *KEYS]))
    with Watch() as watch:
        mark = f"{MARK}={watch.environment[MARK]}"

        def start(host: int, *words: object) -> "subprocess.Popen[Any]":
            command = ["env", "-u", "GLOO_SOCKET_IFNAME", mark, sys.executable, "-m", "myriad.cli.main"]
            return made.start(host, [*command, *map(str, words)])

        train = start(0, "train", run.path, "--oversubscribe", "--json")
        joined = [start(1 + node, "join", run.path, "--node", node) for node in (0, 1)]
        assert [each.wait(150) for each in (train, *joined)] == [0, 0, 0]
    nodes = {made.address(host) for host in range(3)}
    rows = {each: row_of(each, each.host if each.host in nodes else "") for each in watch.found}
    assert [each for each, row in rows.items() if row is None] == []
    started_by = {row.started_by for row in rows.values() if row is not None}
    assert started_by == {DRIVER, STORE, GLOO, LOCAL, COPIES}
    assert {each.host for each in watch.found if each.kind == "tcp"} == nodes
