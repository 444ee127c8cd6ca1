"""Frameworks of the published tables that have columns of their own, by their files.

Their values, with the source of each, are in `recipes/frameworks`: data that the planner reads without the
room above it. Values that a paper leaves open are open there too, and one rule fixes them for all rows of all
tables (`published_rows`).
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from myriad.config import parse_toml
from myriad.planner.frameworks import Framework, read_framework

__all__ = [
    "DEEPSPEED_0_4_2",
    "LLAMA_3",
    "MEGASCALE",
    "MEGATRON_2_4",
    "MEGATRON_2021",
    "MEGATRON_2022",
    "MEGATRON_2022_SEQUENCE",
    "MEGATRON_2023",
    "MEGATRON_CORE",
]


@cache
def _file(name: str) -> Mapping[str, Any]:
    path = resources.files("myriad") / "recipes" / "frameworks" / f"{name}.toml"
    return parse_toml(path.read_text(encoding="utf-8"))


def _published(name: str) -> Framework:
    return read_framework(name, _file)


MEGATRON_2021 = _published("megatron-lm-2021")
MEGATRON_2_4 = _published("megatron-lm-2.4")
MEGATRON_2022 = _published("megatron-lm-2022")
MEGATRON_2022_SEQUENCE = _published("megatron-lm-2022-sequence")
MEGATRON_2023 = _published("megatron-lm-2023")
"""Its code has `hides_input_grad_comm` as well, but that would make the predictions of its rows faster still.
The wait that the published times contain instead is unknown."""
MEGASCALE = _published("megascale")
MEGATRON_CORE = _published("megatron-core-0.8")
LLAMA_3 = _published("llama-3")
DEEPSPEED_0_4_2 = _published("deepspeed-0.4.2")
