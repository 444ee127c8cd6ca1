"""How much of attention packed documents leave, for predictions: `AttendedShares` of a job's corpora.

The lengths of documents are in the index of a prepared corpus, which a prediction reads where it is a folder
here. Elsewhere, and for text that is streamed, full windows are counted, and the answer says so.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from myriad.data.config import DataConfig
from myriad.planner import AttendedShares

if TYPE_CHECKING:
    from myriad.data.windows import PackedWindows
    from myriad.job import Job

__all__ = ["attended_note", "attended_shares"]


def attended_shares(job: "Job") -> AttendedShares:
    """Return the shares of query-key pairs that the documents of a job attend to; all where they are joined,
    or where their lengths are not known. Raises `BadInputError` for a damaged corpus."""
    if not _is_known(job.data):
        return AttendedShares()
    return _read_shares(job.data, job.model.sequence, job.model.window)


@lru_cache(maxsize=8)
def _read_shares(data: DataConfig, sequence: int, window: int | None) -> AttendedShares:
    from myriad.data.corpus_opening import open_corpora
    from myriad.data.windows import PackedWindows

    corpora = open_corpora(data, sequence)
    packed = [windows for windows in corpora.windows if isinstance(windows, PackedWindows)]
    pairs = list(zip(corpora.weights, packed, strict=True))

    def mean(window: int | None) -> float:
        shares = (weight * _share(windows, sequence, window) for weight, windows in pairs)
        return sum(shares) / sum(corpora.weights)

    return AttendedShares(mean(None), mean(window))


def _is_known(data: DataConfig) -> bool:
    """Return whether the lengths of the documents can be read here."""
    from myriad.data.corpus_opening import EMBEDDED
    from myriad.data.text_names import is_streamed
    from myriad.system.remote_urls import is_url

    if data.documents != "packed":
        return False
    names = [share.path for share in data.mixture] or [data.corpus]
    return all(
        name != EMBEDDED and not is_streamed(name) and not is_url(name) and Path(name).expanduser().is_dir()
        for name in names
    )


def _share(windows: "PackedWindows", sequence: int, window: int | None) -> float:
    """Return the pairs of one corpus over those of windows with one document each."""
    import numpy as np

    from myriad.data.windows import attended_pairs

    full = int(attended_pairs(np.array([sequence]), window)[0])
    return float(attended_pairs(windows.packing.lengths, window).sum()) / (windows.count * full)


def attended_note(job: "Job", shares: AttendedShares) -> str | None:
    """Return a sentence for an answer about a job with packed documents; ``None`` for another."""
    if job.data.documents != "packed":
        return None
    if shares == AttendedShares():
        return "attention is counted for full windows: the lengths of the packed documents are not known here"
    return f"packed documents attend to {shares.whole:.1%} of the pairs of full windows"
