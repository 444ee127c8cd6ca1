"""If these break: a run that was to begin with given weights begins with others, or in some layouts with
parts of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_case import GPT2, LLAMA, TINY, Kept, exported, random_weights
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus
from typer.testing import CliRunner

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights
from myriad.checkpoint.foreign.safetensors_file import Box, SafetensorsFile, StoredTensor
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import build_app
from myriad.data.corpus import read_batch
from myriad.data.corpus_opening import open_corpora
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.model.definition import Context
from myriad.model.gpt import GPT, build_full
from myriad.run import Run
from myriad.run.event_text import event_text
from myriad.train import worker
from myriad.train.checkpoint_tools.foreign_checkpoints import import_hugging_face
from myriad.train.checkpoint_tools.initial_weights import check_initial

KEYS = ["train.steps=2", "optimizer.warmup_steps=0", "train.threads=1", "layout.micro_batch=2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def overrides_of(model: dict[str, Any]) -> list[str]:
    return [f"model.{key}={json.dumps(value)}" for key, value in (model | {"vocabulary": 320}).items()]


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Callable[..., Run]:
    """Makes the run folder of a small job with these overrides."""

    def make(name: str, model: dict[str, Any], *overrides: str) -> Run:
        run = Run(tmp_path / name)
        overrides = (f"data.corpus={corpus}", *KEYS, *overrides_of(model), *overrides)
        run.create_or_resume(load_job("tiny", overrides))
        return run

    return make


def counted(arguments: list[str]) -> tuple[int, int]:
    """The exit code of a rank, and the bytes of values that it read from safetensors files."""
    files: set[SafetensorsFile] = set()
    read = SafetensorsFile.read

    def kept(self: SafetensorsFile, name: str, box: Box, view: StoredTensor | None = None) -> torch.Tensor:
        files.add(self)
        return read(self, name, box, view)

    SafetensorsFile.read = kept  # type: ignore[method-assign]
    return train_rank(arguments), sum(file.bytes_read for file in files)


def train(run: Run, bytes_read: list[int] | None = None) -> list[float]:
    """The losses. ``bytes_read``: is extended by those of each rank."""
    world = run.job().layout.world
    results = run_ranks(world, counted, [str(run.path)])
    assert [code for code, _ in results] == [0] * world
    if bytes_read is not None:
        bytes_read += [count for _, count in results]
    return [line["loss"] for line in run.read_metrics()]


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == name]


@torch.no_grad()
def loss_of(weights: Kept, run: Run) -> float:
    """Of these weights on the run's first batch, computed without any trainer."""
    job, definition = run.job(), GPT(weights.model, 1)
    layers = build_full(weights.model, 1)
    for prefix, layer in zip(definition.names, layers, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights.read(definition.tied.get(f"{prefix}.{name}", f"{prefix}.{name}")))
    corpora, batch = open_corpora(job.data, job.model.sequence), job.train.global_batch
    rows = torch.from_numpy(read_batch(corpora, corpora.sampler(job.train.seed), range(batch))).long()
    x = rows[:, :-1]
    for layer in layers:
        x = layer(x, Context(targets=rows[:, 1:]))
    return float(x) / rows[:, 1:].numel()


LAYOUTS = [
    ["layout.tp=2"],
    ["layout.pp=2"],
    ["layout.dp=2", "layout.zero=3"],
    ["layout.dp=2", "layout.zero=1", "layout.tp=2", "layout.micro_batch=4"],
    ["layout.pp=2", "layout.virtual_stages=2", "layout.dp=2", "layout.zero=2"],
    ["layout.dp=2", "comm.sync_every=2"],
]


