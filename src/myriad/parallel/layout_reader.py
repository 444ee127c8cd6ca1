"""Read texts with caches of keys and values, in the layout of an engine: `TextReader` of its ranks.

    replica 0   its texts ──► stage 0 ──► stage 1 ──► the two largest scores ──► all its ranks: one more token
    replica 1   its texts ──► ...

A replica is one of the ranks of ``dp`` and ``cp`` with its tensor- and pipeline-parallel peers: a rank of
``cp`` takes whole texts of its own. Within a replica the stream is whole on each tensor-parallel rank,
because a new token cannot be shared along the sequence: partial sums are added up over the ranks. Stages
broadcast their output to the other stages. A text needs every stage for each token, so stages compute in
turn.

Replicas gather parameters (ZeRO 3) and exchange tokens of experts with each other, so all replicas read at
the same time: one that has no more texts reads a blank one (`finish`) until all have read theirs.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from myriad.comm.collectives import all_reduce_max, broadcast, start_all_gather
from myriad.comm.groups import Groups
from myriad.errors import MyriadError
from myriad.model.config import ModelConfig
from myriad.model.head import Head
from myriad.model.key_value_cache import KeyValueCache, NewPositions
from myriad.model.layers import Block, Embedding
from myriad.parallel.rank_model import RankModel
from myriad.parallel.tensor_parallel import GroupBoundary

__all__ = ["LayoutReader", "ReadingStoppedError"]


class ReadingStoppedError(MyriadError):
    """A rank was asked to stop."""


class LayoutReader:
    """This rank's part of the layers. All ranks call the same methods at the same time."""

    def __init__(
        self,
        config: ModelConfig,
        model: RankModel,
        boundary: GroupBoundary,
        groups: Groups,
        stage_rank: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """A collective call of all ranks. ``stage_rank``: the pipeline rank of each stage."""
        self.device = device
        self.has_learned_positions = config.position == "learned"
        self.scaling = config.rotary_scaling if config.position == "rotary" else None
        layers = [layer for stage in model.stages.values() for layer in stage.layers.values()]
        self.blocks: Sequence[Block] = [layer for layer in layers if isinstance(layer, Block)]
        self.stops: Callable[[], bool] = _never
        """Whether this rank was asked to stop, which every read reports to all ranks."""
        self._index_of = {block: index for index, block in enumerate(self.blocks)}
        self._model, self._boundary, self._stage_rank, self._dtype = model, boundary, stage_rank, dtype
        self._hidden = config.hidden
        self._own_rank, self._world = groups.grid.index("pp"), groups.world
        self._stages = groups.along("pp", purpose="texts")

    def read(self, tokens: torch.Tensor, at: NewPositions, caches: Sequence[KeyValueCache]) -> torch.Tensor:
        """Compute new tokens ``[B, S]``. Return of each row the two largest scores, and the token of the
        largest, ``[B, 3]``. Raises `ReadingStoppedError` on all ranks if any was asked to stop."""
        self._agree(reads=True)
        return self._read(tokens, at, caches)

    def likeliest(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest token of each row, and the two largest scores."""
        return scores[:, 2].long(), scores[:, :2]

    @torch.no_grad()
    def finish(self) -> None:
        """Read blank texts until all replicas have read theirs."""
        while self._agree(reads=False):
            caches = [block.attention.new_cache(1) for block in self.blocks]
            blank = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self._read(blank, NewPositions([1], [1], self.device), caches)

    def _agree(self, *, reads: bool) -> bool:
        """Return whether any rank reads a text."""
        own = torch.tensor([reads, self.stops()], dtype=torch.int32, device=self.device)
        any_reads, any_stops = all_reduce_max(own, self._world).tolist()
        if any_stops:
            raise ReadingStoppedError("asked to stop")
        return bool(any_reads)

    def _read(self, tokens: torch.Tensor, at: NewPositions, caches: Sequence[KeyValueCache]) -> torch.Tensor:
        x = torch.empty(*tokens.shape, self._hidden, dtype=self._dtype, device=self.device)
        scores = torch.empty(len(tokens), 3, dtype=torch.float64, device=self.device)
        last = len(self._stage_rank) - 1
        with self._boundary.whole_stream():
            for stage, rank in enumerate(self._stage_rank):
                if rank == self._own_rank:
                    out = self._compute(stage, tokens, x, at, caches)
                    x, scores = (x, out) if stage == last else (out, scores)
                if stage < last and self._stage_rank[stage + 1] != rank:
                    x = broadcast(x.contiguous(), self._stages, rank)
        return broadcast(scores, self._stages, self._stage_rank[last])

    def _compute(
        self,
        stage: int,
        tokens: torch.Tensor,
        x: torch.Tensor,
        at: NewPositions,
        caches: Sequence[KeyValueCache],
    ) -> torch.Tensor:
        """Return the output of a stage of this rank; of the last one the scores."""
        held = self._model.stages[stage]
        for chunk in held.chunks:
            chunk.start_gather(stage)
        for chunk in held.chunks:
            chunk.await_gather()
        for layer in held.layers.values():
            layer.eval()
            if isinstance(layer, Embedding):
                x = layer.embed(tokens, at.positions)
            elif isinstance(layer, Block):
                x = layer.step(x, caches[self._index_of[layer]], at)
            else:
                assert isinstance(layer, Head)
                x = self._best(layer, x[:, -1])
        for chunk in held.chunks:
            chunk.release(stage)
        return x

    def _best(self, head: Head, x: torch.Tensor) -> torch.Tensor:
        """Return the two largest scores of the whole vocabulary and the token of the largest, ``[B, 3]``,
        from the stream ``[B, H]``."""
        logits = head.logits(x)
        first = self._boundary.rank * len(head.output.weight)
        logits = F.pad(logits, (0, max(2 - logits.shape[1], 0)), value=-torch.inf)
        token = logits.argmax(1, keepdim=True) + first
        own = torch.cat([logits.topk(2, 1).values.double(), token.double()], 1)
        found = own.new_empty(self._boundary.size * len(own), 3)
        start_all_gather(found, own, self._boundary.group).wait()
        found = found.view(self._boundary.size, -1, 3)
        rank = found[:, :, 0].argmax(0)  # of equal scores the lowest rank's: its token is smaller
        token = found[:, :, 2].gather(0, rank[None])[0]
        best = found[:, :, :2].movedim(0, 1).flatten(1).topk(2, 1).values
        return torch.cat([best, token[:, None]], 1)


def _never() -> bool:
    return False
