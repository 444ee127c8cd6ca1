"""If these fail, a pipeline over NCCL hangs in its first step on GPUs, or a job that would not is refused.

Devices are modelled (`myriad.program.device_check`): communicators that block when they are made, kernels
whose first launch waits, streams that share a hardware queue."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.program.actions import COMPUTE, Kind
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig
from myriad.program.device_check import (
    Deadlock,
    Device,
    deal_in_turn,
    find_deadlock,
    own_queue,
    single_queue,
)
from myriad.program.device_needs import (
    DeviceJob,
    check_device_job,
    find_needs,
    queues_in,
    rank_environment,
    shorter_shares,
)
from myriad.program.device_operations import StreamUse, list_operations, streams_of
from myriad.program.schedules import SCHEDULES
from myriad.program.warm_up import warm_up_actions

STAGES = {"interleaved": 2, "zero-bubble-v": 2, "dualpipe-v": 2}
NAMES = tuple(SCHEDULES)


def layout_of(name: str, pp: int, **more: Any) -> Layout:
    return Layout(**{"pp": pp, "schedule": name, "virtual_stages": STAGES.get(name, 1)} | more)


def deadlock_of(name: str, pp: int, device: Device, training: bool = True, **overlap: Any) -> Deadlock | None:
    layout = layout_of(name, pp)
    program = build_program(layout, OverlapConfig(**overlap), 3 * pp, tied=False, training=training)
    return find_deadlock(list_operations([[program]], StreamUse(layout.virtual_stages > 1)), device)


def job_of(layout: Layout, micro_batches: int, tied: bool = False, **overlap: Any) -> DeviceJob:
    return DeviceJob(layout, OverlapConfig(**overlap), CommConfig(), (micro_batches,), tied)


LAZY, LATE, SHARED = Device("lazily"), Device(kernels="lazily"), Device(queues=single_queue)
ALL, NONE = {2, 4, 8}, set[int]()


@pytest.mark.parametrize(
    ("name", "lazy", "late", "shared"),
    [
        ("gpipe", NONE, NONE, ALL),
        ("1f1b", ALL, ALL, ALL),
        ("eager-1f1b", ALL, NONE, NONE),
        ("interleaved", {2}, {2}, ALL),
        ("zero-bubble", ALL, ALL, {4, 8}),
        ("zero-bubble-v", ALL, ALL, {4, 8}),
        ("eager-zero-bubble", ALL, NONE, NONE),
        ("dualpipe-v", ALL, ALL, {4, 8}),
    ],
)
def test_known_deadlocks_are_found(name: str, lazy: set[int], late: set[int], shared: set[int]) -> None:
    """Pipeline ranks with which a step hangs: communicators made at first use, kernels loaded at first
    launch, one queue. With all of it at start and a queue for each stream none does."""
    for device, expected in ((LAZY, lazy), (LATE, late), (SHARED, shared), (Device(), NONE)):
        assert {pp for pp in ALL if deadlock_of(name, pp, device)} == expected
    assert not any(deadlock_of(name, pp, LAZY, pipeline=False) for pp in ALL)


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble-v", "dualpipe-v"])
def test_a_validation_that_comes_first_deadlocks_too_where_communicators_are_made_lazily(name: str) -> None:
    assert deadlock_of(name, 2, LAZY, training=False)
    assert not deadlock_of(name, 2, Device(), training=False)


@st.composite
def jobs(draw: st.DrawFn, most_ranks: int = 16) -> DeviceJob:
    name, pp = draw(st.sampled_from(NAMES)), draw(st.integers(2, most_ranks))
    stages = draw(st.integers(2, 4)) if name == "interleaved" else STAGES.get(name, 1)
    zero, dp, tp = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    reduce = draw(st.sampled_from(["last", "each"])) if zero >= 2 else "last"
    more = {"virtual_stages": stages, "zero": zero, "dp": dp, "tp": tp, "reduce": reduce}
    count = draw(st.integers(1, 24 if pp < 8 else 10))
    shares = (count, draw(st.integers(1, count))) if dp == 2 else (count,)
    overlap = OverlapConfig(
        receive_ahead=draw(st.integers(1, 5)),
        data=draw(st.booleans()),
        optimizer_in_backward=draw(st.booleans()),
    )
    tied, chunks = draw(st.booleans()), draw(st.integers(1, 3))
    return DeviceJob(layout_of(name, pp, **more), overlap, CommConfig(), shares, tied, chunks)


@settings(max_examples=25)
@given(jobs())
def test_prepared_ranks_never_deadlock(job: DeviceJob) -> None:
    """Whatever the layout: training, and validation before and after it."""
    assert [find_deadlock(run, Device()) for run in job.runs()] == [None, None]


@settings(max_examples=25)
@given(jobs())
def test_without_the_overlap_of_pipelines_neither_kernels_nor_queues_matter(job: DeviceJob) -> None:
    coupled = DeviceJob(job.shape, OverlapConfig(pipeline=False), job.comm, job.shares, job.tied)
    device = Device("at start", "lazily", single_queue)
    assert [find_deadlock(run, device) for run in coupled.runs()] == [None, None]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble-v"])
def test_a_program_that_repeats_is_evaluated_as_a_shorter_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of micro-batches are not walked through at each start; rounds that are not alike are."""
    assert shorter_shares((40,), 4) == (12,)
    assert shorter_shares((40, 16), 4) == (28, 4)
    assert shorter_shares((41,), 4) == (41,)
    for ahead in (1, 2, 4):
        job = job_of(layout_of(name, 3), 15, receive_ahead=ahead)
        devices = (Device(), LAZY, LATE, SHARED, Device(queues=deal_in_turn(3)))
        with monkeypatch.context() as patch:
            patch.setattr("myriad.program.device_needs.shorter_shares", lambda shares, pp: shares)
            whole = job.runs()
        assert len(whole[0]) > len(job.runs()[0])
        for run, longer in zip(job.runs(), whole, strict=True):
            for device in devices:
                assert (find_deadlock(run, device) is None) == (find_deadlock(longer, device) is None)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zero-bubble", "eager-zero-bubble"])
