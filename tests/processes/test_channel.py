"""A tensor between pipeline stages that arrives in pieces of the wrong ranks is an activation nobody
computed."""

import pytest
import torch
import torch.distributed as dist
from ranks import leave_world, run_ranks

from myriad.comm.channel import Channel
from myriad.comm.groups import open_world
from myriad.comm.layout import Layout


def transfer(shape: tuple[int, ...], is_split: bool) -> tuple[bool, set[int]]:
    """Stage 0 sends two tensors, the second one first; stage 1 waits for them in order, and answers."""
    groups = open_world(Layout(pp=2, tp=2), torch.device("cpu"))
    channel = Channel(groups, "test", both_ways=True, split=groups.along("tp") if is_split else None)
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    lengths, isend = set(), dist.isend
    dist.isend = lambda tensor, *a, **k: (lengths.add(tensor.numel()), isend(tensor, *a, **k))[1]
    if groups.grid.index("pp") == 0:
        sent = [channel.send(tensors[tag].transpose(0, 1).contiguous(), 1, tag) for tag in (1, 0)]
        back = channel.receive(torch.empty(shape), 1, 7)
        found = [back.wait(), *(posted.wait().transpose(0, 1) for posted in reversed(sent))]
        expected = [tensors[0] * 2, *tensors]
    else:
        flipped = torch.empty(shape).transpose(0, 1).shape
        posted = [channel.receive(torch.empty(flipped), 0, tag) for tag in range(2)]
        found = [each.wait().transpose(0, 1) for each in posted]
        channel.send(found[0] * 2, 0, 7).wait()
        expected = tensors
    leave_world()
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), lengths


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (3, 5)])
def test_tensors_arrive_whole_and_split_ones_cross_once(shape, is_split):
    share = shape[0] * shape[1] // (2 if is_split and shape == (4, 6) else 1)
    for arrived, lengths in run_ranks(4, transfer, shape, is_split):
        assert arrived
        assert lengths == {share}
