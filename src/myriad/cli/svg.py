"""Words of a picture, as the charts of all commands write them."""

from html import escape

__all__ = ["text"]


def text(x: float, y: float, words: str, anchor: str = "start", *, size: int = 12, ink: str = "#444") -> str:
    """An SVG element; ``anchor``: which end of the words is at ``x``."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{ink}">{escape(words)}</text>'