def test_receives_posted_one_compute_ahead_need_no_more_than_one_queue(name: str) -> None:
    """What a refusal of too few queues offers first, where it is proved: not with fewer micro-batches than
    ranks."""
    for pp in (2, 4, 8):
        job = job_of(layout_of(name, pp, dp=2, zero=1), 2 * pp, receive_ahead=1)
        assert [find_deadlock(run, SHARED) for run in job.runs()] == [None, None]
    few = job_of(layout_of("zero-bubble", 4), 2, receive_ahead=1)
    assert find_deadlock(few.runs()[0], SHARED)
    with pytest.raises(BadInputError, match=r"With fewer queues: overlap\.pipeline = false$"):
        check_device_job(few, 1)


@settings(max_examples=25)
@given(jobs(most_ranks=5), st.integers(1, 12), st.integers(1, 4))
def test_what_runs_in_one_queue_runs_in_every_assignment(job: DeviceJob, queues: int, stride: int) -> None:
    for run in job.runs():
        if find_deadlock(run, SHARED) is None:
            assert find_deadlock(run, Device(queues=deal_in_turn(queues, stride))) is None


@settings(max_examples=20)
@given(jobs(most_ranks=4), st.sampled_from([LAZY, LATE, SHARED]))
def test_a_deadlock_is_reported_as_a_cycle(job: DeviceJob, device: Device) -> None:
    for run in job.runs():
        found = find_deadlock(run, device)
        if found is None:
            continue
        for one, then in zip(found.waits, found.waits[1:] + found.waits[:1], strict=True):
            assert (one.for_rank, one.for_operation) == (then.rank, then.operation)
        assert len({one.rank for one in found.waits}) > 1


