"""If these break: QK-clip sees other scores than attention computes."""

import pytest
import torch

from myriad.kernels import score_maxima
from myriad.kernels.documents import Documents


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_causal_scores_of_each_head(
    window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of few queries, as if memory held no more."""
    monkeypatch.setattr(score_maxima, "_BLOCK_BYTES", 4 * 2 * 4 * 10 * 3)
    q, k = torch.randn(2, 10, 4, 8), torch.randn(2, 10, 2, 8)
    lengths = [[4, 6], [10]]
    positions = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    found = torch.full((4,), -torch.inf)
    documents = Documents(positions, lengths) if packed else None
    score_maxima.add_largest_scores(found, q, k, window, 0.5, documents)
    expected = [-torch.inf] * 4
    for row in range(2):
        for query in range(10):
            start = query - int(positions[row, query]) if packed else 0
            for key in range(max(start, query - (window or 10) + 1), query + 1):
                for head in range(4):
                    score = float(q[row, query, head] @ k[row, key, head // 2]) * 0.5
                    expected[head] = max(expected[head], score)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
