"""Watches the snapshot server of a node from its agent, so that a server that is stopped or hung is noticed
while no rank asks it anything (`myriad.checkpoint.keeper_watch`). Each case is an event.
"""

import asyncio
import logging

from myriad.checkpoint.keeper_start import node_keeper
from myriad.checkpoint.keeper_watch import ServerWatch
from myriad.resilience.drive.scribe import Scribe
from myriad.run import Run

__all__ = ["watch_snapshot_server"]

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


async def watch_snapshot_server(run: Run, node: int) -> None:
    """Runs until it is cancelled."""
    watch, scribe = ServerWatch(node_keeper(run.path)), Scribe()
    while True:
        if (found := watch.look()) is not None:
            _LOG.warning("%s", found.problem)
            scribe.enter_event(run, "fault", node=node, problem=found.problem)
        await asyncio.sleep(_LOOK_SECONDS)
