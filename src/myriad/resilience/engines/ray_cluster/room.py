"""Room for executors on Ray's machines: bundles of placement groups, never two of a run on one machine.

Those of the nodes are one group, placed together or not at all. Each other (a spare, or a node that has left
its machine) is a group of its own, kept away from machines by their labels.
"""

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["Bundle", "Needs", "Room"]

_MACHINE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Needs:
    """Of a node."""

    cores: int
    gpus: int

    def as_bundle(self) -> dict[str, float]:
        """As Ray has it."""
        return {"CPU": float(self.cores)} | ({"GPU": float(self.gpus)} if self.gpus else {})


@dataclass(frozen=True)
class Bundle:
    """A reservation."""

    group: Any
    index: int
    own: bool
    """Whether the group has no other."""


class Room:
    """What a run has reserved."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self._ray: Any = import_module("ray")
        self._groups: list[Any] = []

    def reserve(self, count: int) -> list[Bundle]:
        """On as many machines, all at once; when there is room."""
        group = self._make(count, None)
        return [Bundle(group, index, own=False) for index in range(count)]

    def reserve_elsewhere(self, machines: Collection[str]) -> Bundle:
        """On none of these; when there is room."""
        return Bundle(self._make(1, {_MACHINE_LABEL: f"!in({','.join(sorted(machines))})"}), 0, own=True)

    def _make(self, count: int, labels: dict[str, str] | None) -> Any:
        group = self._ray.util.placement_group(
            [self.needs.as_bundle()] * count,
            strategy="STRICT_SPREAD",
            bundle_label_selector=None if labels is None else [labels] * count,
        )
        self._groups.append(group)
        return group

    def living(self) -> set[str]:
        """Machines that Ray believes to be well."""
        return {machine["NodeID"] for machine in self._ray.nodes() if machine["Alive"]}

    def machine_of(self, bundle: Bundle) -> str | None:
        """Where it is; ``None``: nowhere yet, or no longer."""
        table = self._ray.util.placement_group_table(bundle.group)
        machine = table.get("bundles_to_node_id", {}).get(bundle.index)
        return machine if machine in self.living() else None

    def scheduling(self, bundle: Bundle) -> dict[str, Any]:
        """Options of a task that is to run there."""
        strategies = import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
        return {"num_cpus": self.needs.cores, "num_gpus": self.needs.gpus, "scheduling_strategy": strategy}

    def release(self, bundle: Bundle) -> None:
        """If that takes no other's."""
        if bundle.own and bundle.group in self._groups:
            self._groups.remove(bundle.group)
            self._ray.util.remove_placement_group(bundle.group)

    def close(self) -> None:
        """All of it."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups = []
