"""If these break: a checkpoint of Megatron-LM or DeepSpeed trains on with other weights or moments than it
had, or a file from elsewhere runs code, fills the memory or reads what is not the checkpoint's."""

import json
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_case import (
    GPT,
    KINDS,
    LLAMA,
    arguments_of,
    deepspeed_state,
    megatron_state,
    write_deepspeed,
    write_megatron,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.foreign.archives import DcpFolder, read_archive
from myriad.checkpoint.foreign.megatron_args import model_of_arguments
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT as Definition
from myriad.model.gpt import build_full
from myriad.run import Run
from myriad.train.checkpoint_tools.foreign_checkpoints import foreign_state, import_foreign

LAYOUTS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "gpt": (GPT, {}),
    "gpt, tp 2, pp 2": (GPT, {"tp": 2, "pp": 2}),
    "llama, tp 2, pp 2, 2 chunks, bf16": (LLAMA, {"tp": 2, "pp": 2, "chunks": 2, "low": True}),
    "llama, tp 2, distributed optimizer": (LLAMA, {"tp": 2, "spread": True, "low": True}),
    "gpt, pp 2, distributed optimizer": (GPT, {"pp": 2, "spread": True}),
}


def same(folder: Path, ours: dict[str, Any], config: Path | None = None) -> None:
    state = foreign_state(folder, config)
    for kind in KINDS:
        for name, values in ours[kind].items():
            assert torch.equal(state.read(kind, name), values), (kind, name)


