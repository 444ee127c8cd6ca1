"""If these fail, a name that --help offers does not work, or a recipe is not the model it is named after."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from myriad.errors import BadInputError
from myriad.job import load_job, recipe_names
from myriad.planner import scale_cluster
from myriad.recipes.cluster import load_cluster
from myriad.run import Run


@pytest.mark.parametrize("name", [name for name in recipe_names("jobs") if name != "sft"])
def test_every_job_can_be_planned_as_it_is(name: str) -> None:
    assert load_job(name).name == name


QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


def test_fine_tuning_takes_its_model_from_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    job = load_job("sft", [f"train.init_from={tmp_path}", "model.dropout=0.1"])
    assert (job.model.qk_norm, job.model.kv_heads, job.model.ffn_hidden) == ("head", 2, 96)
    assert (job.model.sequence, job.model.dropout, job.data.documents) == (2048, 0.1, "packed")
    run = Run(tmp_path / "run")
    run.create_or_resume(job)
    again = load_job("sft", [f"train.init_from={run.path}", "model.sequence=512"])
    assert again.model == job.model.model_copy(update={"sequence": 512})


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "unheard of"}'])
def test_fine_tuning_without_a_known_model_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInputError, match=r"train\.init_from|model_type"):
        load_job("sft", [f"train.init_from={tmp_path}"])
    with pytest.raises(BadInputError, match="a run, one of its checkpoints, or a Hugging Face folder"):
        load_job("sft")


@pytest.mark.parametrize("name", recipe_names("models"))
def test_every_model_fits_the_smallest_job(name: str) -> None:
    load_job("tiny", [f"model={name}"])


@pytest.mark.parametrize(
    ("name", "world", "parameters"),
    [
        ("gpt2-124m", 8, 124e6),
        ("gpt2-1558m", 8, 1558e6),
        ("gpt-13b", 32, 12.8e9),
        ("megascale-175b-256", 256, 175e9),
        ("megascale-175b-12288", 12288, 175e9),
        ("megascale-530b", 2240, 530e9),
        ("llama3-8b", 64, 8.03e9),
        ("llama3-70b", 1024, 70.6e9),
        ("llama3-405b", 8192, 405e9),
        ("megascale-moe-352b", 1440, 352e9),
        ("tiny-3d", 8, 0.23e6),
    ],
)
def test_published_jobs_have_the_published_size(name: str, world: int, parameters: float) -> None:
    job = load_job(name)
    assert job.layout.world == world
    assert job.model.num_parameters() == pytest.approx(parameters, rel=0.01)


def test_the_window_of_megascale_saves_what_its_mfu_implies() -> None:
    """The comment in the recipe says 1.1 % of FLOPs."""
    windowed = load_job("megascale-175b-256").model.flops_per_token()
    full = load_job("megascale-175b-256", ["model.window=off"]).model.flops_per_token()
    assert 1 - windowed / full == pytest.approx(0.011, abs=0.001)


@pytest.mark.parametrize(
    ("gpus", "tokens_per_second", "mfu"), [(240, 272.9e3, 0.3248), (1440, 1407.7e3, 0.2789)]
)
def test_the_shared_expert_of_megascale_moe_is_what_its_mfu_implies(
    gpus: int, tokens_per_second: float, mfu: float
) -> None:
    """The comment in the recipe derives it from published MFU, which counts causal attention."""
    model = load_job("megascale-moe-352b").model
    causal = model.flops_per_token() - 6 * model.layers * model.hidden * model.sequence
    assert causal == pytest.approx(mfu * 989e12 * gpus / tokens_per_second, rel=0.002)


@pytest.mark.parametrize("name", recipe_names("clusters"))
def test_every_cluster_states_what_a_planner_needs(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.accelerator.memory_bytes > 2**30
    assert (cluster.links.network is not None) == (cluster.nodes > 1)
    sized = re.search(r"-(\d+)x[a-z]", name)
    assert sized is None or cluster.world == int(sized.group(1))


@pytest.mark.parametrize("name", recipe_names("accelerators"))
def test_every_accelerator_can_be_put_in_a_cluster(name: str) -> None:
    cluster = load_cluster("one-node-8xh100", [f"accelerator={name}"])
    assert cluster.accelerator.peak_flops_per_second > 1e14
    assert cluster.accelerator.float32_flops_per_second is not None


def test_an_accelerator_by_name_takes_own_values_on_top() -> None:
    cluster = load_cluster("one-node-8xh100", ["accelerator.memory_bytes=40 GB"])
    assert cluster.accelerator.memory_bytes == 40 * 10**9
    assert cluster.accelerator.name == "H100 SXM 80 GB"


def test_a_rate_is_of_one_network_port() -> None:
    shared = load_cluster("vegiant-32xv100-100g", ["links.ib=800Gbps"])  # one port for eight
    assert shared.links.network is not None and shared.links.network.bytes_per_second == 12.5e9
    own = load_cluster("megascale-256xa100", ["links.network=25GB/s", "links.nvlink=450GB/s"])
    assert own.links.network is not None and own.links.network.bytes_per_second == 25e9
    assert own.links.node.bytes_per_second == 450e9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("accelerator=b1000", "one of a100-sxm-40gb, a100-sxm-80gb, a800-sxm-80gb, b200-sxm-180gb"),
        ("links.ib=200", "with its unit"),
        ("links.ib=fast", "Gbps"),
        ("links.spine=100Gbps", "only links.node, links.network"),
        ("nodes=0", "must be at least 1"),
        ("colour=blue", "unknown key"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(change: str, words: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(words)):
        load_cluster("megascale-256xa100", [change])


def test_a_misspelt_key_is_named_and_not_only_the_one_that_is_then_missing(tmp_path: Path) -> None:
    text = resources.files("myriad").joinpath("recipes", "clusters", "one-node-8xh100.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace("nodes =", "noodes =", 1))
    with pytest.raises(BadInputError, match=r"noodes = 1: unknown key; did you mean nodes\?"):
        load_cluster(str(tmp_path / "own.toml"))


def test_a_cluster_is_scaled_by_nodes() -> None:
    cluster = load_cluster("megascale-256xa100")
    assert scale_cluster(cluster, 512).nodes == 64
    assert scale_cluster(cluster, 4).world == 4
    for count in (0, 12):
        with pytest.raises(BadInputError, match="--gpus"):
            scale_cluster(cluster, count)
    with pytest.raises(BadInputError, match=r"no links\.network"):
        scale_cluster(load_cluster("one-node-8xh100"), 16)
