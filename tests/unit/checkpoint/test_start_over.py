"""If these fail, a run that has trained begins at step 1 by itself, or loses a state that could be loaded."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.checkpoint_world import CheckpointWorld
from myriad.checkpoint.format.checkpoint_manifest import MANIFEST, hash_of
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.load.start_over import RunHistory, check_restart
from myriad.checkpoint.load.state_search import FoundState, StateSearch
from myriad.checkpoint.snapshots.rank_entry import OpenedSnapshot
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.folder_owner import AcquiredFolder
from myriad.errors import NoStateError, RunFailedError
from myriad.model.tensor_shard import TensorShard

STEPS = st.integers(1, 6)


@dataclass
class Memory:
    """Bytes of a snapshot, in place of shared memory."""

    content: bytes

    def view(self, slot: int, start: int, size: int) -> memoryview:
        return memoryview(self.content)[start : start + size]


class Nodes:
    """The snapshots of one node with one rank: whole, damaged, or gone when they are asked for."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}

    def snapshots(self) -> list[dict[str, Any]]:
        steps = sorted(self.kinds)
        return (
            [{"attempt": 1, "world": 1, "rank": 0, "holds": [0], "copied": False, "steps": steps}]
            if steps
            else []
        )

    def open(self, attempt: int, rank: int, step: int, *, copied: bool) -> OpenedSnapshot | None:
        if self.kinds[step] == "gone":
            return None
        pieces = make_stored_shards([state(step)])
        content = state(step).values.numpy().tobytes()
        known = hash_of(content if self.kinds[step] == "good" else b"other")
        return OpenedSnapshot(0, pieces, [known], Memory(content), 0)  # type: ignore[arg-type]


class Away:
    """A storage of which some files cannot be read for a while."""

    def __init__(self, inner: Any, away: set[str]) -> None:
        self._inner, self._away = inner, away

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("read", "read_into"):
            return found

        def read(path: str, *arguments: Any) -> Any:
            if path in self._away:
                raise TimeoutError("does not answer")
            return found(path, *arguments)

        return read


def state(step: int) -> TensorShard:
    return TensorShard("model.w", (4, 2), (0, 0), torch.full((4, 2), float(step)))


class Run:
    """A run whose attempts search for a state, over whatever has become of the earlier ones."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.folder, self.nodes = CheckpointFolder(self.path / "checkpoints"), Nodes()
        self.away: set[str] = set()
        self.stored: dict[int, str] = {}
        """Steps that are stored, and how they are: good, damaged, unreadable."""
        self.ever_stored = False
        self.folder.storage = Away(self.folder.storage, self.away)

    def store(self, step: int) -> None:
        save(self.folder, step, [state(step)], {"step": step})
        self.stored[step], self.ever_stored = "good", True
        self.away -= {f"step-{step}/{MANIFEST}", f"step-{step}/__0_0.distcp"}

    def damage(self, step: int, name: str) -> None:
        path = self.folder.of_step(step) / name
        content, at = bytearray(path.read_bytes()), 40
        if name != MANIFEST:  # bytes around the data are not loaded
            chunks = self.folder.at_step(step).manifest().chunks()
            at = next(chunk.data_start for _, chunk in chunks if chunk.tensor == "model.w")
        content[at] ^= 4
        path.write_bytes(content)
        self.stored[step] = "damaged"

    def search(self, past: RunHistory, newest: int | None = None) -> tuple[FoundState, TensorShard]:
        claimed = AcquiredFolder(2, tuple(self.folder.trained_steps()), tuple(self.folder.damaged()))
        into, random = state(0), TensorShard("random.0", (1,), (0,), torch.zeros(1))
        found = StateSearch(self.folder, claimed, self.nodes, CheckpointWorld(), self.path, newest)  # type: ignore[arg-type]
        return found.load([into], random, past), into

    def names(self) -> list[str]:
        return sorted(self.folder.storage.names())

    @property
    def good(self) -> set[int]:
        durable = {step for step, kind in self.stored.items() if kind == "good"}
        return durable | {step for step, kind in self.nodes.kinds.items() if kind == "good"}


class SearchMachine(RuleBasedStateMachine):
    """Any checkpoints and snapshots, any damage and outage, any number of attempts."""

    @initialize()
    def begin(self) -> None:
        self.run, self.events_lost = Run(), False

    def teardown(self) -> None:
        shutil.rmtree(self.run.path)

    @rule(step=STEPS)
    def store(self, step: int) -> None:
        self.run.store(step)

    @rule(step=STEPS, kind=st.sampled_from(["good", "damaged", "gone"]))
    def keep_in_memory(self, step: int, kind: str) -> None:
        self.run.nodes.kinds[step] = kind

    @rule()
    def lose_memory(self) -> None:
        self.run.nodes.kinds.clear()

    @rule(data=st.data(), name=st.sampled_from([MANIFEST, "__0_0.distcp"]))
    @precondition(lambda self: "good" in self.run.stored.values())
    def damage(self, data: st.DataObject, name: str) -> None:
        good = [step for step, kind in self.run.stored.items() if kind == "good"]
        self.run.damage(data.draw(st.sampled_from(good)), name)

    @rule(data=st.data(), name=st.sampled_from([MANIFEST, "__0_0.distcp"]))
    @precondition(lambda self: "good" in self.run.stored.values())
    def go_away(self, data: st.DataObject, name: str) -> None:
        good = [step for step, kind in self.run.stored.items() if kind == "good"]
        step = data.draw(st.sampled_from(good))
        self.run.away.add(f"step-{step}/{name}")
        self.run.stored[step] = "unreadable"

    @rule()
    def come_back(self) -> None:
        self.run.away.clear()
        self.run.stored = {
            step: "good" if kind == "unreadable" else kind for step, kind in self.run.stored.items()
        }

    @rule(events=st.booleans())
    def start(self, events: bool) -> None:
        """``events``: events.jsonl is there."""
        run = self.run
        before, past = run.names(), RunHistory(stored_step=int(events and run.ever_stored))
        try:
            found, into = run.search(past)
        except RunFailedError as error:
            assert run.names() == before, "nothing is renamed where nothing was loaded"
            assert not run.good and "\n" not in str(error)
            unreadable = "unreadable" in run.stored.values() or "gone" in run.nodes.kinds.values()
            assert isinstance(error, NoStateError) != unreadable, "an outage is not for a person to decide"
            return
        if found.step is None:
            assert not run.ever_stored and not run.nodes.kinds, "it has trained"
            assert run.names() == before
            return
        newest = max(run.good)
        assert found.step == newest and torch.equal(into.values, state(newest).values)
        passed = [step for step, kind in run.stored.items() if step > newest and kind == "damaged"]
        assert sorted(found.set_aside) == sorted(f"step-{step}.damaged" for step in passed)
        for step in passed:
            del run.stored[step]

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "run"):
            assert set(self.run.folder.trained_steps()) == set(self.run.stored)


TestSearch = SearchMachine.TestCase
TestSearch.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is tried again without a wait."""
    monkeypatch.setattr("myriad.checkpoint.load.collective_load._RETRY_SECONDS", ())


