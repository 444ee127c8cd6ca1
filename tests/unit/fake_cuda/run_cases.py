"""``python run_cases.py NAME...``: a line of JSON for each of `step_cases.STEPS`, `LAYERS` and `CAPTURED`:
what was counted, or what went wrong.

A process of its own: the fake driver is loaded before torch, and never unloaded.
"""

import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import fake_library
from step_cases import CAPTURED, LAYERS, STEPS


def _counted(name: str) -> dict[str, Mapping[str, int]]:
    from fake_steps import launches_captured, measure, measure_layer

    if name in STEPS:
        return vars(measure(STEPS[name]))
    if name in CAPTURED:
        return {"launches": launches_captured(CAPTURED[name])}
    launches, moved = measure_layer(LAYERS[name])
    return {"launches": launches, "moved": moved}


def main(*names: str) -> None:
    fake_library.load()
    for name in names:
        try:
            line: dict[str, Any] = _counted(name)
        except Exception as error:
            traceback.print_exc()
            line = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, **line}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
