"""If these break, ranks generate other texts than one process, or batches of them are empty or too large."""

import pytest

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.evaluation.task_files import Document, Generation, Task
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig
from myriad.train.rank_evaluation import check_tasks

MODEL = ModelConfig(layers=2, hidden=32, heads=2, sequence=32, vocabulary=64)


def made(length: int) -> list[Task]:
    document = Document("tasks.jsonl:3", "a prompt", generation=Generation(max_new_tokens=length))
    return [Task("made", "generate_until", [document])]


def test_texts_that_one_process_would_generate_otherwise_are_refused() -> None:
    check_tasks(MODEL, Layout(tp=2), made(31))
    with pytest.raises(BadInputError, match=r"tasks\.jsonl:3: max_gen_toks = 32: below model\.sequence = 32"):
        check_tasks(MODEL, Layout(tp=2), made(32))
    scaling = RotaryScaling(kind="longrope", original_sequence=16)
    stretched = MODEL.model_copy(update={"rotary_scaling": scaling})
    with pytest.raises(BadInputError, match="no text to generate in ranks: longrope changes with its length"):
        check_tasks(stretched, Layout(tp=2), made(4))
    check_tasks(stretched, Layout(tp=2), [])
