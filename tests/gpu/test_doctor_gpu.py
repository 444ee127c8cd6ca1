"""On a healthy GPU the doctor must find nothing, and read what its driver says."""

import pytest
import torch

from myriad.doctor.devices import SmiProvider, check_devices

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from myriad.doctor.diagnosis import evaluate
from myriad.doctor.probes.gpu_probe import check_gpus
from myriad.doctor.probes.rank_probe import train_bits


def test_a_healthy_gpu_is_healthy_and_gives_the_same_bits_twice():
    items = [evaluate(reading, {}) for reading in check_gpus()]
    assert items and [item for item in items if item.verdict != "ok"] == []
    assert train_bits(torch.device("cuda", 0)) == train_bits(torch.device("cuda", 0))


def test_the_driver_is_read():
    states = SmiProvider().states()
    assert len(states) == torch.cuda.device_count() and all("NVIDIA" in state.name for state in states)
    assert not any(reading.problem for reading in check_devices(SmiProvider()))
