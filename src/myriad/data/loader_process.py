"""The loader process itself: ``python -m myriad.data.loader_process DESCRIPTOR``, the specification as first
line of input.

No torch, no threads. Further input only wakes it, and the end of input ends it. It sleeps when all slots are
full.
"""

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from myriad.data.corpus import Corpora, open_corpora, read_batch
from myriad.data.guard import BlockGuard
from myriad.data.loader import CHANGED_WHILE_READ, LoaderSpec
from myriad.data.ring import Ring
from myriad.data.sampler import DataPosition, Sampler
from myriad.errors import BadInputError, MyriadError
from myriad.jsonl import LineFile

__all__ = ["main"]

_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 0.0005, 0.01
_INPUT = 0


def main() -> int:
    """Fills the ring until its owner is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the ranks, which may still save with our batches
    ring = Ring(int(sys.argv[1]))
    owner = os.getppid()
    try:
        spec = LoaderSpec.model_validate_json(_read_line())
        cache = None if spec.cache is None else Path(spec.cache)
        guard = _guard(spec)
        corpora = open_corpora(spec.data, spec.sequence, spec.split, cache, guard)
        if corpora.num_samples == 0:
            raise BadInputError("data", spec.split, "no held-out text as long as one sample")
        if spec.content not in (None, corpora.content):
            allowed = f"the corpus that this run began to read: {CHANGED_WHILE_READ}"
            raise BadInputError("data", ", ".join(one.name for one in corpora.corpora), allowed)
        _serve(ring, spec, corpora, owner, guard)
    except MyriadError as error:
        ring.fail(str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        ring.fail(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _guard(spec: LoaderSpec) -> BlockGuard:
    """What is done about bad blocks; what is found is an event of the run."""
    lines = None if spec.events is None else LineFile(Path(spec.events), marks_late=True)

    def report(event: str, fields: Mapping[str, Any]) -> None:
        if lines is not None:
            lines.append({"time": time.time(), "event": event, **fields})

    data = spec.data
    return BlockGuard(
        data.on_bad_block, data.max_bad_blocks, spec.bad_blocks, decides=spec.decides, report=report
    )


def _serve(ring: Ring, spec: LoaderSpec, corpora: Corpora, owner: int, guard: BlockGuard) -> None:
    sampler, sleep = corpora.sampler(spec.seed), _SHORTEST_SLEEP_SECONDS
    while os.getppid() == owner:
        step = ring.next_to_fill()
        slot = None if step is None else ring.begin(step)
        if step is not None and slot is not None:
            position = DataPosition(spec.global_batch, ring.first_sample)
            guard.step = step + 1
            _fill(slot, position.samples_before(step), spec, corpora, sampler)
            ring.commit(step)
            sleep = _SHORTEST_SLEEP_SECONDS
        elif not _sleep(sleep):
            return
        else:
            sleep = min(2 * sleep, _LONGEST_SLEEP_SECONDS)


def _fill(slot: NDArray[np.int32], first: int, spec: LoaderSpec, corpora: Corpora, sampler: Sampler) -> None:
    """``first``: the first sample of the step."""
    filled = 0
    for start, stop in spec.rows:
        rows = slot[filled : filled + stop - start]
        read_batch(corpora, sampler, range(first + start, first + stop), rows)
        filled += stop - start


def _sleep(seconds: float) -> bool:
    """Until the owner calls or the time is over (other readers cannot call). False: the owner is gone."""
    if select.select([_INPUT], [], [], seconds)[0]:
        return os.read(_INPUT, 65536) != b""
    return True


def _read_line() -> bytes:
    """The first line of input; calls that came with it are dropped."""
    line = b""
    while b"\n" not in line:
        block = os.read(_INPUT, 65536)
        if not block:
            raise BadInputError("input", line, "the specification of a loader, as one line of JSON")
        line += block
    return line.partition(b"\n")[0]


if __name__ == "__main__":
    sys.exit(main())
