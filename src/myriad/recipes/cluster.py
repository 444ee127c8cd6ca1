"""Clusters by path, name or size, with accelerators by name and changes on top.

    load_cluster("megascale-256xa100", ["links.ib=200Gbps", "nodes=64"])
    load_cluster("256xb200")                                              256 of them in their usual servers

A change is a key of the file and its value. ``links.network=RATE`` and ``links.node=RATE`` (also ``links.ib``
and ``links.nvlink``) set a link's rate: of one network port, of one accelerator inside its node.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from myriad.config import explain, parse_override, set_dotted
from myriad.errors import BadInputError
from myriad.planner import Accelerator, Cluster, scale_cluster, usual_server
from myriad.recipes import read_recipe, recipe_names
from myriad.units import parse_rate

__all__ = ["find_accelerator", "load_cluster"]

_RATES = {"links.ib": "network", "links.nvlink": "node"}
_RATES |= {f"links.{level}": level for level in ("node", "network", "spine")}


def load_cluster(name_or_path: str, changes: Sequence[str] = ()) -> Cluster:
    """A cluster from a file, a recipe, or a number of accelerators, with ``key=value`` changes, checked.
    Raises `BadInputError`."""
    tree = _counted(name_or_path) or read_recipe("clusters", name_or_path, "--cluster")
    others = []
    for change in changes:
        dotted, value = parse_override(change)
        for alias in ("links.ib.", "links.nvlink."):
            if dotted.startswith(alias):
                dotted = f"links.{_RATES[alias[:-1]]}.{dotted.removeprefix(alias)}"
        if dotted in _RATES and not isinstance(value, dict):
            others.append((dotted, value))
        else:
            set_dotted(tree, dotted, value)
    _expand_accelerator(tree)
    for dotted, value in others:
        _set_rate(tree, dotted, value)
    try:
        return Cluster.model_validate(tree).check()
    except ValidationError as error:
        raise _as_bad_input(name_or_path, _worst(error.errors())) from None


def _counted(name: str) -> dict[str, Any] | None:
    """Return the tree of a cluster that is given as ``256xb200``; ``None``: it is given otherwise."""
    given = re.fullmatch(r"(\d+)x([A-Za-z][\w-]*)", name)
    if given is None:
        return None
    try:
        server = usual_server(name, find_accelerator(given[2])[1])
        return scale_cluster(server, int(given[1])).model_dump(exclude_none=True)
    except BadInputError as error:
        raise BadInputError("--cluster", name, error.allowed) from None


def find_accelerator(name: str) -> tuple[str, Accelerator]:
    """Return the accelerator with this name, and that of its recipe: ``A100-SXM-40GB``, ``H100``, or the
    start of the name of one product. Raises `BadInputError`."""
    wanted = re.sub(r"[ _]", "-", name.strip().lower())
    names = recipe_names("accelerators")
    found = [one for one in names if f"{one}-".startswith(f"{wanted}-")]  # H20 is no H200
    found = found or [one for one in names if one.startswith(wanted)]
    if len({one.partition("-")[0] for one in found}) != 1:
        raise BadInputError("gpu_type", name, f"one of {', '.join(found or names)}")
    return found[-1], Accelerator.model_validate(read_recipe("accelerators", found[-1], "gpu_type"))


def _worst(errors: list[ErrorDetails]) -> ErrorDetails:
    """Return the first error; an unknown key before a missing one, as it may be the missing key, misspelt."""
    return next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])


def _as_bad_input(name_or_path: str, error: ErrorDetails) -> BadInputError:
    where, value = error["loc"], error["input"]
    message = explain(error)
    if error["type"] == "extra_forbidden":
        message = f"unknown key; {_known_keys(where)}"
    elif error["type"] == "model_type":
        message = f"is a section; {_known_keys((*where, ''))}"
    elif error["type"] == "missing":
        value, message = None, "needed"
    key = ".".join(map(str, where))
    return BadInputError(f"{name_or_path}: {key}", value, message)


def _known_keys(where: tuple[int | str, ...]) -> str:
    """Beside the last of them: the nearest, or all there are."""
    section: Any = Cluster
    for name in where[:-1]:
        if isinstance(name, str):
            section = _config_of(section.model_fields[name].annotation)
    prefix = "".join(f"{name}." for name in where[:-1])
    near = difflib.get_close_matches(str(where[-1]), section.model_fields, 1, 0.7)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"there are {', '.join(prefix + name for name in section.model_fields)}"


def _config_of(annotation: Any) -> Any:
    """The config in ``Link | None`` or ``tuple[NodeLinks, ...]``."""
    inner = [part for part in get_args(annotation) if hasattr(part, "model_fields")]
    return inner[0] if inner else annotation


def _expand_accelerator(tree: dict[str, Any]) -> None:
    """``accelerator = "name"`` or ``accelerator.recipe = "name"`` become its values, own keys on top."""
    given = tree.get("accelerator")
    if isinstance(given, str):
        given = {"recipe": given}
    if isinstance(given, dict) and "recipe" in given:
        own = {key: value for key, value in given.items() if key != "recipe"}
        tree["accelerator"] = read_recipe("accelerators", str(given["recipe"]), "accelerator") | own


def _set_rate(tree: dict[str, Any], dotted: str, value: object) -> None:
    level = _RATES[dotted]
    link = tree.get("links", {}).get(level)
    if link is None:
        known = ", ".join(f"links.{name}" for name in tree.get("links", {}))
        allowed = (
            f"the cluster has no such link, only {known}; a new one is given whole: "
            f"links.{level}={{bytes_per_second=25e9, latency_seconds=1e-5}}"
        )
        raise BadInputError(dotted, value, allowed)
    if isinstance(value, int | float):
        raise BadInputError(dotted, value, "a rate with its unit: 200Gbps, 25GB/s")
    try:
        rate = parse_rate(value) / 8
    except ValueError as error:
        raise BadInputError(dotted, value, str(error).partition(": ")[2]) from None
    if level != "node":
        ports, accelerators = tree.get("nics_per_node"), int(tree["accelerators_per_node"])
        rate *= (accelerators if ports is None else int(ports)) / accelerators
    link["bytes_per_second"] = rate
