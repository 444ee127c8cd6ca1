"""If these break: a hanging rank or a cut link ends a run with pages of traceback, or a mistake of the
program passes for a lost peer."""

import pytest

from myriad.comm.lost_peer_errors import report_lost_peers
from myriad.errors import BadInputError, RunFailedError
from myriad.supervise.exit_causes import is_secondary

WAITED_IN_VAIN = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv "
    "operation to complete",
    "Application timeout caused pair closure",
    "wait timeout after 3000ms, keys: /default_pg/0/rank_1",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "Timeout(ms)=3000) ran for 3001 milliseconds before timing out.",
]
HUNG_UP = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4711: "
    "Connection reset by peer",
    "writev [127.0.0.1]:4711: Broken pipe",
    "NCCL communicator was aborted on rank 3.",
    "NCCL error in: ProcessGroupNCCL.cpp:3699, remote process exited or there was a network error, NCCL "
    "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.",
]


TOLD = [(words, "did not answer for 3 s") for words in WAITED_IN_VAIN]
TOLD += [(words, "ended") for words in HUNG_UP]


@pytest.mark.parametrize(("words", "told"), TOLD)
def test_a_lost_peer_is_one_line_that_does_not_take_the_blame(words: str, told: str) -> None:
    """Whoever waited in vain is not the one to look at, if another rank has an error of its own."""
    with pytest.raises(RunFailedError, match=told) as caught, report_lost_peers(3.0):
        raise RuntimeError(words)
    assert "\n" not in str(caught.value) and is_secondary(str(caught.value))
    assert str(caught.value.__cause__) == words


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("The expanded size of the tensor (4) must match the existing size (5)"),
        BadInputError("model.vocabulary", 3, "the corpus holds token 4"),
        ValueError("connection closed"),
    ],
)
def test_every_other_error_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, report_lost_peers(3.0):
        raise error
    assert caught.value is error
