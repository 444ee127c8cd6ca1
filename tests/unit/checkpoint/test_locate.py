"""If these fail, a checkpoint verb refuses a place that another verb takes, or a wrong place ends in more
than a line."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.checkpoint.storage.verified_files import put_and_check
from myriad.cli.command_line import run_command
from myriad.config import dump_toml
from myriad.job import Job, load_job
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.run import Run

SMALL = [
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.sequence=16", "model.vocabulary=64",
    "model.activation=swiglu", "data.corpus=none",
]  # fmt: skip
NAME = "a run #1 %20 é"
PLACES = [
    NAME, f"runs/{NAME}", f"runs/{NAME}/", f"runs/{NAME}/checkpoints", f"runs/{NAME}/checkpoints/step-4/",
    f"runs/{NAME}/../{NAME}/checkpoints/step-4", "far", "near", "linked", "linked/checkpoints", "cut",
    "cut/step-4", f"file://PWD/runs/{NAME}", f"file://PWD/runs/{NAME}/checkpoints/", "file://PWD/cut/step-4",
    f"PWD/runs/{NAME}", "kept/é é/step-4", "kept/é é", "memory://bucket/é #1", "memory://bucket/é #1/step-4/",
]  # fmt: skip
"""``far`` and ``near`` are runs with a checkpoint.url; ``cut`` is what a reshard wrote."""
WRONG = [
    "", "nothing", "empty", "file", f"runs/{NAME}/checkpoints/step-5", f"runs/{NAME}/job.toml", "half",
    "file://PWD/nothing", "file://runs", "memory://bucket/nothing", "nosuch://bucket/run", "s3:/bucket", "\0",
    "~", "x" * 5000,
]  # fmt: skip
VERBS: dict[str, Callable[[str], list[str]]] = {
    "list": lambda place: ["list", place],
    "list --verify": lambda place: ["list", place, "--verify"],
    "verify": lambda place: ["verify", place],
    "diff": lambda place: ["diff", place, "cut"],
    "diff, second": lambda place: ["diff", "cut", place],
    "export": lambda place: ["export", place, "out"],
    "reshard": lambda place: ["reshard", place, "out", "--layout.tp", "2"],
    "prune": lambda place: ["prune", place, "--keep", "3"],
}


def put(folder: CheckpointFolder, job: Job, step: int = 4) -> None:
    """A checkpoint as a run leaves it."""
    model = GPT(job.model, 1)
    values = {
        whole: x
        for index, prefix in enumerate(model.names)
        for name, x in model.initial(index).items()
        if (whole := f"{prefix}.{name}") not in model.tied
    }
    parts = [TensorShard(f"model.{name}", tuple(x.shape), (0,) * x.dim(), x) for name, x in values.items()]
    save(folder, step, parts, {"step": step})
    checkpoint = folder.at_step(step)
    manifest = checkpoint.manifest()
    record = put_and_check(checkpoint.storage, checkpoint.at("job.toml"), dump_toml(job).encode())
    checkpoint.commit(replace(manifest, files={**manifest.files, "job.toml": record}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every place."""
    torch.set_num_threads(1)
    MemoryFileSystem.store.clear()
    folder = tmp_path_factory.mktemp("places")
    job = load_job("tiny", SMALL)
    for path, url in (
        (f"runs/{NAME}", None),
        ("far", "memory://bucket/é #1"),
        ("near", str(folder / "kept/é é")),
    ):
        run = Run(folder / path)
        own = load_job("tiny", [*SMALL, *([f"checkpoint.url={url}"] if url else [])])
        run.create_or_resume(own)
        put(CheckpointFolder(run.checkpoints()), own)
    (folder / "linked").symlink_to(folder / "runs" / NAME)
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    (folder / "half" / "step-4").mkdir(parents=True)
    (folder / "half" / "step-4" / "__0_0.distcp").write_bytes(b"")
    put(CheckpointFolder(folder / "cut"), job)
    return folder


@pytest.fixture
def call(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Any]:
    """A verb as it is typed in that folder; gives the exit code, the JSON object and the lines of errors."""
    monkeypatch.chdir(made)

    def run(*words: str) -> tuple[int, Any, list[str]]:
        typed = [word.replace("PWD", str(made)) for word in words]
        typed = [str(tmp_path / "out") if word == "out" else word for word in typed]
        try:
            code = run_command(["checkpoint", *typed, "--json"])
        except SystemExit as ended:
            code = int(ended.code or 0)
        output, errors = capsys.readouterr()
        return code, json.loads(output, parse_constant=pytest.fail), errors.strip().splitlines()

    return run


@pytest.mark.parametrize("place", PLACES)
def test_every_verb_takes_every_place(call: Callable[..., Any], place: str) -> None:
    for name, words in VERBS.items():
        if name == "prune" and place.rstrip("/").endswith("step-4"):
            code, told, (line,) = call(*words(place))
            assert code == 2 and "must be a run or a folder of checkpoints, not one of them" in line, place
            continue
        code, told, errors = call(*words(place))
        assert (code, errors) == (0, []) and "error" not in told, (name, told, errors)
        if name in ("list", "list --verify"):
            assert [row["step"] for row in told["checkpoints"]] == [4]
        if name == "export":
            out = Path(told["out"])
            for path in out.iterdir():
                path.unlink()
            out.rmdir()