@pytest.mark.parametrize("model, layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_megatron_ranks_give_every_weight_and_moment(
    model: ModelConfig, layout: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = megatron_state(model)
    same(write_megatron(tmp_path / "from", model, theirs, **layout), ours)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """``[S, heads, D]`` as ``apply_rotary_pos_emb`` turns it: halves of a head."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(half) / half)[None]
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def megatron_attention(
    w: dict[str, torch.Tensor], layer: int, x: torch.Tensor, model: ModelConfig
) -> torch.Tensor:
    """``get_query_key_value_tensors`` and ``DotProductAttention`` of ``megatron/core/transformer``."""
    at, width, groups = f"decoder.layers.{layer}.self_attention", model.head_width, model.num_kv_heads
    each = model.heads // groups
    mixed = torch.nn.functional.linear(x, w[f"{at}.linear_qkv.weight"], w.get(f"{at}.linear_qkv.bias"))
    mixed = mixed.view(len(x), groups, (each + 2) * width)
    q, k, v = mixed.split([each * width, width, width], -1)
    q = q.reshape(len(x), model.heads, width)
    if model.qk_norm == "head":
        q, k = (megatron_norm(w, f"{at}.{name}_layernorm", one) for name, one in (("q", q), ("k", k)))
    if model.position == "rotary":
        q, k = (
            torch.cat([rotated(one[..., : model.rotary_width]), one[..., model.rotary_width :]], -1)
            for one in (q, k)
        )
    k, v = (one.repeat_interleave(each, 1) for one in (k, v))
    scores = torch.einsum("snd,tnd->nst", q, k) / width**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("nst,tnd->snd", scores.softmax(-1), v).reshape(len(x), -1)
    return torch.nn.functional.linear(out, w[f"{at}.linear_proj.weight"], w.get(f"{at}.linear_proj.bias"))


def megatron_norm(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm has no bias."""
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    if bias is None:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def megatron_logits(w: dict[str, torch.Tensor], tokens: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    F = torch.nn.functional
    norm = partial(megatron_norm, w)
    x = w["embedding.word_embeddings.weight"][tokens]
    if model.position == "learned":
        x = x + w["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(model.layers):
        at = f"decoder.layers.{layer}"
        x = x + megatron_attention(w, layer, norm(f"{at}.input_layernorm", x), model)
        h = F.linear(
            norm(f"{at}.pre_mlp_layernorm", x),
            w[f"{at}.mlp.linear_fc1.weight"],
            w.get(f"{at}.mlp.linear_fc1.bias"),
        )
        h = F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1] if model.activation == "swiglu" else F.gelu(h)
        x = x + F.linear(h, w[f"{at}.mlp.linear_fc2.weight"], w.get(f"{at}.mlp.linear_fc2.bias"))
    table = "embedding.word_embeddings.weight" if model.tied else "output_layer.weight"
    return F.linear(norm("decoder.final_layernorm", x), w[table])


QK_NORM: dict[str, Any] = {"qk_norm": "head", "qk_norm_kind": "layer", "qk_norm_bias": True}
NORMED = {
    "llama, qk_layernorm": LLAMA.model_copy(update={"qk_norm": "head"}),
    "layer norms, qk_layernorm, add_qkv_bias": LLAMA.model_copy(
        update=QK_NORM | {"norm": "layer", "norm_bias": True, "attention_bias": "qkv"}
    ),
    "gpt, qk_layernorm": GPT.model_copy(update=QK_NORM | {"attention_bias": "all"}),
    "half a head rotated": LLAMA.model_copy(update={"rotary_fraction": 0.5, "qk_norm": "head"}),
    "gpt, rope": GPT.model_copy(update={"position": "rotary", "attention_bias": "all"}),
}


@pytest.mark.parametrize("model", [GPT, LLAMA, *NORMED.values()], ids=["gpt", "llama", *NORMED.keys()])
@torch.no_grad()
def test_an_imported_model_gives_megatrons_logits(model: ModelConfig, tmp_path: Path) -> None:
    _, theirs = megatron_state(model)
    weights = {name: 0.4 * values for name, values in theirs["weights"].items()}
    state = foreign_state(write_megatron(tmp_path, model, theirs | {"weights": weights}, tp=2))
    layers, tokens = build_full(state.model, 1).eval(), torch.arange(16) * 7
    for prefix, layer in zip(Definition(state.model, 1).names, layers, strict=True):
        for name, parameter in layer.named_parameters():
            if f"{prefix}.{name}" in state.mappings:
                parameter.copy_(state.read("weights", f"{prefix}.{name}"))
    x: Any = tokens[None]
    for layer in layers[:-1]:
        x = layer(x, Context())
    expected = megatron_logits(weights, tokens, model)
    assert expected.std() > 0.3, "logits that could differ"
    torch.testing.assert_close(layers[-1].logits(x)[0], expected, atol=2e-5, rtol=1e-5)


def test_a_distributed_checkpoint_gives_every_weight_and_moment(tmp_path: Path) -> None:
    """Layers stacked, norms named by the Transformer Engine, as ``torch_dist`` keeps them."""
    ours, theirs = megatron_state(LLAMA)
    stored: dict[str, torch.Tensor] = {}
    prefixes = {
        "weights": "",
        "exp_avg": "optimizer.state.exp_avg.",
        "exp_avg_sq": "optimizer.state.exp_avg_sq.",
    }
    for kind, prefix in prefixes.items():
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, values in theirs[kind].items():
            rest = name.split(".", 3)[3] if ".layers." in name else ""
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            stacks.setdefault(f"decoder.layers.{rest}" if rest else name, []).append(values)
        for name, parts in stacks.items():
            stored[prefix + name] = torch.stack(parts) if ".layers." in name else parts[0]
    folder = tmp_path / "iter_0000006"
    dcp.save(stored, checkpoint_id=folder, no_dist=True)
    common = {"args": arguments_of(LLAMA), "iteration": 6, "checkpoint_version": 3.0}
    common["optimizer"] = {"state": {"common_step": torch.tensor(6.0)}, "param_groups": []}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    same(tmp_path, ours)
    common["optimizer"]["param_state_sharding_type"] = "dp_reshardable"
    torch.save(common, folder / "common.pt")
    with pytest.raises(BadInputError, match=r"dp_reshardable.*--weights-only"):
        import_foreign(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    "stage, universal, low", [(1, False, False), (2, False, True), (3, False, False), (2, True, False)]
)
def test_deepspeed_gives_every_weight_and_moment(
    stage: int, universal: bool, low: bool, tmp_path: Path
) -> None:
    model = LLAMA.model_copy(update={"vocabulary_multiple": 64})
    ours, theirs = deepspeed_state(model)
    same(write_deepspeed(tmp_path, model, theirs, stage=stage, universal=universal, low=low, ranks=3), ours)


def test_an_import_is_a_run_that_stands_at_the_step_of_the_source(tmp_path: Path) -> None:
    ours, theirs = megatron_state(GPT)
    done = import_foreign(write_megatron(tmp_path / "from", GPT, theirs, pp=2), tmp_path / "run")
    run = Run(tmp_path / "run")
    job = run.job()
    assert job is not None and job.optimizer.beta2 == 0.95 and job.train.steps == 10
    assert (done["step"], done["optimizer_steps"], done["samples"]) == (6, 6, 24)
    where = CheckpointFolder(run.checkpoints_path).at_step(6).where
    assert torch.equal(
        load_model(where, "optimizer.exp_avg.")["head.norm.bias"], ours["exp_avg"]["head.norm.bias"]
    )
    weights = import_foreign(tmp_path / "from", tmp_path / "bare", weights_only=True)
    assert weights["step"] == 0 and not weights["optimizer"]


class Evil:
    """Runs a command where it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"model": Evil(mark)}, tmp_path / "evil.pt")
    with pytest.raises(BadInputError, match=r"posix\.system"):
        read_archive(tmp_path / "evil.pt", "K")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(BadInputError, match=r"posix\.system"):
        DcpFolder(tmp_path, "K")
    assert not mark.exists()


def test_a_packed_or_cut_file_and_a_link_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data/0", bytes(2**20))
    torch.save({"a": torch.ones(9)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:300])
    (tmp_path / "link.pt").symlink_to(tmp_path / "whole.pt")
    for name, reason in {"bomb.pt": "packed", "cut.pt": "torch.save", "link.pt": "must be a file"}.items():
        with pytest.raises(BadInputError, match=reason):
            read_archive(tmp_path / name, "K")


def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    _, theirs = megatron_state(GPT)
    folder = write_megatron(tmp_path, GPT, theirs)
    path = folder / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["embedding.word_embeddings.weight"] = torch.zeros(1, 1).expand(2**20, 2**20)
    torch.save(content, path)
    with pytest.raises(BadInputError, match="repeats its elements"):
        foreign_state(folder)


@pytest.mark.parametrize(
    "key, value",
    [
        ("optimizer", {"state": {0: 1}, "param_groups": [3]}),
        ("optimizer", {"state": {0: {}}, "param_groups": [{"params": [0], "wd_mult": 1.0}]}),
        ("args", 7),
        ("iteration", "six"),
        ("model", [1, 2]),
        ("model", {"decoder.layers.0.input_layernorm.weight": "text"}),
    ],
)
def test_content_of_another_form_is_refused_in_one_line(key: str, value: Any, tmp_path: Path) -> None:
    _, theirs = megatron_state(GPT)
    folder = write_megatron(tmp_path, GPT, theirs)
    path = folder / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False) | {key: value}, path)
    with pytest.raises(BadInputError) as refused:
        foreign_state(folder)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("CHECKPOINT = ")


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "..", ""])
def test_a_tag_that_leads_elsewhere_is_refused(tag: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(BadInputError, match="must name a folder beside it"):
        foreign_state(tmp_path)


def test_a_file_of_metadata_outside_the_folder_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "__0_0.distcp").write_bytes((tmp_path / "dcp" / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../__0_0.distcp"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInputError, match="file of this folder"):
        DcpFolder(tmp_path / "dcp", "K").read("a")


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize(
    ("owner", "name", "accepted"),
    [
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", True),
        (_MEM_FORMAT_ENCODING, "__class__", False),
        (Metadata, "__init__", False),
    ],
)
def test_metadata_of_an_older_python_is_read_and_reaches_no_other_attribute(
    owner: type, name: str, accepted: bool, tmp_path: Path
) -> None:
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Attribute(owner, name)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if accepted:
        assert DcpFolder(tmp_path, "K").read("a").tolist() == [1.0] * 4
    else:
        with pytest.raises(BadInputError, match="reads an attribute of another class"):
            DcpFolder(tmp_path, "K")


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    _, theirs = megatron_state(GPT)
    folder = write_megatron(tmp_path, GPT, theirs, tp=2, pp=2)
    lost = folder / "iter_0000006" / "mp_rank_01_000"
    for file in lost.iterdir():
        file.unlink()
    lost.rmdir()
    with pytest.raises(BadInputError, match="tensor-parallel rank 1, pipeline rank 0"):
        foreign_state(folder)


def test_master_weights_in_another_order_are_refused(tmp_path: Path) -> None:
    _, theirs = megatron_state(LLAMA)
    folder = write_megatron(tmp_path, LLAMA, theirs, spread=True, low=True)
    path = folder / "iter_0000006" / "mp_rank_00" / "distrib_optim.pt"
    content = torch.load(path, weights_only=False)
    flat = next(iter(content[0].values()))
    flat["param"] = flat["param"].roll(64)
    torch.save(content, path)
    with pytest.raises(BadInputError, match="does not round to it"):
        foreign_state(folder)


LATENT_ARGUMENTS = {"multi_latent_attention": True, "group_query_attention": False, "qk_layernorm": True}


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"num_experts": 8}, "num_experts must be off"),
        ({"rotary_percent": 0.0, "position_embedding_type": "rope"}, "rotary_percent must be above 0"),
        ({"qk_l2_norm": True}, "qk_l2_norm must be off"),
        ({"num_layers": 10**9 + 2**30}, "num_layers must be a whole number"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
    ],
)
def test_arguments_without_a_counterpart_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInputError, match=problem):
        model_of_arguments(vars(arguments_of(GPT, **changes)), "K")


@pytest.mark.parametrize(
    "changes, problem",
    [
        (LATENT_ARGUMENTS, "latent attention .* whose weights are not read"),
        ({"mtp_num_layers": 1}, "prediction layers .* whose weights are not read"),
    ],
)
def test_layers_whose_weights_are_not_read_are_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    _, theirs = megatron_state(LLAMA)
    with pytest.raises(BadInputError, match=problem):
        foreign_state(write_megatron(tmp_path, LLAMA, theirs, **changes))


def test_norms_that_are_stored_minus_one_get_it_back(tmp_path: Path) -> None:
    """Those of queries and keys too, also where a distributed optimizer holds the weights."""
    model = NORMED["llama, qk_layernorm"]
    ours, theirs = megatron_state(model)
    state = foreign_state(
        write_megatron(tmp_path, model, theirs, tp=2, spread=True, layernorm_zero_centered_gamma=True)
    )
    for name, values in ours["weights"].items():
        is_norm = name.endswith("norm.weight") or ".norm" in name
        assert torch.equal(state.read("weights", name), values + 1 if is_norm else values), name
        assert torch.equal(state.read("exp_avg", name), ours["exp_avg"][name]), name
