"""torch's random generators of one rank. What Myriad draws itself depends on seed and sample alone and has no
state; a model of the user's own may draw from torch.

They are restored where the same rank of an equally large world goes on; in another world each rank keeps the
generators it has.
"""

import torch

from myriad.model.rectangle import Rectangle

__all__ = ["load_random", "random_rectangle", "write_random"]


def random_rectangle(rank: int, device: torch.device) -> Rectangle:
    """Room for the states of one rank: the host's, then the device's."""
    size = _states(device).numel()
    return Rectangle(f"random.{rank}", (size,), (0,), torch.zeros(size, dtype=torch.uint8))


def _states(device: torch.device) -> torch.Tensor:
    host = torch.random.get_rng_state()
    return torch.cat([host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else host


def write_random(rectangle: Rectangle, device: torch.device) -> None:
    """The states as they are now."""
    rectangle.values.copy_(_states(device))


def load_random(rectangle: Rectangle, was_loaded: bool, device: torch.device) -> None:
    """The generators go on from there."""
    if not was_loaded:
        return
    host_bytes = torch.random.get_rng_state().numel()
    torch.random.set_rng_state(rectangle.values[:host_bytes].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(rectangle.values[host_bytes:].clone(), device)
