"""Prepare and check a job's inputs before any rank starts. This module does not import torch.

If a rank found its corpus missing, it would stop the others after their start-up. Here the error is one line,
and nothing was started.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from myriad.data.config import DataConfig
from myriad.data.corpus import Corpora
from myriad.data.corpus_cache import prepare_embedded
from myriad.data.corpus_opening import EMBEDDED, open_corpora, open_validation_set
from myriad.data.loader import CHANGED_WHILE_READ
from myriad.data.streaming.streamed_corpus import StreamedCorpus, StreamPlace
from myriad.data.windows import PackedWindows
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.job.job_changes import JobChange
from myriad.job.job_steps import JobSteps
from myriad.run import Run
from myriad.system.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.data.tokenizer import Tokenizer
    from myriad.evaluation.task_files import Task

__all__ = [
    "BadBlocks",
    "JobInputs",
    "bad_blocks_of",
    "check_streams",
    "keep_inputs",
    "note_corpus",
    "open_inputs",
    "open_run_inputs",
    "read_job_tasks",
    "refuse_other_tokenizer",
    "refuse_replaced_corpus",
    "tokenizer_of",
]


BadBlocks = tuple[tuple[str, int], ...]
"""The file and the first byte of each bad block of tokens."""


def bad_blocks_of(run: Run, job: Job) -> BadBlocks:
    """Return the blocks that earlier attempts skipped; this attempt skips them too, even if a file was
    restored since.

    Empty unless data.on_bad_block = skip.
    """
    if job.data.on_bad_block != "skip":
        return ()
    found = (event for event in run.read_events() if event.get("event") == "bad_block")
    blocks = {(event.get("file"), event.get("offset")) for event in found if event.get("action") == "skip"}
    return tuple(sorted((file, at) for file, at in blocks if isinstance(file, str) and isinstance(at, int)))


@dataclass(frozen=True)
class JobInputs:
    """The training text of a job."""

    phases: tuple[Corpora, ...]
    """The corpora of each phase; the first ones are those that the run begins with."""

    @property
    def first(self) -> Corpora:
        """The corpora that the run begins with."""
        return self.phases[0]

    @property
    def contents(self) -> list[str]:
        """`Corpora.content` of each phase."""
        return [corpora.content for corpora in self.phases]

    @property
    def content(self) -> str:
        """Identifier of the content of all phases, each of them once."""
        return "+".join(dict.fromkeys(self.contents))

    @property
    def unchecked(self) -> list[str]:
        """Corpora without block hashes, whose tokens are read as they are."""
        return list(dict.fromkeys(name for corpora in self.phases for name in corpora.unchecked))


def open_inputs(job: Job, report_stage: Callable[[str], None], run: Run | None = None) -> JobInputs:
    """Open the training split of each phase. ``report_stage`` receives progress messages about slow work.
    ``run`` has the files of streamed corpora, if it exists. Raises `BadInputError`."""
    opened: dict[tuple[DataConfig, int], Corpora] = {}
    found = []
    for number, changed in enumerate(JobSteps(job).phase_jobs):
        key = changed.data, changed.model.sequence
        if key not in opened:
            opened[key] = _open_phase(changed, report_stage, run)
        found.append(opened[key])
        if found[-1].fingerprint != found[0].fingerprint:
            allowed = f"made with the tokenizer of {found[0].corpora[0].name}"
            raise BadInputError(f"phases.{number - 1}.data", found[-1].corpora[0].name, allowed)
    return JobInputs(tuple(found))


def open_run_inputs(run: Run, job: Job, report_stage: Callable[[str], None]) -> JobInputs:
    """Open the inputs of a run, as `open_inputs` does, and check them before its ranks start. Raises
    `BadInputError` for those that the run cannot train on, or not continue with."""
    _refuse_no_routing(job)
    inputs = open_inputs(job, report_stage, run)
    check_streams(run, job, inputs)
    _refuse_no_documents(inputs)
    refuse_other_tokenizer(run, job, inputs)
    return inputs


def _refuse_no_routing(job: Job) -> None:
    """Raise `BadInputError` if there is no recorded routing to replay."""
    folder = job.train.replay_routing
    if folder is not None and not any(Path(folder).glob("step-*-rank-*.npz")):
        allowed = "RUN/routing of a run with telemetry.routing = true"
        raise BadInputError("train.replay_routing", folder, allowed)


def keep_inputs(run: Run, job: Job, inputs: JobInputs) -> list[JobChange]:
    """Store what a run needs of its inputs, and note the corpus of a start. Return what has changed in files
    of the same name."""
    _keep_tokenizer(run, inputs)
    _keep_streams(run, job, inputs)
    return note_corpus(run, inputs)


def _open_phase(job: Job, report_stage: Callable[[str], None], run: Run | None) -> Corpora:
    paths = [share.path for share in job.data.mixture] or [job.data.corpus]
    if EMBEDDED in paths:
        prepare_embedded(None, job.data.vocabulary, report_stage)
    place = StreamPlace(None if run is None else run.streams_path, job.train.seed)
    corpora = open_corpora(job.data, job.model.sequence, streams=place)
    _check_validation_sets(job, corpora, place)
    known = corpora.vocabulary
    if known is not None and known > job.model.vocabulary:
        allowed = f"at least the corpus's {known} tokens, or a corpus of fewer (data prepare --vocabulary)"
        raise BadInputError("model.vocabulary", job.model.vocabulary, allowed)
    if job.train.sample_prompt is not None and corpora.tokenizer is None:
        allowed = f"off: {paths[0]} has no tokenizer.json beside it, so no text can be made"
        raise BadInputError("train.sample_prompt", job.train.sample_prompt, allowed)
    read_job_tasks(job, corpora.tokenizer)
    return corpora


def _check_validation_sets(job: Job, corpora: Corpora, place: StreamPlace) -> None:
    """Refuse validation sets that cannot be read, or have another tokenizer than the training text."""
    for one in job.data.validation_sets:
        opened = open_validation_set(job.data, one, job.model.sequence, streams=place)
        if opened.fingerprint != corpora.fingerprint:
            allowed = f"made with another tokenizer than {corpora.corpora[0].name}"
            raise BadInputError("data.validation_sets", one.path, allowed)
        if opened.num_samples < job.train.global_batch:
            allowed = f"at least one batch: {job.train.global_batch} windows; it has {opened.num_samples}"
            raise BadInputError("data.validation_sets", one.path, allowed)


def read_job_tasks(job: Job, tokenizer: "Tokenizer | None") -> "list[Task]":
    """Read the tasks of ``eval.tasks``. Raises `BadInputError` for a request that training cannot score."""
    if not job.eval.tasks:
        return []
    from myriad.evaluation.task_files import read_tasks
    from myriad.evaluation.token_requests import RequestEncoder, encode_task

    if tokenizer is None:
        allowed = f"off: {job.data.corpus} has no tokenizer.json beside it, so no text can be read"
        raise BadInputError("eval.tasks", list(job.eval.tasks), allowed)
    tasks, encoder = read_tasks(job.eval.tasks, job.eval.limit), RequestEncoder(tokenizer, job.model.sequence)
    for task in tasks:
        encode_task(task, encoder)
    return tasks


def _refuse_no_documents(inputs: JobInputs) -> None:
    """Pack the documents of corpora, if the job packs them. Raises `BadInputError` for a damaged index, and
    for a corpus without a document of two tokens."""
    for corpora in inputs.phases:
        for corpus, windows in zip(corpora.corpora, corpora.windows, strict=True):
            if windows.count == 0:
                raise BadInputError("data.corpus", corpus.name, "holds no document of two tokens or more")


def refuse_other_tokenizer(run: Run, job: Job, inputs: JobInputs) -> None:
    """Refuse a corpus whose tokenizer differs from the one that the run was trained with. Raises
    `BadInputError`."""
    corpora = inputs.first
    began = next((event for event in run.read_events() if event.get("event") == "corpus"), None)
    known = _kept_fingerprint(run) if began is None else began.get("fingerprint")
    if (began is not None or known is not None) and known != corpora.fingerprint:
        key = "data.mixture" if job.data.mixture else "data.corpus"
        value = corpora.corpora[0].name if job.data.mixture else job.data.corpus
        allowed = (
            f"its tokenizer is not the one that {run.path} began with; prepare the text with that one "
            f"(myriad data prepare --tokenizer {run.path}), or choose another --run"
        )
        raise BadInputError(key, str(value), allowed)


def _kept_fingerprint(run: Run) -> str | None:
    """Return the fingerprint of the run's own tokenizer.json, or ``None`` if it cannot be read."""
    from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer

    with contextlib.suppress(BadInputError):
        return Tokenizer.load(run.path / TOKENIZER_FILE).fingerprint
    return None


