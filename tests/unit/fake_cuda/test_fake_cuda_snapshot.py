"""Snapshots of a GPU's memory, on a `torch.cuda` that computes nothing: how their memory is pinned, and what
becomes of a machine that does not pin it."""

import logging
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from fake_device import DEVICE, fake_torch_cuda, waits

from myriad.checkpoint.snapshots import snapshot_taker
from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory

SLOT_BYTES = 10 * 4096


class Cudart:
    """Pins up to ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.pinned = limit, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if sum(self.pinned.values()) + size > self.limit:
            return 2
        assert not any(
            address < start + many and start < address + size for start, many in self.pinned.items()
        )
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    descriptor = SnapshotMemory.create(3, SLOT_BYTES)
    yield SnapshotMemory(descriptor)
    os.close(descriptor)


@pytest.fixture
def made(memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A copier in the making, pieces of four pages, and the errors that CUDA was made to forget."""
    monkeypatch.setattr(snapshot_taker, "_PIN_BYTES", 4 * 4096)
    forgotten: list[torch.device] = []
    monkeypatch.setattr(snapshot_taker, "_forget_error", forgotten.append)

    def copier(limit: int) -> tuple[snapshot_taker._CudaCopier, Cudart]:
        cudart = Cudart(limit)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        return snapshot_taker._CudaCopier(memory, DEVICE), cudart

    with fake_torch_cuda():
        yield SimpleNamespace(copier=copier, forgotten=forgotten)


def copied(memory: SnapshotMemory, copier: snapshot_taker._CudaCopier) -> list[str]:
    """One snapshot; gives the threads in which tensors were copied."""
    threads: list[str] = []
    values = torch.arange(SLOT_BYTES // 4, dtype=torch.int32)
    whole = [
        snapshot_taker._MemoryCopy(values[:3000], 0),
        snapshot_taker._MemoryCopy(values[3000:].view(-1, 8).t(), 12000),
    ]
    copies = [part for one in whole for part in snapshot_taker._within_pins(one)]
    original = copier._copy

    def noted(*arguments: object) -> None:
        threads.append(threading.current_thread().name)
        original(*arguments)  # type: ignore[arg-type]

    copier._copy = noted  # type: ignore[method-assign, assignment]
    copier.prepare = lambda: None
    copier.begin(copies, 1)
    done = threading.Event()

    def work() -> None:
        copier.enter_thread()
        copier.finish(copies, 1)
        done.set()

    worker = threading.Thread(target=work, name="worker")
    worker.start()
    copier.settle(done)
    worker.join()
    stored = torch.frombuffer(memory.view(1), dtype=torch.int32)
    assert torch.equal(stored[:3000], values[:3000])
    assert torch.equal(stored[3000:].view(8, -1), values[3000:].view(-1, 8).t())
    return threads


def test_memory_is_pinned_in_pieces_that_no_copy_crosses(
    memory: SnapshotMemory, made: SimpleNamespace
) -> None:
    """A driver refuses one registration of hundreds of GiB, and a copy between two registrations."""
    copier, cudart = made.copier(limit=3 * SLOT_BYTES)
    assert sorted(cudart.pinned.values()) == 3 * [2 * 4096] + 6 * [4 * 4096]
    assert copied(memory, copier) == ["MainThread"]
    copier.close()
    assert not cudart.pinned and not made.forgotten


def test_a_machine_that_cannot_pin_all_memory_copies_in_the_thread_and_reports_it(
    memory: SnapshotMemory, made: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        copier, cudart = made.copier(limit=2 * SLOT_BYTES)
    assert caplog.messages == ["snapshots are copied more slowly: CUDA error 2 when their memory was pinned"]
    assert not cudart.pinned and made.forgotten == [DEVICE], (
        "the next kernel would report the error as its own"
    )
    assert copied(memory, copier) == ["worker"]


@pytest.mark.parametrize("start", [0, 4, 16380])
@pytest.mark.parametrize("shape", [(9000,), (3, 3000), (9000, 1), (2, 2, 2250)])
def test_parts_of_a_copy_are_the_copy(
    start: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_taker, "_PIN_BYTES", 4 * 4096)
    values = torch.arange(9000, dtype=torch.int32).view(shape)
    parts = list(snapshot_taker._within_pins(snapshot_taker._MemoryCopy(values, start)))
    assert torch.equal(torch.cat([part.source.reshape(-1) for part in parts]), values.view(-1))
    ends = [part.start + part.num_bytes for part in parts]
    assert [part.start for part in parts] == [start, *ends[:-1]]
    assert all(part.start // 16384 == (end - 1) // 16384 for part, end in zip(parts, ends, strict=True))


def test_the_thread_sleeps_while_it_waits_and_knows_its_device(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it keeps a core busy, and may open a context on the first GPU for each rank."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    copier, _ = made.copier(limit=3 * SLOT_BYTES)
    assert copier._done.options == {"blocking": True}
    copier.enter_thread()
    assert entered == [DEVICE]
    waits.clear()