@pytest.mark.parametrize("model", [LLAMA | {"tied": False}, GPT2], ids=["llama", "gpt2"])
def test_every_layout_begins_with_the_same_weights(
    model: dict[str, Any], start: Callable[..., Run], tmp_path: Path
) -> None:
    weights = random_weights(**(model | {"vocabulary": 320}))
    source = exported(weights, tmp_path / "hf", shard_bytes=40_000)
    one = start("one", model, f"train.init_from={source}")
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    expected = train(one)
    assert expected[0] == pytest.approx(loss_of(weights, one), rel=1e-5)
    assert abs(expected[0] - train(start("seed", model))[0]) > 0.1, "not the loss of the seed's weights"
    for number, layout in enumerate(LAYOUTS[2:] if model is not GPT2 else LAYOUTS[:3]):
        run = start(str(number), model, f"train.init_from={source}", *layout)
        bytes_read: list[int] = []
        found = train(run, bytes_read)
        shared = run.job().layout.world if layout[-1] != "comm.sync_every=2" else 1
        tables = 0.15 if layout == ["layout.pp=2"] else 0.0  # both stages have the tied embedding
        assert max(bytes_read) <= size * (1 / shared + tables + 0.01), "no more than the rank's share"
        assert found[0] == pytest.approx(expected[0], rel=1e-5), layout
        if layout[-1] != "comm.sync_every=2":
            assert found == pytest.approx(expected, rel=1e-5), layout
        (told,) = events(run, "weights")
        assert told["source"] == str(source) and told["kind"] == "hugging_face" and "differs" not in told
        assert [event["event"] for event in run.read_events()][:3] == ["corpus", "weights", "start"]


@pytest.mark.parametrize(
    "keys", [["train.precision=bfloat16"], ["layout.dp=2", "comm.sync_every=2"]], ids=["bfloat16", "alone"]
)
def test_nothing_keeps_the_seed_s_weights(keys: list[str], start: Callable[..., Run], tmp_path: Path) -> None:
    """Neither what is computed with, where that is a rounded copy, nor what replicas that train alone compare
    with: without learning, everything stays as it was given."""
    weights = random_weights(**(LLAMA | {"vocabulary": 320}))
    source = exported(weights, tmp_path / "hf")
    run = start("run", LLAMA, f"train.init_from={source}", "optimizer.learning_rate=1e-9", *keys)
    assert train(run)[0] == pytest.approx(loss_of(weights, run), rel=5e-3)
    for name, tensor in load_model(CheckpointFolder(run.checkpoints_path).of_step(2)).items():
        torch.testing.assert_close(tensor, weights.read(name), atol=1e-6, rtol=1e-6)


