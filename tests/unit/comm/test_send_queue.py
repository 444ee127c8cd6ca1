"""A sender that sends the wrong chunk first makes the next forward wait for parameters it does not need yet;
one without a bound lets an urgent chunk queue behind everything."""

import threading
from queue import Empty, Queue

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.send_queue import PendingOp, SendQueue


class Sent:
    """A send that stays in flight until the test completes it."""

    def __init__(self, data: torch.Tensor, tag: int) -> None:
        self.data, self.tag, self.done = data, tag, threading.Event()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error:
            raise self.error


class Wire:
    """A group of which one rank is real; `sent` holds its sends in the order in which they were posted."""

    def __init__(self) -> None:
        self.sent: Queue[Sent] = Queue()

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Sent:
        one = Sent(tensors[0], tag)
        self.sent.put(one)
        return one

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Sent:
        """Asked for only to break the connection."""
        raise RuntimeError("closed")


@pytest.fixture(scope="module", autouse=True)
def ranks_of_a_wire():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        yield


def drain(wire: Wire, credit: int, count: int) -> list[int]:
    """Ends sends one by one; gives their tags in the order in which they were posted."""
    tags, under_way = [], []
    while len(tags) < count:
        try:
            under_way.append(wire.sent.get(timeout=0.02))
        except Empty:
            if under_way:
                under_way.pop(0).done.set()  # the next one does not fit yet
            continue
        tags.append(under_way[-1].tag)
        assert len(under_way) == 1 or sum(sent.data.nbytes for sent in under_way) <= credit
    for sent in under_way:
        sent.done.set()
    return tags


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=2, max_size=10), st.integers(1, 90)
)
def test_the_most_urgent_goes_first_within_the_credit(messages, credit):
    wire, pending = Wire(), PendingOp()
    post = SendQueue(wire, credit)
    first = torch.zeros(credit, dtype=torch.uint8)
    post.send(first, 1, 1000, pending, (9, 0))  # takes the whole credit, so that the others queue up
    for tag, (priority, size) in enumerate(messages):
        post.send(torch.zeros(size, dtype=torch.uint8), 1, tag, pending, (priority, tag))
    pending.complete_part()
    tags = drain(wire, credit, len(messages) + 1)
    pending.wait()
    post.close()
    by_urgency = sorted(range(len(messages)), key=lambda tag: (messages[tag][0], tag))
    assert tags == [1000, *by_urgency]
    assert post.bytes_sent == {1: credit + sum(size for _, size in messages)}


def test_an_error_reaches_whoever_waits_now_or_later():
    wire, first, second, later = Wire(), PendingOp(), PendingOp(), PendingOp()
    post = SendQueue(wire, 1)
    for pending in (first, second):
        post.send(torch.zeros(8), 1, 0, pending, (0, 0))
        pending.complete_part()
    broken = wire.sent.get(timeout=10)
    broken.error = RuntimeError("the cable was pulled")
    broken.done.set()
    for pending in (first, second):
        with pytest.raises(RuntimeError, match="cable"):
            pending.wait()
    post.send(torch.zeros(8), 1, 0, later, (0, 0))
    with pytest.raises(RuntimeError, match="cable"):
        later.wait()
    post.close()


def test_an_error_in_a_job_reaches_who_waits():
    wire, pending = Wire(), PendingOp()
    post = SendQueue(wire, 1)
    post.start(lambda: 1 / 0, pending)
    pending.complete_part()
    with pytest.raises(ZeroDivisionError):
        pending.wait()
    post.close()
