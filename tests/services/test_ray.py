"""A run on Ray's machines: one that dies costs no bit, one that Ray believes to be well is left all the same,
and nothing stays behind. Each machine is a raylet of this one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watching import descendants, is_alive, wait_until

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.snapshots.server_start import server_name
from myriad.errors import BadInputError
from myriad.job import Job, load_job
from myriad.launchers.launcher import check_engine, train_on
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.system.jsonl import JsonlTail

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'myriad-train[ray]'")
_SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=300"]
_TWO = ["layout.dp=2", "layout.zero=3", "layout.micro_batch=2", "resilience.nodes=2"]
_OFTEN = ["checkpoint.memory_seconds=0", "checkpoint.copies_every=5", "checkpoint.linger_seconds=60"]
_SPARE = ["resilience.engine=ray", "resilience.spares=1"]
_QUICK = {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 5000, "failure_threshold": 5}
"""Quicker than Ray's own, and not so quick that a raylet on a busy machine is taken for dead, and this
process with it."""
_OBJECTS_BYTES = 80 * 2**20


class Machines:
    """Raylets, each with room for one node of the run; the head has none."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": _OBJECTS_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address

    def add(self) -> None:
        self._cluster.add_node(num_cpus=1, object_store_memory=_OBJECTS_BYTES)

    def have(self, count: int) -> None:
        while len(self._cluster.worker_nodes) < count:
            self.add()

    def kill(self, machine: str) -> None:
        (node,) = [one for one in self._cluster.worker_nodes if one.node_id == machine]
        self._cluster.remove_node(node, allow_graceful=False)

    def of(self, pid: int | None) -> str | None:
        """The machine that a process is on: whose raylet has started it, or its parent."""
        for node in self._cluster.worker_nodes:
            (raylet,) = node.all_processes["raylet"]
            if pid is not None and pid in descendants(raylet.process.pid):
                found: str = node.node_id
                return found
        return None

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    before = dict(os.environ)
    os.environ |= {f"RAY_health_check_{name}": str(value) for name, value in _QUICK.items()}
    found = Machines()
    ray.init(address=found.address, log_to_driver=False, logging_level="warning")
    yield found
    ray.shutdown()
    found.close()
    os.environ.clear()
    os.environ.update(before)


def make_run(path: Path, corpus: Path, *overrides: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *_SMALL, *_TWO, *_OFTEN, *overrides]))
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus)
    assert run_local(run, 2) == "finished"
    return run


def processes() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(path.name), (path / "cmdline").read_text().split("\0")


def executor_of(run: Run, node: int) -> int | None:
    for pid, words in processes():
        if "myriad.supervise.agent.agent_process" in words and words[3:5] == [str(run.path), str(node)]:
            return pid
    return None


def below(pid: int | None) -> list[int]:
    """What an executor has started, but for the snapshot server, which outlives it for a while on purpose."""
    snapshot_servers = {
        one for one, words in processes() if "myriad.checkpoint.snapshots.snapshot_server_process" in words
    }
    return [] if pid is None else [one for one in (pid, *descendants(pid)) if one not in snapshot_servers]


def forget(run: Run, node: int) -> None:
    """A machine's memory goes with it."""
    for pid, words in processes():
        if server_name(run.path, node) in words:
            os.kill(pid, signal.SIGKILL)


class Acts:
    """Watches a run as the screen does; does what comes next when its time has come."""

    def __init__(self, *acts: tuple[Callable[[], bool], Callable[[], object]]) -> None:
        self._acts = list(acts)

    def tick(self) -> None:
        if self._acts and self._acts[0][0]():
            self._acts.pop(0)[1]()

    def stopping(self) -> None: ...

    @property
    def all_done(self) -> bool:
        return not self._acts


def reached(run: Run, step: int) -> Callable[[], bool]:
    return lambda: bool(lines := run.read_metrics()) and lines[-1]["step"] >= step


def events(run: Run, name: str) -> list[dict]:
    return [event for event in run.read_events() if event["event"] == name]


def placements(run: Run) -> list[list[int]]:
    """The nodes of each attempt, in the order of their ranks."""
    records = JsonlTail(run.path / "journal.jsonl").poll()
    started = [one for record in records for one in record.get("actions", ()) if "placement" in one]
    return [sorted(map(int, one["placement"]), key=lambda n: one["placement"][str(n)]) for one in started]


def spare_of(*nodes: int) -> int:
    """Of three: which of them begin is a matter of who comes late on a busy machine."""
    (found,) = {0, 1, 2} - {*nodes}
    return found


