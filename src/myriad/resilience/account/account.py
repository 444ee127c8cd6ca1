"""What became of a real run's time, as values: the ledger, its faults and its attempts (`accounting`)."""

from dataclasses import dataclass, field

from myriad.resilience.account.ledger import Ledger

__all__ = ["Account", "Attempt", "FaultSeen"]


@dataclass(kw_only=True)
class FaultSeen:
    """What the run told of a fault, and what became of it; times are in seconds since the epoch."""

    told: float
    problem: str
    cause: str = ""
    """As the driver has it; "": told by who stores, loads or keeps, and training went on."""
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    detected_seconds: float | None = None
    """From the last sign of who is blamed; ``None``: nothing stood still."""
    ending_seconds: float | None = None
    """Until all ranks were gone and a new attempt was decided."""
    starting_seconds: float | None = None
    """From then on until its ranks were about to load."""
    loading_seconds: float | None = None
    """Until they trained."""
    steps_lost: int | None = None
    """Done, and to be done again; of faults that one start repairs, with the first."""

    @property
    def back_seconds(self) -> float | None:
        """From told until all ranks trained again; ``None``: they did not."""
        parts = (self.ending_seconds, self.starting_seconds, self.loading_seconds)
        return None if None in parts else sum(part or 0.0 for part in parts)


@dataclass(kw_only=True)
class Attempt:
    """One start of the ranks."""

    number: int
    began: float
    world: int = 0
    """Ranks; 0: nobody told."""
    resumed_from: int = 0
    last_step: int | None = None
    """That it finished; ``None``: none."""
    ended: str = ""
    """By what; "": it has not."""


@dataclass
class Account:
    """Of one run; ``ledger`` counts from ``began``."""

    began: float
    ledger: Ledger = field(default_factory=Ledger)
    faults: list[FaultSeen] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    steps: int = 0
    """Done, and not lost, by their numbers."""
    steps_without_line: int = 0
    """Steps among ``steps_done`` that have no line in metrics.jsonl."""
    steps_lost: int = 0
    tokens: int = 0
    """Of the steps that count."""
    running: bool = False

    @property
    def effective_ratio(self) -> float:
        """Effective training time ratio (ETTR)."""
        return self.ledger.effective_ratio

    @property
    def meant_ratio(self) -> float:
        """The same of the time that nobody wanted it to stand."""
        seconds = self.ledger.seconds()
        meant = self.ledger.wall_seconds - seconds["planned"]
        return seconds["training"] / meant if meant > 0 else 1.0

    @property
    def goodput(self) -> float:
        """Tokens that count, per second of the wall time."""
        return self.tokens / self.ledger.wall_seconds if self.ledger.wall_seconds else 0.0
