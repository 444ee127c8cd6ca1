"""The wall time of a run as one bar: a colour for each class of the ledger, the same in every picture."""

from collections.abc import Sequence

from myriad.reports.charts.svg import box
from myriad.supervise.accounting.ledger import Kind

__all__ = ["COLOURS", "ledger_bar"]

COLOURS: dict[Kind, str] = {
    "training": "#3a8f5c",
    "lost": "#b3403a",
    "saving": "#e8c547",
    "validating": "#87c7d1",
    "checking": "#4b3d50",
    "slow": "#8f7fc9",
    "detecting": "#1f5fa8",
    "diagnosing": "#348495",
    "starting": "#96b4ff",
    "restarting": "#b07c1e",
    "planned": "#9fb3a4",
    "waiting": "#6b6b6b",
    "person": "#d78bb0",
}
_WIDTH, _HEIGHT = 1000.0, 34.0


def ledger_bar(shares: Sequence[tuple[Kind, float, float]]) -> str:
    """Draw one bar of classes side by side; ``shares``: class, seconds, ratio of the wall time."""
    parts, x = [], 0.0
    for kind, seconds, share in shares:
        width = share * _WIDTH
        parts.append(
            box(x, 0, max(width, 0.5), _HEIGHT, COLOURS[kind], f"{kind}: {seconds:.2f} s, {share:.2%}")
        )
        x += width
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
    head += 'preserveAspectRatio="none" role="img" aria-label="where the time went">'
    return "\n".join([head, *parts, "</svg>"])