def assert_same_weights(run: Run, other: Run) -> None:
    ours, theirs = (load_model(one.checkpoints_path / "step-300", "") for one in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def train(run: Run, acts: Acts) -> None:
    job = run.job()
    check_engine(job)
    assert train_on(job)(run, job.layout.world, threads=1, observer=acts) == "finished"
    assert acts.all_done


def test_a_machine_dies_and_a_spare_takes_its_place_and_not_a_bit_is_lost(
    tmp_path: Path, corpus: Path, undisturbed: Run, machines: Machines
) -> None:
    machines.have(3)
    run = make_run(tmp_path / "run", corpus, *_SPARE)
    seen: dict[int, str | None] = {}

    def lose() -> None:
        seen.update({node: machines.of(executor_of(run, node)) for node in range(3)})
        machines.kill(str(seen[placements(run)[0][0]]))
        forget(run, placements(run)[0][0])

    ready = lambda: reached(run, 60)() and executor_of(run, 2) is not None  # noqa: E731
    train(run, Acts((ready, lose)))
    assert None not in seen.values() and len(set(seen.values())) == 3, "two nodes on one machine"
    (lost, stays), after = placements(run)
    assert after == [spare_of(lost, stays), stays], "rank 1 stays where its snapshots are"
    (fault,) = [
        event for event in events(run, "fault") if "cause" in event
    ]  # ranks may miss the snapshot server first
    (resume,) = events(run, "resume")
    assert (fault["cause"], fault["node"], resume["source"]) == ("node", lost, "memory")
    assert_same_weights(run, undisturbed)


def test_a_machine_that_ray_believes_to_be_well_is_left_and_nothing_stays_behind(
    tmp_path: Path, corpus: Path, undisturbed: Run, machines: Machines
) -> None:
    machines.have(4)
    run = make_run(tmp_path / "run", corpus, *_SPARE, "train.steps=300")
    before: dict[int, str | None] = {}
    left: list[int] = []

    def stop() -> None:
        before.update({node: machines.of(executor_of(run, node)) for node in range(3)})
        pid = executor_of(run, placements(run)[0][1])
        assert pid is not None
        left.extend(below(pid))
        os.kill(pid, signal.SIGSTOP)

    def is_elsewhere() -> bool:
        return machines.of(executor_of(run, placements(run)[0][1])) not in (None, *before.values())

    def check_placement() -> None:
        for node in range(3):
            left.extend(below(executor_of(run, node)))

    ready = lambda: reached(run, 60)() and executor_of(run, 2) is not None  # noqa: E731
    train(run, Acts((ready, stop), (is_elsewhere, check_placement)))
    (stays, gone), after = placements(run)
    assert after == [stays, spare_of(stays, gone)]
    assert_same_weights(run, undisturbed)
    assert len(left) > 8
    wait_until(lambda: not any(map(is_alive, left)))
    assert [executor_of(run, node) for node in range(3)] == [None] * 3


def test_a_killed_command_resumes_and_prints_only_its_answer(
    tmp_path: Path, corpus: Path, undisturbed: Run, machines: Machines
) -> None:
    """Ray ends its tasks; the second time a machine dies, too."""
    machines.have(3)
    run = make_run(tmp_path / "run", corpus, *_SPARE)
    command = [sys.executable, "-m", "myriad.cli.main", "train", str(run.path), "--json"]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, env=os.environ | {"RAY_ADDRESS": machines.address}, stdout=subprocess.PIPE, text=True
        )

    first = start()
    wait_until(reached(run, 60), 120)
    left = [pid for node in range(2) for pid in below(executor_of(run, node))]
    first.kill()
    first.communicate()
    wait_until(lambda: not any(map(is_alive, left)))
    second = start()
    wait_until(reached(run, 150), 120)
    machines.kill(str(machines.of(executor_of(run, placements(run)[-1][0]))))
    answer, _ = second.communicate(timeout=200)
    assert second.returncode == 0
    assert json.loads(answer)["state"] == "finished"
    assert [event["source"] for event in events(run, "resume")] == ["memory", "memory"]
    assert_same_weights(run, undisturbed)


OWN_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
small = {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
for _ in range(2):
    cluster.add_node(num_cpus=1, **small)
(gcs,) = cluster.head_node.all_processes["gcs_server"]
print(cluster.address, gcs.process.pid, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""A cluster apart: Ray ends each process whose control service is silent for a minute, the tests' too."""


def test_a_run_ends_on_sigterm_though_ray_never_answers(tmp_path: Path, corpus: Path) -> None:
    words = [sys.executable, "-c", OWN_CLUSTER]
    around = os.environ | {"RAY_worker_niceness": "0"}  # 15 would starve beside other tests
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=around, text=True, **pipes) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        address, gcs = cluster.stdout.readline().split()
        keys = (
            "resilience.engine=ray",
            "train.steps=100000",
            "checkpoint.timeout_seconds=1",
            "resilience.timeout_scale=8",
        )
        run = make_run(tmp_path / "run", corpus, *keys)
        command = [sys.executable, "-m", "myriad.cli.main", "train", str(run.path), "--json"]
        train = subprocess.Popen(command, env=around | {"RAY_ADDRESS": address})
        try:
            wait_until(lambda: train.poll() is not None or reached(run, 12)(), 240)
            left = [pid for node in range(2) for pid in below(executor_of(run, node))]
            assert len(left) > 4
            os.kill(int(gcs), signal.SIGSTOP)
            time.sleep(2.0)  # the launcher asks it twice a second
            train.terminate()
            train.wait(1.0 + 90.0)
            wait_until(lambda: not any(map(is_alive, left)), 30)
        finally:
            train.kill()
            os.kill(int(gcs), signal.SIGCONT)
            cluster.stdin.close()


def tiny_on_ray() -> Job:
    return load_job("tiny", ["resilience.engine=ray"])


def test_a_driver_that_others_cannot_reach_is_refused(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.77")
    with pytest.raises(BadInputError, match=r"resilience\.listen = \"127\.0\.0\.1\".*192\.0\.2\.77"):
        check_engine(tiny_on_ray())


def test_without_ray_or_without_a_cluster_one_line_reports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is started."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray writes down what it has started
    monkeypatch.setenv("RAY_ADDRESS", "")

    def no_cluster(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nPlease ...")

    monkeypatch.setattr(ray, "init", no_cluster)
    with pytest.raises(BadInputError, match=r"needs a Ray cluster.*Could not find") as told:
        check_engine(tiny_on_ray())
    assert "\n" not in str(told.value)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInputError, match=r"pip install 'myriad-train\[ray\]'"):
        check_engine(tiny_on_ray())