def _keep_tokenizer(run: Run, inputs: JobInputs) -> None:
    """Write the tokenizer into the run folder, because the weights are useless without it.

    A tokenizer that is missing, damaged or not the corpus's is replaced; `refuse_other_tokenizer` has
    compared it.
    """
    from myriad.data.tokenizer import TOKENIZER_FILE

    corpora = inputs.first
    if corpora.tokenizer is not None and _kept_fingerprint(run) != corpora.fingerprint:
        write_whole(run.path / TOKENIZER_FILE, corpora.tokenizer.as_text())


def check_streams(run: Run, job: Job, inputs: JobInputs) -> None:
    """Compare the files of streamed corpora with those that the run has listed. Raises `BadInputError`."""
    for corpus in _streamed(run, job, inputs):
        corpus.check_sources()


def _keep_streams(run: Run, job: Job, inputs: JobInputs) -> None:
    """Write the lists of the files of streamed corpora into the run, once."""
    for corpus in _streamed(run, job, inputs):
        corpus.keep_sources()


def _streamed(run: Run, job: Job, inputs: JobInputs) -> list[StreamedCorpus]:
    """Return the streamed corpora of a job, its validation sets included."""
    place = StreamPlace(run.streams_path, job.train.seed)
    sets = (
        open_validation_set(job.data, one, job.model.sequence, streams=place)
        for one in job.data.validation_sets
    )
    return [corpus for opened in (*inputs.phases, *sets) for corpus in opened.streamed]


