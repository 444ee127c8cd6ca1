"""A bound on the tokens of each expert: those beyond it are dropped, and their residual passes unchanged.

    room      = ceil(model.expert_capacity x S x k / E)      pairs of a token and an expert, of one sequence
    kept      = of the tokens of a sequence that chose an expert, the first ``room`` in order of positions

    positions   0  1  2  3  4  5       expert 0, room 2: keeps 0 and 2, drops 3 and 5
    expert of   0  1  0  0  1  0       expert 1, room 2: keeps 1 and 4

GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961) bound the tokens of an expert among those of a device,
so that what is dropped depends on the layout. Here the bound is that of a sequence, which no layout changes,
and every rank that has a part of a sequence learns what all its tokens chose. Order by position is causal:
whether a token is dropped depends on nothing after it, as it would if larger gates came first. Gates stay as
they were before. Only training drops; evaluation and generation compute every chosen expert.

Legend: B batch, S sequence, k experts of a token, E experts.
"""

from functools import partial

import torch

from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.context_share import ContextPeers, ContextShare
from myriad.model.definition import Context
from myriad.model.expert_dispatch import Places
from myriad.model.interleave import Steps, Whole

__all__ = ["ExpertCapacity", "first_tokens"]


class ExpertCapacity:
    """Drops pairs of tokens and experts in one block, as this rank sees its tokens."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        self._config, self._boundary = config, boundary

    def steps(self, chosen: torch.Tensor, context: Context) -> Steps:
        """Return the experts ``[B, S, k]`` of this rank's tokens with -1 in place of those that drop them.
        Yields where the choices of a sequence's other tokens are needed."""
        peers = self._boundary.of_parts
        part = chosen
        if peers.size > 1:  # each chose for its part of the sequence
            arriving = peers.start_stack(chosen)
            yield None
            part = arriving.wait().transpose(0, 1).flatten(1, 2)
        whole = Whole(partial(self._kept, share=context.share, peers=self._boundary.context), part)
        yield whole
        return whole.result.unflatten(1, (peers.size, -1))[:, peers.rank]

    def _kept(
        self, chosen: torch.Tensor, share: ContextShare | None, peers: ContextPeers | None
    ) -> torch.Tensor:
        """Return what is kept of all of this rank's positions, or of all its tensor-parallel peers'."""
        if share is None or peers is None:
            return self._first(chosen)
        at = share.positions(chosen.device).expand(len(chosen), -1)[..., None].expand_as(chosen)
        everywhere = chosen.new_zeros(len(chosen), share.sequence, chosen.shape[2])
        return self._first(peers.sum(everywhere.scatter_(1, at, chosen))).gather(1, at)

    def _first(self, chosen: torch.Tensor) -> torch.Tensor:
        experts = self._config.experts
        assert experts is not None, "a block without experts has no capacity"
        return first_tokens(chosen, experts, self._config.expert_room(chosen.shape[1]))


def first_tokens(chosen: torch.Tensor, num_experts: int, room: int) -> torch.Tensor:
    """Return the experts ``[B, S, k]`` of the tokens of whole sequences, where an expert that ``room``
    earlier tokens of the sequence chose is -1."""
    sequences = torch.arange(len(chosen), device=chosen.device)[:, None, None]
    wanted = (chosen + sequences * num_experts).flatten(0, 1)
    places = Places.of(wanted, len(chosen) * num_experts)
    first = places.counts.cumsum(0) - places.counts
    earlier = places.back - first.index_select(0, wanted.flatten())
    return chosen.masked_fill(earlier.view_as(chosen) >= room, -1)
