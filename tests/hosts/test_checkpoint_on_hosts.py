"""If these fail, a run on several machines that loses one of them, or all its ranks, resumes from less than
it had, or to other numbers. Several nodes on one machine do not show it: there any address will do."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same_run import train_undisturbed
from tiny_corpora import make_corpus

from fault_state import State, open_session
from hosts import Hosts, missing
from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient, server_name
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.data import loader
from myriad.data.loader_process import LoaderThread
from myriad.job import load_job
from myriad.run import Run
from myriad.train import worker
from myriad.train.trainer import Trainer

CPU = torch.device("cpu")
RATE = "400mbit"
LAST, COPIES_EVERY = 14, 6
KEYS = (
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    f"train.steps={LAST}",
    "layout.dp=2",
    "layout.zero=3",  # no rank has what another keeps
    "layout.micro_batch=2",
    f"checkpoint.copies_every={COPIES_EVERY}",
    "checkpoint.memory_seconds=0",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def make_run(path: Path, corpus: Path, *keys: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *KEYS, *keys]))
    return run


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Run:
    return make_run(tmp_path / "run", corpus)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The same job on one machine, where nothing happens to it."""
    if problem := missing():
        pytest.skip(f"hosts cannot be made: {problem}")
    return train_undisturbed(make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus))


class Hanging(Trainer):
    """Comes to a step slowly, so that snapshot servers hear of every one, and no further."""

    hangs_after = 0

    def _after_step(self, *, is_last: bool, stopping: bool) -> None:
        super()._after_step(is_last=is_last, stopping=stopping)
        time.sleep(600 if self.step == self.hangs_after else 0.05)


def train(path: Path, hangs_after: int = 0) -> int:
    """Train as one rank of the run, and return its exit code. The loader is a thread, which costs less."""
    loader._LoaderProcess = LoaderThread  # type: ignore[assignment,misc]
    if hangs_after:
        Hanging.hangs_after = hangs_after
        worker.Trainer = Hanging
    return worker.main([str(path)])


def list_on_host(path: Path) -> list[dict[str, Any]]:
    client = SnapshotClient(server_name(path), starts=False, log=path / "look.log")
    return client.snapshots()


def steps_in_memory(made: Hosts, run: Run) -> list[dict[tuple[int, bool], list[int]]]:
    """For each of two hosts the steps by rank, and whether they are copies."""
    hosts = made.run_ranks(list_on_host, run.path, world=2)
    return [{(one["rank"], one["copied"]): one["steps"] for one in snapshots} for snapshots in hosts]


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def steps_done(run: Run) -> int:
    lines = run.read_metrics()
    return lines[-1]["step"] if lines else 0


def resumed(run: Run) -> list[tuple[int, str]]:
    """The step from which each start of a run resumed, without fresh starts."""
    return [(event["step"], event["source"]) for event in run.read_events() if event["event"] == "resume"]


def assert_same_bits(run: Run, undisturbed: Run) -> None:
    lines, expected_lines = run.read_metrics(), undisturbed.read_metrics()
    for key in ("step", "loss", "grad_norm"):
        assert [line[key] for line in lines] == [line[key] for line in expected_lines], key
    tensors, expected = (final_tensors(one) for one in (run, undisturbed))
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []


def final_tensors(run: Run) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint: weights and the optimizer's moments."""
    folder = CheckpointFolder(run.checkpoints_path)
    assert folder.newest() == (LAST, [])
    return load_model(folder.of_step(LAST), "")


def lose_after_copies(made: Hosts, run: Run, hangs_after: int, lost: int) -> None:
    """Loses a host, and all ranks with it, when each host has a copy of what the other's rank had and
    nothing is durable."""
    ranks = made.start_ranks(train, run.path, hangs_after, world=2)
    wait_until(lambda: steps_done(run) == hangs_after)

    def is_copied() -> bool:
        first, second = steps_in_memory(made, run)
        own = hangs_after in first[0, False] and hangs_after in second[1, False]
        copied = COPIES_EVERY in first.get((1, True), []) and COPIES_EVERY in second.get((0, True), [])
        return own and copied

    wait_until(is_copied)
    made.kill_all(lost)
    ranks.kill()
    assert CheckpointFolder(run.checkpoints_path).steps() == []


def test_a_lost_host_costs_the_steps_since_the_last_copies_and_no_bit_and_a_second_loss_no_more(
    hosts: Callable[..., Hosts], run: Run, undisturbed: Run
) -> None:
    """A host comes back empty; nothing was ever stored. The copies are of no use unless the hosts that are
    left still have their own part of that step, however many have come after it. Then the other is lost
    before the next copies are due, and a spare host is used: what was rank 1's host is rank 0's now, and the
    spare one has never seen the run."""
    made, hangs_after = hosts(3, rate=RATE), 2 * COPIES_EVERY - 1
    lose_after_copies(made, run, hangs_after, lost=1)
    ranks = made.start_ranks(train, run.path, hangs_after, world=2)

    def is_as_before() -> bool:
        found = steps_in_memory(made, run)[1]
        return hangs_after in found.get((1, False), []) and COPIES_EVERY in found.get((0, True), [])

    wait_until(is_as_before)
    made.kill_all(0)
    ranks.kill()
    assert made.run_ranks(train, run.path, first_host=1) == [0, 0]
    assert resumed(run) == [(COPIES_EVERY, "memory")] * 2
    assert_same_bits(run, undisturbed)


