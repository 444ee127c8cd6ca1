"""A GPU that stops, over a transport that blocks as NCCL does: no host is held up by a collective, all end up
waiting for their own devices at the end of the step, and the rank whose device stopped is to be named.

A device is a thread here that does, in order, what its host asked for; its events pass as it comes to them.
The pipeline's program, the groups and their messages are real.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_like import install
from ranks import run_ranks

from myriad.comm.collectives import all_reduce, start_all_gather
from myriad.comm.config import CommConfig
from myriad.comm.connection_setup import connect_pairs
from myriad.comm.groups import Groups, open_world
from myriad.comm.layout import Layout
from myriad.parallel.pipeline_transfers import operation_of
from myriad.program.actions import Action, Kind, Payload, PipelineTransfer
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig
from myriad.supervise.observations import CommStatus, RankStatus
from myriad.supervise.policy.step_work import StepWork
from myriad.supervise.policy.suspects import Suspects, find_suspects
from myriad.telemetry.progress.device_clock import DeviceClock
from myriad.telemetry.progress.device_progress import DeviceProgress
from myriad.telemetry.progress.progress_page import ROW_BYTES, ProgressPage, ProgressRow, RowStatus
from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.spans import Recorder

CPU = torch.device("cpu")
LAYOUT = Layout(pp=2, tp=2)
MICRO_BATCHES = 4
HANG_SECONDS = 1.5


class Device:
    """Does what it is asked for, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def ask(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._passed, self._at = device, threading.Event(), 0.0

    def record(self) -> None:
        self._passed = passed = threading.Event()

        def arrive() -> None:
            self._at = time.monotonic()
            passed.set()

        self._device.ask(arrive)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()

    def elapsed_time(self, end_event: "Event") -> float:
        return (end_event._at - self._at) * 1e3


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank, in the action of so many of a kind."""

    rank: int
    kind: Kind
    number: int
    what: str = "device"
    """"device" stops, "host" stalls, "message" is lost."""


@dataclass
class Rank:
    """One rank that trains a step."""

    fault: Fault | None
    groups: Groups
    device: Device = field(default_factory=Device)
    works: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = self.groups
        self.page = ProgressPage(1)
        self.row = ProgressRow(memoryview(self.page._memory)[:ROW_BYTES])
        self.row.begin(1)
        self.row.step(3)
        self.recorder = Recorder(
            self.row, SpanRing.of_its_own(1024), groups.grid.rank, DeviceClock(self.device.event)
        )
        self.pairs = {kind: groups.along("pp", purpose=kind, pairwise=True) for kind in Payload}
        self.tensor, self.place = groups.along("tp"), groups.grid.index("pp")
        program = build_program(LAYOUT, OverlapConfig(), MICRO_BATCHES, tied=False, training=True)
        self.actions = program.ranks[self.place]
        for kind, pair in self.pairs.items():
            transfers = [t for a in self.actions for t in a.transfers if t.payload is kind]
            connect_pairs(pair, {(t.peer, t.sends) for t in transfers}, CPU)

    def ask(self, action: Action, number: int) -> None:
        """As the runtime asks a GPU: nothing is waited for."""
        fault = self.fault
        hit = fault is not None and (fault.kind, fault.number) == (action.kind, number)
        if hit and fault is not None and fault.what == "host":
            time.sleep(60)
        if hit and fault is not None and fault.what == "device":
            self.device.ask(threading.Event().wait)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            for _ in range(1 + self.place):  # the last stage has more communication
                self.device.ask(self._gather)
                with self.recorder.span("tensor_comm"):
                    self.device.ask(lambda: self.works.pop("tensor").wait())
        for transfer in action.transfers:
            if action.kind is Kind.WAIT:
                self.device.ask(lambda t=transfer: self.works.pop(_key(t)).wait())
            elif not (hit and fault is not None and fault.what == "message"):
                self.device.ask(lambda t=transfer: self._post(t))

    def _gather(self) -> None:
        both, own = torch.empty(2), torch.ones(1)
        self.works["tensor"] = start_all_gather(both, own, self.tensor)

    def _post(self, transfer: PipelineTransfer) -> None:
        post = dist.isend if transfer.sends else dist.irecv
        peer = {"group_dst" if transfer.sends else "group_src": transfer.peer}
        self.works[_key(transfer)] = post(torch.zeros(1), group=self.pairs[transfer.payload], **peer)

    def train(self) -> tuple[RowStatus, RowStatus]:
        """A step; its row by the host alone, and with the device's progress."""
        numbers: dict[Kind, int] = {}
        for index, action in enumerate(self.actions):
            number = numbers[action.kind] = numbers.get(action.kind, -1) + 1
            operation = operation_of(action, self.place, LAYOUT.pp)
            with self.recorder.span(
                action.kind, action.stage, action.micro_batch, operation=operation, follows=index > 0
            ):
                self.ask(action, number)
        done = threading.Event()
        with self.recorder.span("all_reduce", recorded=False):
            self.device.ask(lambda: (all_reduce(torch.zeros(1), self.groups.world), done.set()))
            done.wait()
        raise AssertionError("the step did not hang")


def _key(transfer: PipelineTransfer) -> Any:
    return transfer.payload, transfer.stage, transfer.micro_batch, transfer.sends


def hang(fault: Fault) -> tuple[RowStatus, RowStatus]:
    """Two looks at this rank's row: by its host, and with its device's progress."""
    install()
    groups = open_world(LAYOUT, CPU, comm=CommConfig(timeout_seconds=120))
    rank = Rank(fault if groups.grid.rank == fault.rank else None, groups)
    threading.Thread(target=rank.train, daemon=True).start()
    time.sleep(HANG_SECONDS)
    by_host = rank.page.read(0)
    assert rank.recorder.device is not None
    DeviceProgress(rank.recorder.device, rank.row, lambda: None, poll_seconds=0.02)
    time.sleep(HANG_SECONDS)
    return by_host, rank.page.read(0)


def suspects(looks: list[RowStatus]) -> Suspects:
    """As the driver finds them."""
    world = LAYOUT.world
    work = StepWork(1, 2, world, (), (MICRO_BATCHES,), MICRO_BATCHES, 10, "report")
    rows = [
        RankStatus(
            rank, 1, "S", one.phase, one.activity, one.step, one.entered, one.left, 20.0, 1.0,
            comm=CommStatus(one.counters, one.waits, one.on_device),
        )
        for rank, one in enumerate(looks)
    ]  # fmt: skip
    return find_suspects(rows, {rank: work.seat(rank, world) for rank in range(world)})


@pytest.mark.parametrize(
    ("fault", "ranks", "why"),
    [
        (Fault(3, Kind.BACKWARD, 1), (3,), 'its GPU is in "backward" of step 3'),
        (Fault(0, Kind.FORWARD, 2), (0,), 'its GPU is in "forward" of step 3'),
        (Fault(0, Kind.BACKWARD, 3), (0,), 'its GPU is in "backward" of step 3'),
        (Fault(2, Kind.SEND, 1, "message"), (0, 2), "a message that is under way"),
    ],
)
def test_the_rank_whose_device_stopped_is_named_and_not_the_shortest_program(
    fault: Fault, ranks: tuple[int, ...], why: str
) -> None:
    found = run_ranks(LAYOUT.world, hang, fault, timeout=100)
    hosts, devices = [one for one, _ in found], [one for _, one in found]
    assert {(one.activity, one.entered - one.left) for one in hosts} == {("all_reduce", 1)}, "all alike"
    assert not any(one.on_device for one in hosts) and suspects(hosts).ranks == (0, 1, 2, 3)
    assert all(one.on_device for one in devices)
    suspicion = suspects(devices)
    assert suspicion.ranks == ranks and why in suspicion.why, suspicion.why


def test_a_host_that_stalls_is_named() -> None:
    """Its device has nothing to do, and the others' wait for what it was not asked for."""
    found = run_ranks(LAYOUT.world, hang, Fault(1, Kind.BACKWARD, 2, "host"), timeout=100)
    suspicion = suspects([one for _, one in found])
    assert suspicion.ranks == (1,) and 'in "backward" of step 3' in suspicion.why, suspicion.why
