"""Strict JSON on standard output: non-finite numbers are null, because JSON has no NaN and no Infinity."""

import json
import math
from typing import Any

import typer

__all__ = ["print_json"]


def print_json(value: Any) -> None:
    """Print one value on one line."""
    typer.echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
