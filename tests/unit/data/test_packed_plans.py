"""If these break: plans of packed documents count attention that is not computed, or hide what they count."""

from pathlib import Path
from typing import Any

import pytest
from tiny_corpora import make_corpus

from myriad.data.corpus_opening import open_corpora
from myriad.forecasts.iteration_forecast import IterationRequest
from myriad.forecasts.packed_documents import attended_note, attended_shares
from myriad.forecasts.planned_job import problem_of
from myriad.job import Job, load_job
from myriad.planner.workload import FULL_WINDOWS
from myriad.recipes.cluster import load_cluster

SEQUENCE, WINDOW = 64, 16


def job_of(corpus: Path, *keys: str) -> Job:
    own = ["data.documents=packed", f"data.corpus={corpus}", f"model.sequence={SEQUENCE}"]
    return load_job("tiny", [*own, f"model.window={WINDOW}", "model.window_pattern=[true, false]", *keys])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=200)


def pairs_of(lengths: list[int], window: int) -> int:
    return sum(min(query + 1, window) for length in lengths for query in range(length))


def test_the_shares_are_those_of_the_corpus(corpus: Path) -> None:
    job = job_of(corpus)
    (windows,) = open_corpora(job.data, SEQUENCE).packed
    lengths: Any = windows.packing.lengths.tolist()
    shares = attended_shares(job)
    for window, share in ((SEQUENCE, shares.whole), (WINDOW, shares.windowed)):
        full = windows.count * pairs_of([SEQUENCE], window)
        assert share == pytest.approx(pairs_of(lengths, window) / full)
    mixed = job_of(corpus, f"data.mixture=[{{path = '{corpus}', weight = 3}}, {{path = '{corpus}'}}]")
    assert attended_shares(mixed).whole == pytest.approx(shares.whole)


def test_predictions_count_them_and_say_so(corpus: Path) -> None:
    joined, packed = job_of(corpus, "data.documents=joined"), job_of(corpus)
    cluster = load_cluster("one-node-8xh100", [])
    keys = {
        "model.sequence": 8192,
        "model.window": "off",
        "layout.dp": 8,
        "layout.micro_batch": 1,
        "train.global_batch": 8,
    }
    found = {}
    for name, job in (("joined", joined), ("packed", packed)):
        long = load_job("gpt2-124m", [f"{key}={value}" for key, value in keys.items()])
        long = long.model_copy(update={"data": job.data})
        assert problem_of(long, cluster).attended == attended_shares(long)
        found[name] = IterationRequest(long, cluster).forecast()
    assert found["packed"].summary.seconds < 0.8 * found["joined"].summary.seconds
    assert any("packed documents attend to" in line for line in found["packed"].notes())
    assert not any("attend" in line for line in found["joined"].notes())


@pytest.mark.parametrize("name", ["s3://bucket/corpus", "missing"])
def test_a_corpus_that_is_not_here_is_counted_as_full_windows(name: str) -> None:
    job = load_job("tiny", ["data.documents=packed", f"data.corpus={name}"])
    assert attended_shares(job) == FULL_WINDOWS
    assert "full windows" in (attended_note(job, FULL_WINDOWS) or "")
