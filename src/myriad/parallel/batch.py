"""What the ranks of one replica train on in one iteration."""

from dataclasses import dataclass

import torch

from myriad.kernels.documents import Documents
from myriad.model.token_record import TokenRecord

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's share of one iteration; rows in micro-batch order."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    """Index of each row's sample in the whole run, int64."""
    documents: Documents | None = None
    """Documents in each row; ``None``: each row is one sequence."""
    digest: int = 0
    """Hash of the rows, below 2^64: the sum of the rows' own hashes (`myriad.data.windows.digest_rows`)."""
    record: TokenRecord | None = None
    """Where an evaluation records the loss of each target; ``samples`` are then the record's rows."""

    def rows(self, start: int, stop: int) -> "Batch":
        """Return some of the rows."""
        inputs, targets, samples = (one[start:stop] for one in (self.inputs, self.targets, self.samples))
        documents = None if self.documents is None else self.documents.rows(start, stop)
        return Batch(inputs, targets, samples, documents, self.digest, self.record)
