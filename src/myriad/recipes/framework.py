"""Training frameworks by path or name (`myriad.planner.frameworks`), and what else tables name."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from myriad.planner import Accelerator, Cluster, Framework, read_framework, scale_cluster
from myriad.recipes import read_recipe, recipe_names
from myriad.recipes.cluster import find_accelerator, load_cluster

__all__ = ["ReadyRecipes", "load_framework", "load_frameworks"]


def load_framework(name_or_path: str) -> Framework:
    """Return a framework from a file or recipe. Raises `BadInputError`."""

    def load(name: str) -> Mapping[str, Any]:
        return read_recipe("frameworks", name, "--framework")

    return read_framework(name_or_path, load)


@cache
def load_frameworks() -> tuple[Framework, ...]:
    """Return all frameworks that come with Myriad."""
    return tuple(map(load_framework, recipe_names("frameworks")))


@cache
def _row_patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the patterns of rows of published tables that name an accelerator, with its recipe."""
    recipes = {name: read_recipe("accelerators", name, "gpu_type") for name in recipe_names("accelerators")}
    every = ((name, one) for name, tree in recipes.items() for one in tree.get("matches", ()))
    return tuple((re.compile(one), name) for name, one in every)


class ReadyRecipes:
    """The recipes that rows of tables name (`myriad.planner.validation.general_form.Recipes`)."""

    def cluster(self, name: str, accelerators: int) -> Cluster:
        """Return a cluster with so many accelerators. Raises `BadInputError`."""
        return scale_cluster(load_cluster(name), accelerators, "gpus")

    def accelerator(self, gpu_type: str, row: str = "") -> tuple[str, Accelerator]:
        """Return the accelerator that a table names, and its recipe. ``row``: what the row says besides.
        Raises `BadInputError`."""
        stated = (name for pattern, name in _row_patterns() if pattern.search(row))
        return find_accelerator(next(stated, gpu_type))

    def model(self, name: str) -> Mapping[str, Any] | None:
        """Return the keys of a model; ``None``: there is no such recipe."""
        return read_recipe("models", name, "model") if name in recipe_names("models") else None

    def framework(self, name: str) -> Framework:
        """Return a framework. Raises `BadInputError`."""
        return load_framework(name)

    def frameworks(self) -> Sequence[Framework]:
        """Return all frameworks."""
        return load_frameworks()
