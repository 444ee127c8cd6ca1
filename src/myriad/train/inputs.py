"""What a job reads, made ready and checked before any rank starts. No torch here.

A rank that finds its corpus missing takes the others with it, after their start-up; here it is one line, and
nothing was started.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from myriad.data.cache import prepare_embedded
from myriad.data.corpus import EMBEDDED, Corpora, open_corpora
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.run import Run
from myriad.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer

__all__ = ["keep_tokenizer", "open_inputs", "refuse_other_tokenizer", "tokenizer_of"]


def open_inputs(job: Job, tell: Callable[[str], None]) -> Corpora:
    """The training split. ``tell`` hears, in words, what takes long. Raises `BadInputError`."""
    paths = [share.path for share in job.data.mixture] or [job.data.corpus]
    if EMBEDDED in paths:
        prepare_embedded(None, job.data.vocabulary, tell)
    corpora = open_corpora(job.data, job.model.sequence)
    known = corpora.vocabulary
    if known is not None and known > job.model.vocabulary:
        allowed = f"at least the corpus's {known} tokens, or a corpus of fewer (data prepare --vocabulary)"
        raise BadInputError("model.vocabulary", job.model.vocabulary, allowed)
    if job.train.sample_prompt is not None and corpora.tokenizer is None:
        allowed = f"off: {paths[0]} has no tokenizer.json beside it, so no text can be made"
        raise BadInputError("train.sample_prompt", job.train.sample_prompt, allowed)
    return corpora


def refuse_other_tokenizer(run: Run, job: Job, corpora: Corpora) -> None:
    """A run goes on with the tokens that it learned, not with others that now lie at the same place."""
    began = next((event for event in run.read_events() if event.get("event") == "corpus"), None)
    if began is not None and began.get("fingerprint") != corpora.fingerprint:
        allowed = f"its tokenizer is not the one that {run.path} began with; choose another --run"
        raise BadInputError("data.corpus", job.data.corpus, allowed)


def keep_tokenizer(run: Run, corpora: Corpora) -> None:
    """Beside the weights, which mean nothing without it, whatever becomes of the corpus."""
    from myriad.data.tokenizer import TOKENIZER_FILE

    path = run.path / TOKENIZER_FILE
    if corpora.tokenizer is not None and not path.is_file():
        write_whole(path, corpora.tokenizer.as_text())


def tokenizer_of(run: Run | None, job: Job) -> "Tokenizer | None":
    """The run's own, else its corpus's; ``None`` where that has none."""
    from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer

    if run is not None and (run.path / TOKENIZER_FILE).is_file():
        return Tokenizer.load(run.path)
    return open_corpora(job.data, job.model.sequence).tokenizer