def test_ranks_that_die_on_all_hosts_lose_one_step_at_most(
    hosts: Callable[..., Hosts], run: Run, undisturbed: Run
) -> None:
    made = hosts(2, rate=RATE)
    ranks = made.start_ranks(train, run.path, LAST - 1)
    wait_until(lambda: steps_done(run) >= COPIES_EVERY + 3)
    ranks.kill()
    done = steps_done(run)
    assert made.run_ranks(train, run.path) == [0, 0]
    assert resumed(run) in ([(done, "memory")], [(done - 1, "memory")])
    assert_same_bits(run, undisturbed)


def test_a_lost_group_of_hosts_costs_no_step_where_another_group_holds_the_same(
    hosts: Callable[..., Hosts], tmp_path: Path, corpus: Path
) -> None:
    """Both hosts of a group: none of them could keep the other's copies. No copy was due, or is ever sent."""
    keys = ("layout.dp=4", "layout.shard_group=2", "layout.micro_batch=1", "train.steps=7", "model.layers=1")
    made, run = hosts(4, rate=RATE), make_run(tmp_path / "run", corpus, *keys)
    ranks = made.start_ranks(train, run.path, 6)
    wait_until(lambda: steps_done(run) == 6)
    wait_until(
        lambda: all(6 in one["steps"] for host in made.run_ranks(list_on_host, run.path) for one in host)
    )
    made.kill_all(0)
    made.kill_all(1)
    ranks.kill()
    assert made.run_ranks(train, run.path) == [0] * 4
    assert resumed(run) == [(6, "memory")]


# Which way copies take

SCALE = 100
"""Of the state: 4 MB a rank, far more than the ranks themselves say to each other."""
OWN_NAME = "127.0.0.1 localhost\n127.0.1.1 host0\n10.77.0.2 host1\n"
"""How Debian's installer has a machine know its own name."""


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def copy_once(path: Path, main_host: str, copies_every: int) -> tuple[int, int]:
    """One snapshot of one rank, and what became of it in 20 s: bytes that have left the host meanwhile, and
    those of the copies of other ranks that have come to it."""
    os.environ["MASTER_ADDR"] = main_host
    groups = open_world(Layout(dp=2), CPU)
    rank, group = groups.grid.rank, groups.on_host("checkpoints")
    session = open_session(path, CheckpointConfig(copies_every=copies_every), rank, 2, 0, group)
    session.acquire(0)
    state = State(SCALE)
    state.become(1)
    session.begin(state.shards(rank, 2))
    before = sent_bytes()
    purpose = session.purpose(1, is_last=False, due=False)
    assert purpose is not None
    session.take(1, {"step": 1}, purpose)
    session.settle()
    copied = wait_for_copies(path) if copies_every else 0
    torch.distributed.barrier(group)
    sent = sent_bytes() - before
    session.close()
    close_world()
    return sent, copied


def wait_for_copies(path: Path) -> int:
    """Bytes of the copies on this host, once all nodes have confirmed theirs; 0: none came."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        snapshots = list_on_host(path)
        copies = [one["bytes"] for one in snapshots if one["copied"] and one["steps"] == [1]]
        if copies and all(one["copied_step"] == 1 for one in snapshots if not one["copied"]):
            return sum(copies)
        time.sleep(0.05)
    return 0


@pytest.mark.parametrize("main_host", ["10.77.0.1", "host0"])
def test_copies_leave_the_host_however_it_knows_its_own_name(
    hosts: Callable[..., Hosts], tmp_path: Path, main_host: str
) -> None:
    """An address that means this machine to everybody would have each snapshot server copy to itself, or to
    nobody."""
    made = hosts(2, rate=RATE)
    Path(f"/etc/netns/{made.namespace(0)}/hosts").write_text(OWN_NAME)
    (first_sent, first_kept), (second_sent, second_kept) = made.run_ranks(copy_once, tmp_path, main_host, 1)
    assert min(first_kept, second_kept) > SCALE * 20_000
    assert first_sent > second_kept and second_sent > first_kept
    events = tmp_path / "events.jsonl"
    assert not events.exists(), events.read_text()


def test_without_copies_nothing_of_the_state_leaves_the_host(
    hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    found = hosts(2, rate=RATE).run_ranks(copy_once, tmp_path, "10.77.0.1", 0)
    assert [sent < SCALE * 2_000 for sent, _ in found] == [True, True]
