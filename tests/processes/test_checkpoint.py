"""If these break: a resumed run differs from the run that was stopped, in this layout or in another one, or a
damaged checkpoint is trained from."""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, make_engine, train_steps
from ranks import reuse_ranks

from myriad.checkpoint.checkpoint_files import load, load_model, save
from myriad.checkpoint.format.checkpoint_manifest import MANIFEST
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.trainer_state import decode_progress
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.comm.groups import close_world
from myriad.errors import RunFailedError
from myriad.model.tensor_shard import TensorShard

SWIGLU = {"activation": "swiglu", "kv_heads": 1, "block": "parallel", "tied": False}
MUON = {"activation": "swiglu", "kv_heads": 2}
"""The model of the tests that train with Muon."""
EXPERTS = {"experts": 4, "expert_hidden": 16, "balance_bias_rate": 0.1}
GPT2 = {"norm": "layer", "bias": True, "position": "learned", "dropout": 0.1, "layers": 5}

Tensors = dict[str, np.ndarray]


def optimizer_of(model: dict[str, Any]) -> dict[str, Any]:
    if model is GPT2:
        return {}
    name = "muon" if model is MUON else "lamb" if model is SWIGLU else "adamw"
    clips = {"qk_clip": 0.02} if model is MUON else {}
    return {"name": name, "ema_decay": 0.8, "ema_every": 2 if model is SWIGLU else 1, **clips}


def shortened(model: dict[str, Any], *layouts: dict[str, Any]) -> dict[str, Any]:
    """The model with as few layers as the layouts allow."""
    return model if any("pp" in layout for layout in layouts) else model | {"layers": 2}


def go(case: Case, read: Path | None, write: Path, steps: tuple[int, ...]) -> list[tuple[float, float]]:
    """One rank's side: from the checkpoint after ``steps[0]`` in ``read`` (else from the start), saving after
    each of ``steps``."""
    engine = make_engine(case)
    if read is not None:
        progress = load(CheckpointFolder(read).of_step(steps[0]), list(engine.all_shards()))
        engine.optimizer.steps_done = progress["optimizer_steps"]
        engine.loaded()
    found, done = [], steps[0] if read is not None else 0
    for step in steps:
        found += train_steps(case, engine, done, step)
        done = step
        progress = {"step": step, "optimizer_steps": engine.optimizer.steps_done}
        save(CheckpointFolder(write), step, list(engine.shards()), progress)
    engine.close()
    close_world()
    return found


def whole(folder: Path, step: int) -> Tensors:
    """Every whole tensor of a checkpoint: parameters and optimizer state."""
    return {name: x.numpy() for name, x in load_model(CheckpointFolder(folder).of_step(step), "").items()}


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


MOVES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"dp": 2, "zero": 2}, {"tp": 2, "micro_batch": 4}),
    ({}, {"pp": 2, "virtual_stages": 2, "micro_batch": 2}, {"dp": 4, "zero": 3, "shard_group": 2}),
    ({}, {"dp": 4, "zero": 3, "shard_group": 2}, {"dp": 4, "zero": 3}),
    ({}, {"tp": 2, "pp": 2, "partition": "manual:2", "micro_batch": 2}, {}),
    (SWIGLU, {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2}, {"pp": 2, "zero": 1}),
    (SWIGLU, {}, {"tp": 2, "pp": 2, "schedule": "zero-bubble", "micro_batch": 2}),
    (GPT2, {"dp": 3, "zero": 2, "micro_batch": 4}, {"dp": 2, "tp": 2, "zero": 3, "micro_batch": 2}),
    (GPT2, {"pp": 2, "tp": 2, "virtual_stages": 3, "micro_batch": 6}, {"dp": 3, "zero": 0}),
    (MUON, {"dp": 2, "zero": 1}, {"tp": 2, "pp": 2, "micro_batch": 2}),
    (EXPERTS, {"dp": 4, "tp": 2, "ep": 2, "etp": 1, "zero": 2, "shard_group": 2}, {"dp": 3, "zero": 1}),
    (EXPERTS, {"tp": 4, "ep": 4, "etp": 1, "micro_batch": 2}, {"dp": 2, "tp": 4, "etp": 2, "zero": 3}),
    (EXPERTS | {"bias": True}, {"tp": 4, "ep": 2, "etp": 2, "micro_batch": 2}, {"tp": 4, "micro_batch": 4}),
]


