"""Sampling a small model takes one thread: several take longer to meet than to compute a token."""

import pytest
import torch

from myriad.train.checkpoint_tools.whole_model import set_thread_count


@pytest.mark.parametrize(
    ("parameters", "environment", "threads"),
    [(700_000, {}, 1), (8_000_000_000, {}, 2), (700_000, {"OMP_NUM_THREADS": "2"}, 2)],
)
def test_threads_follow_the_size_of_the_model_and_a_users_setting(
    parameters: int, environment: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("myriad.train.checkpoint_tools.whole_model.control_spinning", lambda threads: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        set_thread_count(parameters)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