def test_imported_weights_and_those_of_a_run_begin_the_same(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    model = TINY | {"activation": "relu2"}
    weights = random_weights(**(model | {"vocabulary": 320}))
    source = exported(weights, tmp_path / "hf")
    import_hugging_face(source, tmp_path / "imported")
    direct = start("direct", model, f"train.init_from={source}")
    expected = train(direct)
    layout = ["layout.tp=2", "layout.pp=2"]
    by_run = start("by-run", model, f"train.init_from={tmp_path / 'imported'}", *layout)
    by_step = start("by-step", model, f"train.init_from={tmp_path / 'imported' / 'checkpoints' / 'step-0'}")
    for run in (by_run, by_step):
        assert train(run) == pytest.approx(expected, rel=1e-5)
        (told,) = events(run, "weights")
        assert told["kind"] == "checkpoint" and told["source"].endswith("step-0")
    later = start("later", model, f"train.init_from={direct.path}", "optimizer.learning_rate=1e-9")
    trained = load_model(CheckpointFolder(direct.checkpoints_path).of_step(2))
    assert train(later)[0] == pytest.approx(loss_of(Kept(weights.model, trained), later), rel=1e-5)
    assert abs(train(later)[0] - expected[0]) > 1e-3, "the optimizer had moved them"


def test_an_imported_run_can_itself_be_trained(
    corpus: Path, start: Callable[..., Run], tmp_path: Path
) -> None:
    weights = random_weights(**(LLAMA | {"vocabulary": 320}))
    source = exported(weights, tmp_path / "hf")
    import_hugging_face(source, tmp_path / "imported")
    run = Run(tmp_path / "imported")
    shutil.copytree(corpus, run.path / "corpus")
    job = load_job(str(run.job_path), ["train.steps=2", "train.threads=1"])
    run.create_or_resume(job)
    assert train(run)[0] == pytest.approx(loss_of(weights, run), rel=2e-3), "in bfloat16 where that is native"
    assert CheckpointFolder(run.checkpoints_path).steps() == [0, 2]


def test_a_resumed_run_does_not_need_the_initial_weights(start: Callable[..., Run], tmp_path: Path) -> None:
    source = exported(random_weights(**(LLAMA | {"vocabulary": 320})), tmp_path / "hf")
    run = start("run", LLAMA, f"train.init_from={source}")
    first = train(run)
    shutil.rmtree(source)
    job = load_job(str(run.job_path), ["train.steps=4"])
    check_initial(run, job)
    run.create_or_resume(job)
    assert train(run)[:2] == first and len(run.read_metrics()) == 4
    assert len(events(run, "weights")) == 1 and events(run, "resume")[0]["step"] == 2
    with pytest.raises(BadInputError, match=r"train\.init_from = \"elsewhere\": .*cannot change"):
        run.check(load_job(str(run.job_path), ["train.init_from=elsewhere"]))


def test_other_training_of_the_same_shapes_is_reported(start: Callable[..., Run], tmp_path: Path) -> None:
    """A longer rotary base or a shorter window may be meant; the user should not have to find out by the
    loss."""
    source = exported(random_weights(**(LLAMA | {"vocabulary": 320})), tmp_path / "hf")
    run = start("run", LLAMA | {"rotary_base": 1e6}, f"train.init_from={source}")
    train(run)
    (told,) = events(run, "weights")
    assert told["differs"] == {"model.rotary_base": [5e5, 1e6]}


def test_another_tokenizer_than_that_of_the_weights_is_reported(
    start: Callable[..., Run], corpus: Path, tmp_path: Path
) -> None:
    """Its tokens are other words: nothing else would say so."""
    source = exported(random_weights(**(LLAMA | {"vocabulary": 320})), tmp_path / "hf")
    shutil.copyfile(corpus / "tokenizer.json", source / "tokenizer.json")
    import_hugging_face(source, tmp_path / "imported")
    other = make_corpus(tmp_path, "other", seed=2, vocabulary=290)
    for number, kept in enumerate((source, tmp_path / "imported")):
        same = start(f"same-{number}", LLAMA, f"train.init_from={kept}")
        told = start(f"told-{number}", LLAMA, f"train.init_from={kept}", f"data.corpus={other}")
        for run in (same, told):
            train(run)
        assert "differs" not in events(same, "weights")[0]
        fingerprints = [open_corpora(run.job().data, 24).fingerprint for run in (same, told)]
        assert events(told, "weights")[0]["differs"] == {"tokenizer": fingerprints}


@pytest.mark.parametrize("layout", [[], ["layout.tp=2", "layout.dp=2", "layout.zero=1"]], ids=str)
def test_prediction_layers_that_the_weights_lack_are_those_of_a_new_run(
    layout: list[str], start: Callable[..., Run], tmp_path: Path
) -> None:
    """A published model is trained further with more predictions, and a run with them without."""
    model, still = LLAMA | {"prediction_layers": 1}, ["optimizer.learning_rate=1e-9", "train.steps=1"]
    weights = random_weights(**(LLAMA | {"vocabulary": 320}))
    source = exported(weights, tmp_path / "hf")
    run = start("run", model, f"train.init_from={source}", *layout, *still)
    check_initial(run, run.job())
    train(run)
    assert events(run, "weights")[0]["drawn_prediction_layers"] == 1
    assert "1 prediction layer drawn by train.seed" in event_text(events(run, "weights")[0])
    trained = load_model(CheckpointFolder(run.checkpoints_path).of_step(1))
    drawn = dict(build_full(run.job().model, run.job().train.seed)[-1].named_parameters())
    for name, tensor in trained.items():
        own = name.removeprefix("head.")
        expected = drawn[own] if own.startswith("predictions.") else weights.read(name)
        torch.testing.assert_close(tensor, expected.detach(), atol=1e-6, rtol=1e-6)
    without = start("without", LLAMA, f"train.init_from={run.path}", *still)
    train(without)
    assert events(without, "weights")[0]["unused_prediction_layers"] == 1
    kept = load_model(CheckpointFolder(without.checkpoints_path).of_step(1))
    assert kept.keys() == weights.shapes.keys()


def test_exports_leave_the_loads_of_the_last_batch_out(start: Callable[..., Run], tmp_path: Path) -> None:
    """A run that begins with an export begins with equal loads, and one without the key ignores them."""
    model = LLAMA | {"experts": 4, "tied": False, "balance_scope": "batch"}
    weights = random_weights(**(model | {"vocabulary": 320}))
    source = exported(weights, tmp_path / "hf")
    loads = {name for name in weights.shapes if name.endswith("batch_loads")}
    assert len(loads) == 2 and HuggingFaceWeights(source).shapes.keys() == weights.shapes.keys() - loads
    run = start("run", model, f"train.init_from={source}", "train.steps=1")
    train(run)
    assert "drawn_prediction_layers" not in events(run, "weights")[0]
    trained = load_model(CheckpointFolder(run.checkpoints_path).of_step(1))
    for name in loads:
        assert float(trained[name].sum()) == pytest.approx(4) and trained[name].max() > 1
    without = start("without", model | {"balance_scope": "sequence"}, f"train.init_from={run.path}")
    check_initial(without, without.job())


OTHERS = [
    ({"ffn_hidden": 64}, r"blocks\.0\.mlp\.up\.weight is \(128, 32\) here, \(96, 32\) there \(and 3 more\)"),
    ({"layers": 3}, r"blocks\.2\.norm1\.weight is \(32,\) here, nothing there"),
    ({"layers": 1}, r"blocks\.1\.norm1\.weight is nothing here, \(32,\) there"),
    ({"tied": False}, r"head\.output\.weight is \(320, 32\) here, nothing there$"),
    ({"heads": 8, "kv_heads": 4}, r"model\.heads is 8 here, 4 there"),
    (
        {"activation": "gelu", "ffn_hidden": 96, "layers": 2},
        r"blocks\.0\.mlp\.down\.weight is \(32, 96\) here",
    ),
    ({"position": "none", "rotary_base": 1e4}, r"model\.position is none here, rotary there"),
]


@pytest.mark.parametrize("kind", ["hugging_face", "run"])
@pytest.mark.parametrize(("keys", "told"), OTHERS, ids=str)
def test_weights_of_another_model_are_refused_before_a_rank_starts(
    kind: str, keys: dict[str, Any], told: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exported(random_weights(**(LLAMA | {"vocabulary": 320})), tmp_path / "source")
    if kind == "run":
        import_hugging_face(source, tmp_path / "imported")
        source = tmp_path / "imported"
    monkeypatch.chdir(tmp_path)
    options = [f"--{key}" for key in [f"data.corpus={corpus}", *KEYS, *overrides_of(LLAMA | keys)]]
    done = CliRunner().invoke(build_app(), ["train", "tiny", "--init-from", str(source), *options])
    assert isinstance(done.exception, BadInputError) and "\n" not in str(done.exception)
    with pytest.raises(BadInputError, match=told):
        raise done.exception
    assert str(done.exception).startswith(f'train.init_from = "{source}": weights of another model: ')
    assert not (tmp_path / "runs").exists()


def test_a_norm_of_queries_and_keys_of_another_kind_is_refused(corpus: Path, tmp_path: Path) -> None:
    """RMSNorm and LayerNorm without biases have weights of the same shapes."""
    keys = LLAMA | {"vocabulary": 320, "qk_norm": "head"}
    source = exported(random_weights(**keys), tmp_path / "source")
    options = overrides_of(keys | {"qk_norm_kind": "layer"})
    words = [f"--{key}" for key in [f"data.corpus={corpus}", *KEYS, *options]]
    run = tmp_path / "run"
    done = CliRunner().invoke(
        build_app(), ["train", "tiny", "--run", str(run), "--init-from", str(source), *words]
    )
    assert "model.qk_norm_kind is layer here, rms there" in str(done.exception)
    assert not run.exists()


def test_what_holds_no_weights_is_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    empty = start("empty", LLAMA)
    for name, told in [
        (
            str(tmp_path / "nowhere"),
            r"must be a run .*, a folder of checkpoints, one checkpoint \(step-N\), .*, or a Hugging Face",
        ),
        (str(empty.path), "no checkpoint yet"),
    ]:
        job = load_job(str(empty.job_path), [f"train.init_from={name}"])
        with pytest.raises(BadInputError, match=told):
            check_initial(Run(tmp_path / "new"), job)


def test_a_damaged_source_is_refused_by_every_rank_in_one_line(
    start: Callable[..., Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import_hugging_face(
        exported(random_weights(**(LLAMA | {"vocabulary": 320})), tmp_path / "hf"), tmp_path / "source"
    )
    (path,) = (tmp_path / "source" / "checkpoints" / "step-0").glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    run = start("run", LLAMA, f"train.init_from={tmp_path / 'source'}", "layout.dp=2")
    assert run_ranks(2, worker.main, [str(run.path)]) == [2, 2]
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("myriad: error:")]
    assert len(told) == 2 and all("train.init_from" in line and "its bytes changed" in line for line in told)
