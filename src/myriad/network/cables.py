"""Cables as they are collected while a fabric is built: cable c becomes links 2c and 2c + 1."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from myriad.network.fabric import Fabric, Numbers

__all__ = ["CABLE_BYTES", "Cables", "Vertices"]

Vertices = npt.NDArray[np.int64]

CABLE_BYTES = 256
"""At most, of memory while a fabric is built: two links of 24 bytes, and the arrays they come from."""


@dataclass
class Cables:
    """Collected while a fabric is built; cable c becomes links 2c and 2c + 1."""

    near: list[Vertices] = field(default_factory=list)
    far: list[Vertices] = field(default_factory=list)
    rates: list[Numbers] = field(default_factory=list)

    def add(self, near: Vertices, far: Vertices, bytes_per_second: float | Numbers) -> None:
        """Cables between ``near[i]`` and ``far[i]``, the upper end last."""
        self.near.append(near)
        self.far.append(far)
        self.rates.append(np.broadcast_to(np.asarray(bytes_per_second, dtype=np.float64), near.shape))

    def fabric(
        self,
        name: str,
        num_nodes: int,
        ports_per_node: int,
        tier: npt.NDArray[np.int8],
        latency_seconds: float,
    ) -> Fabric:
        """The whole, checked."""
        near, far, rates = (np.concatenate(column) for column in (self.near, self.far, self.rates))
        both = np.stack([near, far], axis=1)
        return Fabric(
            name=name,
            num_nodes=num_nodes,
            ports_per_node=ports_per_node,
            tier=tier,
            source=both.reshape(-1).astype(np.int32),
            target=both[:, ::-1].reshape(-1).astype(np.int32),
            bytes_per_second=np.repeat(rates, 2),
            latency_seconds=np.full(2 * len(rates), latency_seconds),
        ).check()
