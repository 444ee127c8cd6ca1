"""The node's loader, as one run's ranks use it: one process a node, started by local rank 0."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from myriad.comm.grid import RankGrid
from myriad.data.guard import BlockGuard
from myriad.data.loader import LoaderClient, LoaderSpec
from myriad.job import Job
from myriad.run import Run
from myriad.train.batches import rank_rows
from myriad.train.build import Place
from myriad.train.inputs import BadBlocks

__all__ = ["open_feed", "validation_guard"]


def open_feed(
    run: Run, job: Job, grid: RankGrid, place: Place, content: str, bad_blocks: BadBlocks
) -> LoaderClient:
    """Joins this node's loader, which holds the rows that any rank of the node needs; it waits for
    `LoaderClient.begin`. ``content``: of the corpora that this rank has opened; ``bad_blocks``: those that
    the run skips, the same on every rank."""
    first = place.rank - place.local_rank
    ranks_per_replica = job.layout.world // job.layout.dp
    replicas = range(first // ranks_per_replica, (first + place.local_world - 1) // ranks_per_replica + 1)
    rows = (rank_rows(job, replicas[0]).start, rank_rows(job, replicas[-1]).stop)
    spec = LoaderSpec(
        name=_meeting_name(run, first),
        data=job.data,
        sequence=job.model.sequence,
        global_batch=job.train.global_batch,
        seed=job.train.seed,
        rows=(rows,),
        content=content,
        bad_blocks=bad_blocks,
        decides=is_one_node(place),
        events=str(run.events_path.absolute()),
    )
    return LoaderClient(
        spec,
        place.local_rank,
        place.local_world,
        first_step=None,
        on_restart=lambda problem: run.append_event("fault", rank=place.rank, problem=problem),
        patience=job.resilience.patience,
    )


def is_one_node(place: Place) -> bool:
    """Whether all ranks read the same files, so that they find the same blocks bad."""
    return place.local_world == place.world


def validation_guard(run: Run, job: Job, place: Place, bad_blocks: BadBlocks) -> BlockGuard:
    """What this rank does about bad blocks of the held-out text, which it reads itself."""
    policy, most = job.data.on_bad_block, job.data.max_bad_blocks

    def report(event: str, fields: Mapping[str, Any]) -> None:
        run.append_event(event, rank=place.rank, **fields)

    return BlockGuard(policy, most, bad_blocks, decides=is_one_node(place), report=report)


def _meeting_name(run: Run, first_rank: int) -> str:
    """The same on every rank of the node, another for every run and attempt."""
    where = f"{run.path.resolve()}:{os.environ.get('MASTER_PORT', os.getpid())}:{first_rank}"
    return hashlib.blake2s(where.encode(), digest_size=8).hexdigest()
