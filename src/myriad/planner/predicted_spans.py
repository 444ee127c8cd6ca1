"""A simulated iteration as spans of a run: the same names, by rank number, from the iteration's start.

Replicas that were simulated as one are there once, as the first of them; of tensor-parallel ranks, which do
the same, the first.
"""

from collections import defaultdict
from collections.abc import Mapping

from myriad.comm.layout import Layout
from myriad.planner.simulator import Prediction
from myriad.program.actions import chunk_of
from myriad.telemetry.spans import Span

__all__ = ["predicted_spans"]


def predicted_spans(prediction: Prediction, layout: Layout) -> Mapping[int, list[Span]]:
    """By rank number, in order. What a rank does before others have finished the last iteration begins below
    0."""
    start = max(span.start + span.duration for span in prediction.spans) - prediction.seconds
    taken = {span.replica for span in prediction.spans}
    first = next(replica for replica in range(layout.dp + 1) if replica not in taken)
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in prediction.spans:
        replica = first if span.replica < 0 else span.replica
        rank = (replica * layout.pp + span.rank) * layout.cp * layout.tp * layout.ep
        action, begin = span.action, span.start - start
        chunk = chunk_of(action, prediction.program.num_stages)
        found[rank].append(
            Span(str(action.kind), action.stage, action.micro_batch, begin, span.duration, chunk)
        )
    return dict(sorted(found.items()))