def decide(past: RunHistory, **found: Any) -> None:
    known: dict[str, Any] = {"problems": (), "in_memory": (), "committed": (), "damaged": ()}
    check_restart(past, Path("runs/mine"), "s3://here", **known | {"unreadable": False} | found)


NOT_TRAINED: list[Callable[[], None]] = [
    lambda: decide(RunHistory()),
    lambda: decide(RunHistory(done_step=30)),  # nothing was stored: nothing can be lost
    lambda: decide(
        RunHistory(stored_step=20, may_start_over=True), problems=["step-20/x: bad"], committed=[20]
    ),
    lambda: decide(RunHistory(stored_step=20), committed=[20], newest=0),  # the driver goes back to step 0
    lambda: decide(RunHistory(has_started_over=True), damaged=[20]),
]


@pytest.mark.parametrize("case", NOT_TRAINED)
def test_a_run_that_has_nothing_to_lose_or_is_allowed_to_begins_at_step_1(case: Callable[[], None]) -> None:
    case()


@pytest.mark.parametrize(
    ("past", "found", "told"),
    [
        (RunHistory(stored_step=20), {}, "s3://here holds no checkpoint, but step 20 was stored"),
        (
            RunHistory(stored_step=20, locations=("s3://there",)),
            {},
            "mine --checkpoint.url s3://there` searches",
        ),
        (RunHistory(), {"damaged": [20]}, "set aside: step-20.damaged"),
        (
            RunHistory(),
            {"problems": ["step-20/x: a[2]: its bytes changed"], "committed": [20]},
            "20/x: its bytes",
        ),
        (RunHistory(), {"committed": [9], "newest": 7}, "states after step 7 are wrong (step-9)"),
        (
            RunHistory(stored_step=2),
            {"in_memory": ["step 9 of rank 0 of 2 (node of rank 0)"]},
            "memory: step 9",
        ),
    ],
)
def test_a_run_that_has_trained_prints_what_exists_and_what_to_type(
    past: RunHistory, found: dict[str, Any], told: str
) -> None:
    with pytest.raises(NoStateError) as caught:
        decide(past, **found)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert "`myriad train runs/mine --checkpoint.restart-from-scratch`" in str(caught.value)


def test_an_outage_is_never_a_reason_to_start_over_even_where_that_is_allowed() -> None:
    with pytest.raises(RunFailedError, match="can be read now: step-20/manifest"):
        decide(RunHistory(may_start_over=True), problems=["step-20/manifest.json: away"], unreadable=True)


@given(st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_states_that_the_driver_distrusts_are_set_aside_once_an_older_one_is_loaded(a: int, b: int) -> None:
    run = Run()
    run.store(min(a, b))
    run.store(max(a, b) + 1)
    with pytest.raises(NoStateError):
        run.search(RunHistory(), newest=min(a, b) - 1) if min(a, b) > 1 else decide(
            RunHistory(), committed=[20], newest=9
        )
    assert not run.folder.damaged()
    found, _ = run.search(RunHistory(), newest=min(a, b))
    assert found.step == min(a, b) and found.wrong == [f"step-{max(a, b) + 1}.damaged"]
    shutil.rmtree(run.path)