def note_corpus(run: Run, inputs: JobInputs) -> list[JobChange]:
    """Add the ``corpus`` event of a start, and return what has changed in files of the same name.

    Another length means another order of samples; other content means other samples.
    """
    events = run.read_events()
    last = next((event for event in reversed(events) if event.get("event") == "corpus"), None)
    corpora = inputs.first
    now = {"fingerprint": corpora.fingerprint, "tokens": corpora.num_tokens, "content": inputs.content}
    unchecked = {"unchecked": inputs.unchecked} if inputs.unchecked else {}
    run.append_event("corpus", **now, **unchecked, **_packing(corpora), **_streaming(corpora))
    since = events[events.index(last) :] if last is not None else []
    named = any(str(event.get("key", "")).startswith(("data.", "phases")) for event in since)
    changed = next(
        (key for key in ("tokens", "content") if last and last.get(key) not in (None, now[key])), ""
    )
    if last is None or named or not changed:
        return []
    change = JobChange(f"{changed} of data.corpus", last[changed], now[changed])
    run.append_event("job_changed", step=run.last_step(), **change._asdict())
    return [change]


def _packing(corpora: Corpora) -> dict[str, int]:
    """Return how many windows the documents fill, and how well; empty if they are not packed."""
    packings = [windows.packing for windows in corpora.packed if isinstance(windows, PackedWindows)]
    if not packings or corpora.streamed:
        return {}
    return {
        "windows": corpora.num_samples,
        "padding": corpora.num_samples * corpora.sequence - sum(int(one.lengths.sum()) for one in packings),
        "split_documents": sum(one.num_split for one in packings),
    }


def _streaming(corpora: Corpora) -> dict[str, int]:
    """Return how many files are streamed, and their bytes; empty if none is."""
    lists = [corpus.sources for corpus in corpora.streamed]
    if not lists:
        return {}
    return {"files": sum(len(one.files) for one in lists), "bytes": sum(one.num_bytes for one in lists)}


def refuse_replaced_corpus(run: Run, job: Job, content: str) -> None:
    """Refuse, in a later attempt of one start, corpus files that were replaced since.

    The run would read other data without a report. Raises `BadInputError`.
    """
    last = next((event for event in reversed(run.read_events()) if event.get("event") == "corpus"), {})
    if last.get("content", content) != content:
        key = "data.mixture" if job.data.mixture else "data.corpus"
        value = [share.path for share in job.data.mixture] or job.data.corpus
        raise BadInputError(key, value, f"the corpus that this run began to read: {CHANGED_WHILE_READ}")


def tokenizer_of(run: Run | None, job: Job) -> "Tokenizer | None":
    """Return the run's tokenizer, else its corpus's; ``None`` if the corpus has none."""
    from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer

    if run is not None and (run.path / TOKENIZER_FILE).is_file():
        return Tokenizer.load(run.path)
    return open_corpora(job.data, job.model.sequence).tokenizer
