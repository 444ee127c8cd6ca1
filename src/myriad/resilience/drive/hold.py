"""How long a driver may act on the lease that it has, by its own clock. Pure.

    Redis     lease ├────────── 3 s ──────────┤ then whoever stands by may have it
    driver       asked ├────── 2.7 s ──────┤ then it acts no more, unless it was renewed

The driver counts from before it asked and stops a tenth earlier: so no clock of another machine matters, only
that both run nearly as fast. While nobody stands by nobody can have the lease, so it may act without Redis
for as long as that is away. Who begins to stand by is not let in before this driver has been told:

    renewal n     Redis: somebody stands by            the driver knows, and stops from now on when it is late
    renewal n+1   the driver: I know                   Redis: whoever stands by may have the lease, once free
"""

__all__ = ["Hold"]

_SAFE_RATIO = 0.9
"""Of the lease; the rest is for clocks that do not run alike."""


class Hold:
    """Of one driver on one lease that it has taken."""

    def __init__(self, seconds: float, asked_at: float) -> None:
        self._seconds = seconds
        self._until = asked_at + _SAFE_RATIO * seconds
        self.is_watched = True
        """Somebody else may have it as soon as it is free; until something else is known."""
        self.is_lost = False

    def renewed(self, asked_at: float, *, is_watched: bool) -> None:
        """Redis has said so, asked at that time."""
        self._until = max(self._until, asked_at + _SAFE_RATIO * self._seconds)
        self.is_watched = is_watched

    def lose(self) -> None:
        """Another has it."""
        self.is_lost = True

    def may_act(self, now: float) -> bool:
        """Nobody else can have it."""
        return not self.is_lost and (not self.is_watched or now < self._until)