def test_the_shortest_cycle_names_both_ranks_and_what_each_waits_for() -> None:
    assert str(deadlock_of("1f1b", 2, LAZY)) == (
        "rank 0's receive(g1.0<-1) waits for rank 1's send(g1.0->0) (makes their communicator); "
        "rank 1's send(g1.0->0) waits for its receive(a0.0<-0) (it comes earlier); "
        "rank 1's receive(a0.0<-0) waits for rank 0's send(a0.0->1) (makes their communicator); "
        "rank 0's send(a0.0->1) waits for its receive(g1.0<-1) (it comes earlier)"
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_one_queue_less_than_streams_is_not_enough(name: str) -> None:
    """Two streams of a rank in one queue, all others in their own: for some two of them the step hangs."""
    (run, _) = job_of(layout_of(name, 4), 12).runs()
    streams = max(map(len, streams_of(run)))

    def pair(one: int, other: int) -> Device:
        return Device(queues=lambda stream: one if stream == other else stream)

    assert any(find_deadlock(run, pair(i, j)) for i in range(streams) for j in range(i))
    assert find_deadlock(run, Device(queues=own_queue)) is None


def test_what_a_program_needs_is_reported_in_two_lines() -> None:
    found = find_needs(job_of(layout_of("1f1b", 4), 8))
    assert (found.communicators_at_start, found.kernels_at_start) == (True, True)
    assert (found.queues, found.streams) == (7, 7)
    assert found.lines() == [
        "on GPUs it is free of deadlock with communicators made before the first step, kernels loaded before "
        "it and a hardware queue for each of 7 streams",
        "ranks see to that, unless CUDA_DEVICE_MAX_CONNECTIONS is set to less than 7",
    ]
    coupled = find_needs(job_of(layout_of("1f1b", 4), 8, pipeline=False))
    assert (coupled.communicators_at_start, coupled.kernels_at_start, coupled.queues) == (False, False, 1)
    assert "whatever is loaded late" in coupled.lines()[0]


def test_too_few_queues_are_refused_with_settings_that_are_proved() -> None:
    job = job_of(layout_of("1f1b", 4), 8)
    with pytest.raises(BadInputError) as refused:
        check_device_job(job, 1)
    assert str(refused.value) == (
        'CUDA_DEVICE_MAX_CONNECTIONS = "1": unset, or at least 7: the pipeline may deadlock on GPUs where '
        "some of its 7 streams share a hardware queue. With fewer queues: overlap.receive_ahead = 1 or "
        "overlap.pipeline = false"
    )
    for queues, overlap in ((7, {}), (1, {"receive_ahead": 1}), (1, {"pipeline": False})):
        check_device_job(job_of(layout_of("1f1b", 4), 8, **overlap), queues)
    with pytest.raises(BadInputError, match=r"With fewer queues: overlap\.pipeline = false$"):
        check_device_job(job_of(layout_of("interleaved", 4), 8), 4)
    check_device_job(job_of(Layout(dp=4), 8), 1)


def test_what_may_deadlock_in_any_queues_is_refused_with_its_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myriad.program.device_needs.Device", lambda **_: LAZY)
    with pytest.raises(BadInputError, match=r"^overlap\.pipeline = true: false on GPUs.*rank 0's receive"):
        check_device_job(job_of(layout_of("1f1b", 2), 4), 32)


def test_kernels_of_computes_alone_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up without reductions: the first one is launched while receives wait."""
    (run, _) = job_of(layout_of("interleaved", 2, virtual_stages=3), 2).runs()
    assert find_deadlock(run, Device()) is None
    monkeypatch.setattr("myriad.program.device_check._NOT_WARMED", {Kind.START_REDUCE, Kind.REDUCE})
    found = find_deadlock(run, Device())
    assert found is not None
    assert "loads its kernels" in str(found)


def test_ranks_ask_for_all_queues_and_early_kernels_where_messages_wait_behind_computing() -> None:
    layout, overlap = layout_of("1f1b", 2), OverlapConfig()
    expected = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    assert rank_environment(layout, overlap) == expected
    assert rank_environment(Layout(dp=2), overlap) == {}
    assert rank_environment(layout, OverlapConfig(pipeline=False)) == {}
    assert queues_in({}, layout, overlap) == 32
    assert queues_in({}, layout, OverlapConfig(pipeline=False)) == 8
    assert queues_in({"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, layout, overlap) == 4
    for wrong in ("", "many", "0", "33"):
        with pytest.raises(BadInputError, match="a whole number from 1 to 32, or unset"):
            queues_in({"CUDA_DEVICE_MAX_CONNECTIONS": wrong}, layout, overlap)


@settings(max_examples=20)
@given(jobs())
def test_a_warm_up_runs_every_kind_of_compute_of_every_stage_alone(job: DeviceJob) -> None:
    for training in (True, False):
        program = build_program(
            job.shape, job.overlap, job.shares[0], tied=job.tied, training=training, num_chunks=job.num_chunks
        )
        for rank, actions in enumerate(program.ranks):
            warmed = warm_up_actions(program, rank)
            wanted = {(action.kind, action.stage) for action in actions if action.kind in COMPUTE}
            assert {(action.kind, action.stage) for action in warmed if action.kind in COMPUTE} == wanted
            assert not any(action.transfers or action.kind is Kind.SYNC_TIED for action in warmed)
