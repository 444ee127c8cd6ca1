"""What one attempt of a run may change of the job's layout: ranks are started anew, and compute the same
global batch otherwise. The losses and weights are the same up to rounding. No torch here.

    job         dp 3, shares (4, 4, 4)          AttemptLayout()
    slow        dp 3, shares (5, 2, 5)          AttemptLayout(shares=(5, 2, 5))
    node lost   dp 2, shares (6, 6)             AttemptLayout(dp=2, shares=(6, 6))

It goes from the decisions by journal and wire to the ranks, which find it in `ATTEMPT_LAYOUT`.
"""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myriad.comm.layout import Layout  # a driver starts without pydantic: it starts while ranks have none

__all__ = ["AS_THE_JOB", "ATTEMPT_LAYOUT", "AttemptLayout", "equal_shares"]

ATTEMPT_LAYOUT = "MYRIAD_ATTEMPT_LAYOUT"
"""In a rank's environment, as `AttemptLayout.text` has it; without it the job's layout is the attempt's."""


@dataclass(frozen=True)
class AttemptLayout:
    """What is empty is the job's."""

    dp: int | None = None
    """Data-parallel replicas: so an attempt has fewer ranks than the job."""
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica."""
    partition: str | None = None
    """Layers to stages."""

    @property
    def changes(self) -> dict[str, Any]:
        """Key of the layout to its value, of what is not the job's."""
        return {key: value for key, value in asdict(self).items() if value not in (None, ())}

    @property
    def text(self) -> str:
        """For `parse`."""
        return json.dumps(self.changes)

    @staticmethod
    def parse(text: str) -> "AttemptLayout":
        """Of what `text` gave; of nothing: the job's."""
        changes = json.loads(text or "{}")
        return AttemptLayout(**changes | {"shares": tuple(changes.get("shares", ()))})

    def of(self, layout: "Layout") -> "Layout":
        """The layout that the ranks of the attempt have. Shares of other replicas say nothing of these."""
        other = {"shares": None} if self.dp is not None else {}
        return layout.model_copy(update=other | self.changes)


AS_THE_JOB = AttemptLayout()


def equal_shares(num_micro_batches: int, dp: int) -> tuple[int, ...]:
    """As equal as whole numbers are, the larger first."""
    each, more = divmod(num_micro_batches, dp)
    return (each + 1,) * more + (each,) * (dp - more)