def name_of(value: object) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("model", "before", "after"), MOVES, ids=name_of)
def test_a_run_moves_to_another_layout_and_continues_as_if_nothing_had_happened(
    model: dict[str, Any], before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    optimizer = optimizer_of(model)
    steps = 1, 2  # the moving average of each second step is updated in the last one
    model = shortened(model, before, after)
    first, second = (Case(layout, model, optimizer, 2, 12) for layout in (before, after))
    stayed = reuse_ranks(first.world, go, first, None, tmp_path / "stayed", steps)[0]
    moved = reuse_ranks(second.world, go, second, tmp_path / "stayed", tmp_path / "moved", steps)[0]
    assert_same_bits(whole(tmp_path / "moved", 1), whole(tmp_path / "stayed", 1))
    assert [loss for loss, _ in moved] == pytest.approx([loss for loss, _ in stayed[1:]], rel=1e-5)
    end = whole(tmp_path / "moved", 2)
    for name, values in whole(tmp_path / "stayed", 2).items():
        limit = 1e-5 if name.startswith(("model.", "optimizer.ema.")) else 1e-3
        assert np.linalg.norm(end[name] - values) <= limit * np.linalg.norm(values), name


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ({}, {}, torch.float32),
        ({}, {"dp": 4, "zero": 3, "shard_group": 2}, torch.float32),
        (SWIGLU, {"dp": 2, "tp": 2, "zero": 2, "reduce": "each", "micro_batch": 2}, torch.bfloat16),
        (GPT2, {"pp": 2, "virtual_stages": 2, "micro_batch": 2}, torch.float32),
        (MUON, {"dp": 2, "zero": 3}, torch.bfloat16),
    ],
    ids=name_of,
)
def test_a_run_that_was_stopped_and_continues_has_the_bits_of_one_that_was_not(
    model: dict[str, Any], layout: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    case = Case(layout, shortened(model, layout), optimizer_of(model), 2, 8, dtype)
    undisturbed = reuse_ranks(case.world, go, case, None, tmp_path / "undisturbed", (2,))
    begun = reuse_ranks(case.world, go, case, None, tmp_path / "stopped", (1,))
    resumed = reuse_ranks(case.world, go, case, tmp_path / "stopped", tmp_path / "stopped", (1, 2))
    assert begun[0] + resumed[0] == undisturbed[0], "losses and gradient norms"
    assert_same_bits(whole(tmp_path / "stopped", 2), whole(tmp_path / "undisturbed", 2))


def test_torch_alone_opens_a_checkpoint(tmp_path: Path) -> None:
    """Other people's tools read what a run leaves behind, without this library."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    case = Case({"dp": 2, "tp": 2, "zero": 3, "micro_batch": 2}, SWIGLU, steps=2)
    reuse_ranks(4, go, case, None, tmp_path, (2,))
    dcp_to_torch_save(tmp_path / "step-2", tmp_path / "whole.pt")
    opened = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert decode_progress(opened.pop("progress")) == {"step": 2, "optimizer_steps": 2}
    assert_same_bits({name: x.numpy() for name, x in opened.items()}, whole(tmp_path, 2))


def parts(shape: tuple[int, ...] = (6, 4), value: float = 1.0) -> list[TensorShard]:
    """A tensor in two rectangles, and a small one."""
    rows = shape[0] // 2
    halves = [(i * rows, *[0] * (len(shape) - 1)) for i in range(2)]
    return [
        *(TensorShard("model.w", shape, at, torch.full((rows, *shape[1:]), value)) for at in halves),
        TensorShard("model.bias", (3,), (0,), torch.full((3,), value)),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Checkpoints after 10 and 20 steps, the later one of twos."""
    made = CheckpointFolder(tmp_path / "checkpoints")
    save(made, 10, parts(value=1.0), {"step": 10})
    save(made, 20, parts(value=2.0), {"step": 20})
    return made


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_every_damaged_file_is_named_and_the_older_checkpoint_is_used(
    damage: Any, folder: CheckpointFolder
) -> None:
    files = sorted(folder.of_step(20).iterdir())
    assert len(files) >= 3 and verify(folder.of_step(20)) == []
    for path in files:
        kept = path.read_bytes()
        if path.name == MANIFEST and damage is Path.unlink:
            continue  # then there is no checkpoint of step 20, and nothing to name
        damage(path)
        (problem,) = verify(folder.of_step(20))
        assert problem.startswith("step-20") and path.name in problem and "\n" not in problem
        assert folder.newest() == (10, [problem])
        path.write_bytes(kept)
    assert folder.newest() == (20, [])


def test_any_flipped_bit_of_the_manifest_is_noticed(folder: CheckpointFolder) -> None:
    path = folder.of_step(20) / "manifest.json"
    kept = path.read_bytes()
    for index in range(len(kept)):
        path.write_bytes(kept[:index] + bytes([kept[index] ^ 1 << index % 8]) + kept[index + 1 :])
        assert verify(folder.of_step(20)), f"byte {index}: {kept[index]:#x}"


def test_when_no_checkpoint_verifies_nothing_is_started_over_it(folder: CheckpointFolder) -> None:
    for step in folder.steps():
        flip(folder.of_step(step) / ".metadata")
    with pytest.raises(RunFailedError, match=r"step-20/\.metadata.*step-10/\.metadata") as caught:
        folder.newest()
    assert "\n" not in str(caught.value)


def test_a_save_that_was_killed_halfway_is_ignored_and_replaced(folder: CheckpointFolder) -> None:
    half = folder.of_step(30)
    half.mkdir()
    (half / "__9_0.distcp").write_bytes(b"half")
    assert folder.steps() == [10, 20] and folder.unfinished() == [30] and folder.newest() == (20, [])
    save(folder, 30, parts(value=3.0), {})
    assert folder.newest() == (30, []) and folder.unfinished() == []
    assert not (half / "__9_0.distcp").exists()


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor_that_differs(
    folder: CheckpointFolder,
) -> None:
    with pytest.raises(RunFailedError, match=r"model\.w is \(8, 4\) here, \(6, 4\) there") as caught:
        load(folder.of_step(20), parts((8, 4)))
    assert "\n" not in str(caught.value)
    missing = TensorShard("model.deeper.w", (2,), (0,), torch.zeros(2))
    with pytest.raises(RunFailedError, match=r"model\.deeper\.w is \(2,\) here, nothing there"):
        load(folder.of_step(20), [missing])


def test_only_the_newest_are_kept(folder: CheckpointFolder) -> None:
    for step in (30, 40, 50):
        save(folder, step, parts(), {})
        folder.prune(2, step)
    assert folder.steps() == [40, 50]


def test_what_replicas_agreed_on_last_is_kept_until_something_newer_is(folder: CheckpointFolder) -> None:
    """Else there is nothing to go back to when the newest are found to be wrong."""
    for step in (30, 40, 50, 60):
        save(folder, step, parts(), {})
        folder.prune(2, step, trusted=35)
    assert folder.steps() == [30, 50, 60]
    folder.prune(2, 60, trusted=55)
    assert folder.steps() == [50, 60]


def test_a_damaged_newer_checkpoint_never_takes_the_place_of_a_good_one(folder: CheckpointFolder) -> None:
    """A run that went back to step 10 and saved at 15 must still have 15 when it keeps one only."""
    flip(folder.of_step(20) / ".metadata")
    save(folder, 15, parts(value=1.5), {})
    folder.prune(1, 15)
    assert folder.newest() is not None and folder.newest()[0] == 15
    save(folder, 20, parts(value=2.0), {})
    folder.prune(1, 20)
    assert folder.steps() == [20] and folder.newest() == (20, [])


def test_what_did_not_verify_is_set_aside_and_never_tried_again(folder: CheckpointFolder) -> None:
    flip(folder.of_step(20) / ".metadata")
    assert folder.set_aside(20) == "step-20.damaged"
    assert folder.newest() == (10, []) and (folder.path / "step-20.damaged" / ".metadata").is_file()
    save(folder, 20, parts(value=2.0), {})
    assert folder.newest() == (20, []) and (folder.path / "step-20.damaged").is_dir()
    assert folder.set_aside(20) == "step-20.damaged", "a second time"
    assert folder.steps() == [10]


def _save_for_ever(folder: CheckpointFolder) -> None:
    torch.set_num_threads(1)
    step = 0
    while True:
        step += 1
        save(folder, step, parts((600, 400), float(step)), {"step": step})
        folder.prune(1, step)


def test_killed_at_any_instant_a_good_checkpoint_is_left(tmp_path: Path) -> None:
    for attempt in range(6):
        folder = CheckpointFolder(tmp_path / str(attempt))
        pid = os.fork()
        if pid == 0:
            try:
                _save_for_ever(folder)
            finally:
                os._exit(1)
        while not folder.steps():
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        newest = folder.newest()
        assert newest is not None
        assert (load_model(folder.of_step(newest[0]))["w"] == newest[0]).all()


def test_the_manifest_can_be_read_by_eye(folder: CheckpointFolder) -> None:
    manifest = json.loads((folder.of_step(20) / "manifest.json").read_text())
    assert manifest["progress"] == {"step": 20}
    files = {path.name: path.stat().st_size for path in folder.of_step(20).iterdir()}
    files.pop("manifest.json")
    assert {name: record["bytes"] for name, record in manifest["files"].items()} == files


def test_a_checkpoint_that_cannot_be_written_is_reported_in_one_line(folder: CheckpointFolder) -> None:
    """A full disk is reported with its reason, and the older checkpoints stay."""
    make_stored_shards(parts((200, 200)))  # needs files of its own, once
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(
            RunFailedError, match=r"^step-30 cannot be written: .*File too large.*\(rank 0\)$"
        ):
            save(folder, 30, parts((200, 200)), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.newest() == (20, []) and folder.steps() == [10, 20]
