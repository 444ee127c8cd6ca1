"""Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Without torch.

    x [H] --down--> [query latent | key/value latent | shared key part]      whole on every rank
                     query latent      --norm, up--> heads' queries   [key part | rotated part]
                     key/value latent  --norm, up--> heads' keys and values   [key part | value]
                     shared key part   --rotated---> the rotated part of every head's key

Without a query latent, the queries are a product of x itself.
"""

from typing import NamedTuple

__all__ = ["LatentShape"]


class LatentShape(NamedTuple):
    """The widths of latents and heads."""

    query_rank: int | None
    """Width of the query latent; ``None``: there is none."""
    key_value_rank: int
    """Width of the latent of keys and values."""
    plain: int
    """Width of the part of a head's query and key that is not rotated."""
    rotated: int
    """Width of the rotated part, whose key all heads share."""
    value: int
    """Width of a head's value."""

    @property
    def head(self) -> int:
        """Width of a head's query or key."""
        return self.plain + self.rotated

    @property
    def normed(self) -> int:
        """Number of values of a token that are normalized: the widths of its latents."""
        return (self.query_rank or 0) + self.key_value_rank

    @property
    def down_rows(self) -> int:
        """Rows of the down projection, which every rank holds whole."""
        return self.normed + self.rotated

    @property
    def num_latents(self) -> int:
        """Number of latents of a token."""
        return 1 if self.query_rank is None else 2

    def head_elements(self, hidden: int) -> int:
        """Return the elements of one head's rows of the matrices that give queries, keys and values."""
        return self.head * (self.query_rank or hidden) + (self.plain + self.value) * self.key_value_rank
