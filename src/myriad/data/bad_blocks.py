"""The response to a block of tokens that is not as it was written.

    read a block ── its hash is right ──► its tokens are used
         │ wrong, or the read failed
         └── read once more, past every cache ── right ──► its tokens are used, and a ``reread`` event
                  │ the read failed again: storage is at fault, the attempt ends (the next one tries again)
                  └── wrong again: the block is bad, and there is a ``bad_block`` event
                           ├── data.on_bad_block = stop ──► the run stops
                           └── skip ──► samples in it are replaced

The replaced samples and their replacements follow from the bad blocks alone: not from the rank, the layout,
or the time when a block was found. Several nodes may each hold a copy of the corpus. A bad block that one of
them finds then ends the attempt. The next attempt begins with it on every rank's list, so that ranks never
disagree about it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from myriad.errors import BAD_DATA, NEXT_ATTEMPT_SKIPS, RunFailedError

__all__ = ["BadBlock", "BadBlockError", "BlockGuard", "OnBadBlock", "ReportEvent"]

OnBadBlock = Literal["stop", "skip"]
ReportEvent = Callable[[str, Mapping[str, Any]], None]
"""Type of a function that writes an event, given its name and its fields."""
_MOST_REREADS = 100
"""Largest number of reread events of one process; later ones are not written."""


class BadBlock(NamedTuple):
    """A block, identified by its file as in the job and its first byte."""

    file: str
    offset: int


class BadBlockError(RunFailedError):
    """A block of tokens is not as it was written."""

    def __init__(self, block: BadBlock, message: str, *, is_replaced: bool) -> None:
        """``is_replaced`` says whether samples in the block may be replaced by others."""
        super().__init__(message)
        self.block, self.is_replaced = block, is_replaced


class BlockGuard:
    """The policy of one process that reads a corpus, and its list of bad blocks."""

    def __init__(
        self,
        policy: OnBadBlock = "stop",
        most: int = 0,
        known: Iterable[tuple[str, int]] = (),
        *,
        decides: bool = True,
        report: ReportEvent = lambda event, fields: None,
    ) -> None:
        """Create the policy.

        ``most`` is the number of bad blocks that may be skipped; ``known`` are those of earlier attempts.
        With ``decides``, no other node reads the same samples, so that a new bad block is skipped at once.
        """
        self._policy, self._most, self._decides, self._report = policy, most, decides, report
        self._bad = {BadBlock(*block) for block in known} if policy == "skip" else set[BadBlock]()
        self._num_rereads = 0
        self.step: int | None = None
        """Step whose batch is being read."""

    def check(self, file: str, offset: int) -> None:
        """Raise `BadBlockError` for a block that is known to be bad."""
        if self._bad and (block := BadBlock(file, offset)) in self._bad:
            raise BadBlockError(block, f"{BAD_DATA}{file}, byte {offset}", is_replaced=True)

    def reject(self, file: str, offset: int, size: int) -> BadBlockError:
        """Record a bad block, and return the error to raise."""
        block = BadBlock(file, offset)
        found = f"{file}: the {size} bytes from byte {offset} on are not those that were written"
        skips = self._policy == "skip" and len(self._bad) < self._most
        at = {} if self.step is None else {"step": self.step}
        action = "skip" if skips else "stop"
        self._report(
            "bad_block",
            {"file": file, "offset": offset, "bytes": size, "action": action, "problem": found, **at},
        )
        if not skips:
            return BadBlockError(block, f"{BAD_DATA}{found}; {self._repair_advice()}", is_replaced=False)
        self._bad.add(block)
        return BadBlockError(block, f"{BAD_DATA}{found}; {NEXT_ATTEMPT_SKIPS}", is_replaced=self._decides)

    def _repair_advice(self) -> str:
        if self._policy == "skip":
            return f"data.max_bad_blocks = {self._most} are skipped already; restore the file"
        return "restore the file, or give --data.on-bad-block skip"

    def reread(self, file: str, offset: int, problem: str) -> None:
        """Report that a block was right in the second read."""
        self._num_rereads += 1
        if self._num_rereads <= _MOST_REREADS:
            found = f"{file}: the block at byte {offset} {problem}"
            self._report("reread", {"file": file, "offset": offset, "problem": found})
