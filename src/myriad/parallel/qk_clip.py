"""QK-clip: bound the attention scores by scaling the weights of queries and keys after the update.

    S_h             largest score of head h in the step, over micro-batches and replicas
    r_h             min(1, tau / S_h)
    queries of h    times sqrt(r_h)
    keys            times sqrt(r_h); of a head that several query heads share: sqrt of their smallest r_h

(Kimi K2, arXiv 2507.20534, section 2.1: MuonClip.) No score of the same input exceeds tau then. In latent
attention, whose heads share the rotated part of the keys, that part stays, and the rotated part of the
queries is multiplied by r_h. The scores of a step are those of the weights before its update.

Each head lies on one tensor-parallel rank, so the maxima need one reduction over replicas, of a number a
head.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from myriad.comm.collectives import all_reduce_max
from myriad.comm.groups import Groups
from myriad.model.latent_attention import LatentAttention
from myriad.model.self_attention import Attention
from myriad.parallel.chunk import Chunk
from myriad.parallel.rank_model import RankModel

__all__ = ["QKClip"]


@dataclass(frozen=True)
class _Clipped:
    """An attention of this rank, and its part of the maxima."""

    attention: Attention | LatentAttention
    heads: slice


class QKClip:
    """Records the largest scores of this rank's heads, and clips their weights."""

    def __init__(self, limit: float, model: RankModel, groups: Groups, device: torch.device) -> None:
        """``limit``: tau. Begins to record in all attentions of the rank's stages."""
        self._limit, self._group, grid = limit, groups.along("dp_cp"), groups.grid
        self.num_slots = grid.layout.pp * grid.layout.tp
        """Numbers that each step's maximum takes in the message of CLIP, one for each rank of a replica."""
        self._slot = grid.index("pp") * grid.layout.tp + grid.index("tp")
        self._counts = grid.index("dp_cp") == 0
        found = [one for stage in model.stages.values() for one in _attentions(stage.layers.values())]
        ends = [0]
        for attention in found:
            ends.append(ends[-1] + attention.shape.num_heads)
        self.maxima = torch.zeros(ends[-1], device=device)
        self._clipped = [
            _Clipped(attention, slice(start, stop))
            for attention, start, stop in zip(found, ends[:-1], ends[1:], strict=True)
        ]
        for one in self._clipped:
            one.attention.largest_scores = self.maxima[one.heads]
        places = {
            (id(module), attribute): (chunk, index)
            for chunk in model.chunks
            for index, entry in enumerate(chunk.entries)
            for module, attribute in entry.homes
        }
        self._places = places

    def begin(self) -> None:
        """Forget the scores of the last step."""
        self.maxima.fill_(-torch.inf)

    def reduce(self, slots: torch.Tensor) -> None:
        """Take the maxima over replicas, and write this rank's largest into its slot."""
        if not self._clipped:
            if self._counts:
                slots[self._slot].fill_(-torch.inf)
            return
        all_reduce_max(self.maxima, self._group)
        if self._counts:
            slots[self._slot] = self.maxima.amax()

    def clip(self, chunk: Chunk) -> None:
        """Scale the master values of this chunk's weights of queries and keys."""
        for one in self._clipped:
            ratios = (self._limit / self.maxima[one.heads]).clamp(max=1.0)
            # A maximum that is not positive gives no bound.
            ratios = torch.where(self.maxima[one.heads] > 0, ratios, 1.0)
            for module, attribute, factors in one.attention.clip_factors(ratios):
                held, index = self._places[id(module), attribute]
                if held is chunk:
                    _scale_rows(chunk, index, factors)


def _attentions(layers: Iterable[nn.Module]) -> Iterator[Attention | LatentAttention]:
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, Attention | LatentAttention):
                yield module


def _scale_rows(chunk: Chunk, index: int, factors: torch.Tensor) -> None:
    """Multiply the rows of a parameter by ``factors``, as far as they lie in this rank's slice."""
    begin, end = chunk.spans[index]
    start, stop = max(begin, chunk.start), min(end, chunk.stop)
    if start >= stop:
        return
    flat = chunk.master[start - chunk.start : stop - chunk.start]
    width = (end - begin) // len(factors)
    first, last = -(-(start - begin) // width), (stop - begin) // width  # whole rows
    if first > last:  # a part of one row
        flat.mul_(factors[last])
        return
    edge, rest = first * width - (start - begin), last * width - (start - begin)
    if edge:
        flat[:edge].mul_(factors[first - 1])
    flat[edge:rest].view(-1, width).mul_(factors[first:last, None])
    if rest < len(flat):
        flat[rest:].mul_(factors[last])
