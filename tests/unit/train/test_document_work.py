"""If these fail, a rank with longer documents than others counts as slow."""

import numpy as np
import pytest

from myriad.data.windows import BatchWords, attended_pairs
from myriad.job import load_job
from myriad.train.metrics import document_work


@pytest.mark.parametrize("window", ["off", "16"])
def test_times_of_documents_are_compared_by_their_work(window: str) -> None:
    keys = ["data.documents=packed", f"model.window={window}", "train.global_batch=4", "layout.dp=2"]
    job = load_job("tiny", keys)
    rows = [[64], [40, 24], [16] * 4, [8] * 8]  # replica 0 has the first two
    every = np.concatenate([np.array(row) for row in rows])
    totals = [int(attended_pairs(every, one).sum()) for one in (None, job.model.window)]
    words = BatchWords(0, job.targets, job.targets, *totals)
    heavy, light = (document_work(job, words, own) for own in (rows[:2], rows[2:]))
    assert heavy > 1 > light and heavy + light == pytest.approx(2.0)
    assert document_work(job, words, rows) == pytest.approx(1.0)
