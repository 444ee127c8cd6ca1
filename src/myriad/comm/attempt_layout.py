"""The changes of one attempt to the job's layout. This module does not import torch.

Ranks are restarted and compute the same global batch in another way. The losses and weights are the same up
to rounding.

    job         dp 3, shares (4, 4, 4)          AttemptLayout()
    slow        dp 3, shares (5, 2, 5)          AttemptLayout(shares=(5, 2, 5))
    node lost   dp 2, shares (6, 6)             AttemptLayout(dp=2, shares=(6, 6))

The decision goes by journal and wire to the ranks, which read it from `ATTEMPT_LAYOUT`.
"""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from myriad.comm.layout import Layout  # a driver starts without pydantic: it starts while ranks have none

__all__ = ["AS_THE_JOB", "ATTEMPT_LAYOUT", "AttemptLayout", "equal_shares"]

ATTEMPT_LAYOUT = "MYRIAD_ATTEMPT_LAYOUT"
"""Environment variable of a rank, in the format of `AttemptLayout.text`. Without it, the attempt has the
job's layout."""


@dataclass(frozen=True)
class AttemptLayout:
    """The values of one attempt that replace the job's; an empty field keeps the job's value."""

    dp: int | None = None
    """Data-parallel replicas, if the attempt has fewer ranks than the job."""
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica."""
    partition: str | None = None
    """Assignment of layers to stages."""

    @property
    def changes(self) -> dict[str, Any]:
        """Keys and values of the layout that differ from the job's."""
        return {key: value for key, value in asdict(self).items() if value not in (None, ())}

    @property
    def text(self) -> str:
        """The JSON text that `parse` reads."""
        return json.dumps(self.changes)

    @staticmethod
    def parse(text: str) -> "AttemptLayout":
        """Parse what `text` returned; an empty text means the job's layout."""
        changes = json.loads(text or "{}")
        return AttemptLayout(**changes | {"shares": tuple(changes.get("shares", ()))})

    def of(self, layout: "Layout") -> "Layout":
        """Return the layout of the attempt's ranks. If ``dp`` changes, the job's own shares no longer apply,
        and all replicas shard the state where the groups of ``shard_group`` do not divide them."""
        other: dict[str, Any] = {"shares": None} if self.dp is not None else {}
        if self.dp is not None and layout.shard_group is not None and self.dp % layout.shard_group:
            other["shard_group"] = None
        return layout.model_copy(update=other | self.changes)


AS_THE_JOB = AttemptLayout()


def equal_shares(num_micro_batches: int, dp: int) -> tuple[int, ...]:
    """Divide micro-batches as equally as possible, the larger numbers first."""
    each, more = divmod(num_micro_batches, dp)
    return (each + 1,) * more + (each,) * (dp - more)
