"""What a rank looks after before its first step, so that GPUs do not wait for each other for ever."""

import os

import torch

from myriad.parallel.runtime import Batch
from myriad.program.device_needs import DeviceJob, check_device_job, queues_in

__all__ = ["blank_batch", "check_on_device"]


def check_on_device(device: torch.device, job: DeviceJob) -> None:
    """Refuse programs that are not proved free of deadlock on this rank's device. Raises `BadInputError`."""
    if device.type == "cuda" and job.shape.pp > 1:
        check_device_job(job, queues_in(os.environ, job.shape, job.overlap))


def blank_batch(sample: Batch, device: torch.device) -> Batch:
    """Zeros of the shapes and types of ``sample``, for `Engine.warm_up`."""
    tensors = (sample.inputs, sample.targets, sample.samples)
    return Batch(*(torch.zeros(one.shape, dtype=one.dtype, device=device) for one in tensors))
