"""PyTorch's own ways to train, imported when one is made: FSDP2, DTensor and its pipelines take three
seconds, and with them a process takes longer to fork."""

from typing import Any

from peers.work import Peer, Work

__all__ = ["data_parallel", "pipeline", "tensor_parallel"]


def data_parallel(work: Work, **options: Any) -> Peer:
    """Return DistributedDataParallel or FSDP2 (`peers.data.DataParallel`)."""
    from peers.data import DataParallel

    return DataParallel(work, **options)


def tensor_parallel(work: Work, **options: Any) -> Peer:
    """Return tensor parallelism by DTensor (`peers.tensor.TensorParallel`)."""
    from peers.tensor import TensorParallel

    return TensorParallel(work, **options)


def pipeline(work: Work, **options: Any) -> Peer:
    """Return a pipeline of torch.distributed.pipelining (`peers.pipeline.Pipeline`)."""
    from peers.pipeline import Pipeline

    return Pipeline(work, **options)
