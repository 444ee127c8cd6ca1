"""If these break: scores on tasks are shown for steps that a resumed run took back, or not at all."""

from typing import Any

from myriad.run.score_history import score_histories


def evaluation(step: object, **scores: float | None) -> dict[str, Any]:
    return {
        "event": "evaluation",
        "step": step,
        "scores": {f"word/{name}": value for name, value in scores.items()},
        "standard_errors": {"word/acc": 0.1},
        "documents": {"word": 3},
    }


def test_a_resumed_run_replaces_the_scores_of_later_steps() -> None:
    events = [
        evaluation(2, acc=0.2, gone=1.0),
        evaluation(4, acc=0.4, gone=1.0),
        evaluation(6, acc=0.6),
        evaluation(4, acc=None),
        {"event": "evaluation", "step": None},
        {"event": "checkpoint", "step": 4},
        evaluation(8, acc=0.8, perplexity=9.0),
    ]
    acc, perplexity = score_histories(events)
    assert (acc.name, acc.num_documents) == ("word/acc", 3)
    assert acc.steps == [2, 4, 8] and acc.values == [0.2, None, 0.8] and acc.standard_errors == [0.1] * 3
    assert (perplexity.name, perplexity.steps, perplexity.standard_errors) == ("word/perplexity", [8], [None])
    assert score_histories([]) == []
