"""Who waited for whom in a window of spans that is exported: from a send to the receive that it ended, from
the last arriver of a collective to the others."""

from typing import TYPE_CHECKING

from myriad.run import Run
from myriad.telemetry.window import Arrow, Window

if TYPE_CHECKING:
    from myriad.telemetry.records import Records

__all__ = ["arrows_of"]

_MOST_ARROWS = 100_000


def arrows_of(run: Run, window: Window) -> list[Arrow]:
    """Of the newest attempt in it; none where the ranks that are there did not run the job's program."""
    import numpy as np

    from myriad.dashboard.insight.arrivals import arrows
    from myriad.dashboard.insight.findings import Findings

    attempt = max(one.attempt for one in window.ranks)
    records: Records = np.concatenate([one.records for one in window.ranks if one.attempt == attempt])
    findings, found = Findings(records, window.names, run.job()), list[Arrow]()
    for step in np.unique(records["step"][records["step"] > 0]).tolist():
        some = arrows(findings.step(step), limit=_MOST_ARROWS - len(found))
        columns = (some.from_rank, some.from_ns, some.to_rank, some.to_ns)
        found += map(Arrow._make, zip(*(each.tolist() for each in columns), strict=True))
        if len(found) >= _MOST_ARROWS:
            break
    return found
