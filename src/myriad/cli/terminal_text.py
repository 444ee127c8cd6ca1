"""Text of others for a terminal: names in files, and what a model says, may hold commands to the terminal."""

__all__ = ["terminal_text"]

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def terminal_text(text: str) -> str:
    """Return the text with its control characters spelled out, except for new lines and tabs."""
    return text.translate(_CONTROLS)
