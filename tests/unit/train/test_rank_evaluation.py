"""If these break, ranks generate other texts than one process, or batches of them are empty or too large."""

import pytest
import torch

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.evaluation.task_files import Generation, Task, TaskDocument
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig
from myriad.train.rank_evaluation import check_tasks
from myriad.train.task_evaluation import WindowBatches

MODEL = ModelConfig(layers=2, hidden=32, heads=2, sequence=32, vocabulary=64)


def made(length: int) -> list[Task]:
    document = TaskDocument("tasks.jsonl:3", "a prompt", generation=Generation(max_new_tokens=length))
    return [Task("made", "generate_until", [document])]


def test_texts_that_one_process_would_generate_otherwise_are_refused() -> None:
    check_tasks(MODEL, Layout(tp=2), made(31))
    with pytest.raises(BadInputError, match=r"tasks\.jsonl:3: max_gen_toks = 32: below model\.sequence = 32"):
        check_tasks(MODEL, Layout(tp=2), made(32))
    lone = [Task("made", "generate_until", [TaskDocument("tasks.jsonl:1", "a \ud800")])]
    with pytest.raises(BadInputError, match="text that UTF-8 can encode"):
        check_tasks(MODEL, Layout(tp=2), lone)
    scaling = RotaryScaling(kind="longrope", original_sequence=16)
    stretched = MODEL.model_copy(update={"rotary_scaling": scaling})
    with pytest.raises(BadInputError, match="no text to generate in ranks: longrope changes with its length"):
        check_tasks(stretched, Layout(tp=2), made(4))
    check_tasks(stretched, Layout(tp=2), [])


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