@pytest.mark.parametrize("place", WRONG)
def test_a_wrong_place_is_one_line_of_every_verb(call: Callable[..., Any], place: str) -> None:
    of_runs = {verb: partial(lambda verb, place: [verb, place], verb) for verb in ("save", "release")}
    for name, words in {**VERBS, **of_runs}.items():
        if place == "half" and name in ("list", "list --verify", "verify", "prune"):
            continue  # a folder in which a checkpoint was begun: there is none yet
        code, told, errors = call(*words(place))
        assert code == 2 and len(errors) == 1 and told["error"]["exit_code"] == 2, (name, code, told, errors)
        assert errors[0].startswith("myriad: error: "), errors


def test_a_checkpoint_that_was_cut_is_compared_with_its_source(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    assert call("reshard", NAME, "out", "--layout.tp", "2")[0] == 0
    for cut in (tmp_path / "out", tmp_path / "out" / "step-4"):
        code, told, _ = call("diff", NAME, str(cut))
        assert (code, told["differences"]) == (0, [])
    assert call("verify", str(tmp_path / "out"))[0] == 0


def test_what_a_run_at_work_prunes_meanwhile_is_not_damaged(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = CheckpointFolder(tmp_path / "kept"), LocalStorage.read

    def fill() -> None:
        for step in (1, 2, 3):
            save(folder, step, [TensorShard("model.w", (4,), (0,), torch.ones(4))], {"step": step})

    fill()

    def pruned_as_it_is_read(self: LocalStorage, path: str) -> bytes:
        if path == "step-2/manifest.json":
            folder.prune(1, 2)
            folder.storage.remove("step-2")
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "read", pruned_as_it_is_read)
    rows = call("list", str(tmp_path / "kept"))[1]["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(1, "complete"), (3, "complete")], rows
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read", read)
        fill()
    code, told, _ = call("verify", str(tmp_path / "kept"))
    assert (code, told["whole"]) == (0, True) and f"{tmp_path}/kept/step-2" not in told["problems"]
    assert call("verify", str(tmp_path / "kept" / "step-2"))[0] == 2


def test_a_difference_that_is_no_number_is_strict_json(call: Callable[..., Any], tmp_path: Path) -> None:
    for name, values in (("a", torch.tensor([1.0, math.nan])), ("b", torch.tensor([2.0, 3.0]))):
        kept = {"w": values, "kind": values.to(torch.bfloat16 if name == "a" else torch.float32)}
        kept |= {"one": torch.tensor(4.0), "none": torch.zeros(0)}
        parts = [TensorShard(f"model.{k}", tuple(v.shape), (0,) * v.dim(), v) for k, v in kept.items()]
        save(CheckpointFolder(tmp_path / name), 1, parts, {"step": 1})
    code, told, _ = call("diff", str(tmp_path / "a"), str(tmp_path / "b"))
    found = {one["name"]: (one["what"], one["largest"]) for one in told["differences"]}
    assert code == 1 and found == {"model.w": (None, None), "model.kind": ("bfloat16 and float32", 0.0)}


def test_the_command_that_an_import_prints_can_be_pasted(
    call: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("export", NAME, "out")[0] == 0
    run = tmp_path / "back é #1"
    assert run_command(["checkpoint", "import", str(tmp_path / "out"), str(run)]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
    assert words[2] == f"{run}/job.toml" and words[words.index("--init-from") + 1] == str(run)
    assert Run(run).job().data.corpus == str(run / "corpus")


@pytest.mark.parametrize("out", ["file", "file/x", "loop", "\0", "x" * 300, "y" * 5000, "dead", ""])
@pytest.mark.parametrize("verb", ["export", "import", "reshard"])
def test_a_place_that_cannot_be_written_is_a_line(
    call: Callable[..., Any], made: Path, tmp_path: Path, verb: str, out: str
) -> None:
    theirs = made / "theirs"
    if not theirs.exists():
        assert call("export", NAME, str(theirs))[0] == 0
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dead").symlink_to(tmp_path / "file" / "x")
    source = str(theirs) if verb == "import" else NAME
    code, told, lines = call(verb, source, f"{tmp_path}/{out}")
    if verb == "reshard" and out == "":
        assert code == 0 and (tmp_path / "step-4").is_dir()
        return
    assert code == 2 and len(lines) == 1 and told["error"]["exit_code"] == 2, (lines, told)


@pytest.mark.parametrize("verb", ["export", "import", "reshard"])
def test_an_interrupt_leaves_nothing_half(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    assert call("export", NAME, str(tmp_path / "theirs"))[0] == 0
    before = sorted(tmp_path.iterdir())

    def interrupt(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("myriad.checkpoint.foreign.hugging_face.save_file", interrupt)
    monkeypatch.setattr("myriad.checkpoint.checkpoint_files.write_and_check", interrupt)
    source = str(tmp_path / "theirs") if verb == "import" else NAME
    code, told, lines = call(verb, source, "out")
    assert (code, lines) == (130, ["myriad: error: interrupted"]) and told["error"]["exit_code"] == 130
    left = [path for path in tmp_path.rglob("*") if path.name == "manifest.json" or ".partial" in path.name]
    assert left == [] and sorted(p for p in tmp_path.iterdir() if p.name != "out") == before
