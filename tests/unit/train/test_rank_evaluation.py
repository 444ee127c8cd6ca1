"""If these break, ranks fail at a prompt, or batches of windows are empty or too large."""

import pytest
import torch

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.evaluation.task_files import Task, TaskDocument
from myriad.model.config import ModelConfig
from myriad.train.rank_evaluation import check_tasks
from myriad.train.task_evaluation import WindowBatches

MODEL = ModelConfig(layers=2, hidden=32, heads=2, sequence=32, vocabulary=64)


def test_prompts_that_cannot_be_sent_to_ranks_are_refused() -> None:
    lone = [Task("made", "generate_until", [TaskDocument("tasks.jsonl:1", "a \ud800")])]
    with pytest.raises(BadInputError, match="text that UTF-8 can encode"):
        check_tasks(MODEL, Layout(tp=2), lone)


@pytest.mark.parametrize("num_windows", [1, 3, 4, 5, 11])
def test_replicas_share_all_windows_of_a_short_batch(num_windows: int) -> None:
    found: list[int] = []
    for replica in (0, 1):
        rows = range(2 * replica, 2 * replica + 2)
        batches = WindowBatches(32, 4, rows, torch.device("cpu"), num_replicas=2)
        for start in range(0, num_windows, 4):
            own = batches.rows_from(start, num_windows)
            assert 1 <= len(own) <= 2
            found += own
    left = num_windows % 4
    assert sorted(found) == list(range(num_windows + (left % 2))), "each once, and padding for equal shares"
