"""If these fail, the proof that pipelines do not deadlock on GPUs is about other messages than ranks send."""

from typing import Any

import pytest
from parity_case import Case, make_engine, train_steps
from ranks import run_ranks

from myriad.comm.groups import close_world
from myriad.parallel.engine import Engine
from myriad.program.actions import PipelineTransfer
from myriad.program.device_operations import COMPUTE_STREAM, StreamUse, list_operations

Event = tuple[str, str, int, int]
"""What happens, to which payload, its tag, and the other rank."""


def messages(case: Case) -> tuple[list[Event], list[Event]]:
    """Of one step: what this rank's runtime posts and waits for, and what its operations say."""
    engine = make_engine(case)
    happened: list[Event] = []
    for payload, channel in engine._runtime.transfers.channels.items():
        for verb in ("send", "receive"):
            setattr(channel, verb, spied(getattr(channel, verb), verb, str(payload), happened))
    train_steps(case, engine, 0, 1)
    expected = proved(engine)
    engine.close()
    close_world()
    return happened, expected


def spied(post: Any, verb: str, payload: str, happened: list[Event]) -> Any:
    def posts(tensor: Any, peer: int, tag: int) -> Any:
        happened.append((verb, payload, tag, peer))
        posted = post(tensor, peer, tag)
        wait = posted.wait

        def waits() -> Any:
            happened.append((f"wait for {verb}", payload, tag, peer))
            return wait()

        posted.wait = waits
        return posted

    return posts


def proved(engine: Engine) -> list[Event]:
    program, rank = engine.programs[True], engine.groups.grid.index("pp")
    operations = list_operations([[program]], StreamUse(engine.layout.virtual_stages > 1))

    def event(verb: str, transfer: PipelineTransfer) -> Event:
        way = "send" if transfer.sends else "receive"
        tag = transfer.micro_batch * program.num_stages + transfer.stage
        return verb + way, str(transfer.payload), tag, transfer.peer

    found = []
    for one in operations:
        if one.rank == rank and one.is_transfer:
            found.append(event("", one.action.transfers[0]))
        elif one.rank == rank and one.stream == COMPUTE_STREAM:
            awaited = [operations[number] for number in one.after]
            found += [event("wait for ", each.action.transfers[0]) for each in awaited if each.is_transfer]
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case({"pp": 2}),
        Case({"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v"}, overlap={"receive_ahead": 3}),
        Case({"pp": 2, "virtual_stages": 2}, overlap={"pipeline": False}),
    ],
    ids=["1f1b", "zero-bubble-v", "coupled"],
)
def test_the_proof_is_about_the_messages_that_ranks_send_and_wait_for(case: Case) -> None:
    for happened, expected in run_ranks(2, messages, case):
        assert happened == expected
        assert len(happened) > 8
