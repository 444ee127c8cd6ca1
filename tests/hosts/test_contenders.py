"""What the benchmark over links takes for granted: peers that compute right, and layouts that send what they
must and no more."""

from functools import partial
from importlib import import_module

import pytest

from bandwidth_contenders import data_bytes, pipeline_bytes, tensor_bytes
from peers.check import largest_difference
from peers.megatron_layout import MegatronLayout
from peers.myriad_side import Myriad
from peers.torch_peers import data_parallel, pipeline, tensor_parallel
from peers.work import Work, run_contender

WORK = Work(layers=6, hidden=64, heads=4, vocabulary=512, sequence=64, global_batch=4)

PEERS = {
    "DDP": partial(data_parallel, bucket_mib=1),
    "FSDP2": partial(data_parallel, reshard=True),
    "tensor": partial(tensor_parallel, sequence=False),
    "tensor and sequence": partial(tensor_parallel, sequence=True),
    "1F1B": partial(pipeline, schedule="1f1b", virtual_stages=1, micro_batch=1),
    "interleaved": partial(pipeline, schedule="interleaved", virtual_stages=2, micro_batch=2),
    "zero-bubble": partial(pipeline, schedule="zbv", virtual_stages=2, micro_batch=1),
}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import the peers before ranks are forked that would each import them."""
    for name in ("data", "pipeline", "tensor"):
        import_module(f"peers.{name}")


def check(make) -> float:
    return largest_difference(make(WORK), WORK)


@pytest.mark.parametrize("peer", PEERS)
def test_gradients_of_peers_are_those_of_one_process(hosts, peer):
    assert hosts(2).run_ranks(check, PEERS[peer])[0] < 1e-5


def test_gradients_of_tensor_and_pipeline_parallelism_together_are_those_of_one_process(hosts):
    make = partial(MegatronLayout, tp=2, micro_batch=1)
    assert max(hosts(2).run_ranks(check, make, ranks_per_host=2)) < 1e-5


LAYOUTS = {
    "data": ({"dp": 2, "micro_batch": 2}, data_bytes(WORK, 2)),
    "data, zero 2": ({"dp": 2, "zero": 2, "micro_batch": 2}, data_bytes(WORK, 2)),
    "tensor": ({"tp": 2, "micro_batch": 2}, tensor_bytes(WORK, 2, 2)),
    "pipeline": ({"pp": 2}, pipeline_bytes(WORK, [0, 1], 1)),
    "interleaved": ({"pp": 2, "virtual_stages": 2}, pipeline_bytes(WORK, [0, 1, 0, 1], 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_sends_what_it_must_and_little_more(hosts, name):
    """The rest: headers, the global norm, the loss of vocabulary-parallel ranks. A little may be missing:
    what is still under way at the end of the last step."""
    layout, least = LAYOUTS[name]
    timings = hosts(2).run_ranks(run_contender, partial(Myriad, layout=layout), WORK, 8)
    sent = max(timing.sent_bytes for timing in timings)
    assert 0.95 * least < sent < 1.1 * least + 20_000
