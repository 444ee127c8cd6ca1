"""A ledger as a picture: a colour for each class of time, everywhere the same, and the bar they make."""

from collections.abc import Sequence
from html import escape

from myriad.resilience.account.ledger import Kind

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
    "restarting": "#b07c1e",
    "planned": "#9fb3a4",
    "waiting": "#6b6b6b",
    "person": "#d78bb0",
}
_WIDTH, _HEIGHT = 1000.0, 34.0


def ledger_bar(shares: Sequence[tuple[Kind, float, float]]) -> str:
    """One SVG: class, seconds and share of the wall time, side by side."""
    parts, x = [], 0.0
    for kind, seconds, share in shares:
        width = share * _WIDTH
        hint = escape(f"{kind}: {seconds:.2f} s, {share:.2%}")
        where = f'x="{x:.2f}" y="0" width="{max(width, 0.5):.2f}" height="{_HEIGHT:g}"'
        parts.append(f'<rect {where} fill="{COLOURS[kind]}"><title>{hint}</title></rect>')
        x += width
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
    head += 'preserveAspectRatio="none" role="img" aria-label="where the time went">'
    return "\n".join([head, *parts, "</svg>"])
