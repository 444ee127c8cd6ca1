"""The losses of single tokens, which the last layer writes while it evaluates a batch.

Training and validation need the sum of the losses alone. An evaluation gives each batch a record; layers and
schedules may then compute the batch's rows in any order and in parts.

Legend: B rows of the batch, S sequence, P positions of a part.
"""

import torch

from myriad.kernels.token_losses import TokenLosses

__all__ = ["TokenRecord"]


class TokenRecord:
    """The loss of each target of a batch and the likeliest token in its place, ``[B, S]``. Targets without a
    loss have 0, and count as likeliest.

    Ranks without the last layer keep these values."""

    def __init__(self, num_rows: int, sequence: int, device: torch.device) -> None:
        self.losses = torch.zeros((num_rows, sequence), device=device)
        self.is_likeliest = torch.ones((num_rows, sequence), dtype=torch.bool, device=device)
        self.likeliest = torch.zeros((num_rows, sequence), dtype=torch.int64, device=device)

    def places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the places ``[B, P]`` of these positions ``[P]`` of some rows."""
        return rows[:, None] * self.losses.shape[1] + positions

    def write(self, places: torch.Tensor, found: TokenLosses) -> None:
        """Write the losses of the targets at these places ``[T]``."""
        self.losses.view(-1)[places] = found.losses
        self.is_likeliest.view(-1)[places] = found.is_likeliest
        self.likeliest.view(-1)[places] = found.likeliest
