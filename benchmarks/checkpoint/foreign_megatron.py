"""One rank of Megatron Core on a CPU: trains two steps, saves a checkpoint, trains one step more.

Started by `foreign_checkpoints.py`. Megatron Core expects CUDA: the few calls of it that a CPU lacks are
replaced before it is imported (current device, random states, synchronisation); its model, its schedules, its
optimizer and its writer of distributed checkpoints are its own. The driver of Megatron-LM
(``megatron/training``) is not in the package: the dictionary of a checkpoint is built here as
``generate_state_dict`` of ``megatron/training/checkpointing.py`` builds it, version 3.0.

    RANK=0 WORLD_SIZE=2 ... python benchmarks/checkpoint/foreign_megatron.py '{"out": ..., "tp": 2, ...}'
"""

import argparse
import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class _CpuEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _cuda_name(kind: str) -> str:
    return kind if "cuda" in kind else kind.replace("torch.", "torch.cuda.")


def _without_cuda() -> None:
    """Replace what Megatron Core asks of CUDA."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.set_device = lambda *_: None
    cuda.current_stream = lambda *_: contextlib.nullcontext()
    cuda.Event = _CpuEvent
    cuda.LongTensor, cuda.IntTensor, cuda.FloatTensor = torch.LongTensor, torch.IntTensor, torch.FloatTensor
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    kind_of = torch.Tensor.type
    tensor.type = lambda self, *args: kind_of(self, *args) if args else _cuda_name(kind_of(self))


_without_cuda()


class _OnCpu(TorchFunctionMode):
    """Every tensor that would be made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "gpt": {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "num_query_groups": 4,
            "position_embedding_type": "learned_absolute", "untie": False, "ffn": 64},
    "llama": {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "num_query_groups": 2,
              "position_embedding_type": "rope", "untie": True, "ffn": 48},
}  # fmt: skip
LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 32, 4, 96, 16, 4


def namespace_of(task: dict[str, Any], case: dict[str, Any]) -> argparse.Namespace:
    """The arguments that Megatron-LM would have saved."""
    return argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=case["ffn"],
        group_query_attention=case["num_query_groups"] != HEADS, num_query_groups=case["num_query_groups"],
        kv_channels=HIDDEN // HEADS, seq_length=SEQUENCE, max_position_embeddings=SEQUENCE,
        position_embedding_type=case["position_embedding_type"], rotary_base=10000, rotary_percent=1.0,
        rotary_interleaved=False, normalization=case["normalization"], norm_epsilon=1e-5,
        swiglu=case["swiglu"], add_bias_linear=case["add_bias_linear"], add_qkv_bias=False,
        bias_gelu_fusion=False, untie_embeddings_and_output_weights=case["untie"],
        padded_vocab_size=VOCABULARY, make_vocab_size_divisible_by=32, hidden_dropout=0.0,
        attention_dropout=0.0, init_method_std=0.02, apply_query_key_layer_scaling=False,
        tensor_model_parallel_size=task["tp"], pipeline_model_parallel_size=task["pp"],
        virtual_pipeline_model_parallel_size=task["vpp"], data_parallel_size=task["dp"],
        context_parallel_size=1, micro_batch_size=BATCH // task["dp"], global_batch_size=BATCH,
        train_iters=10, lr=1e-3, min_lr=1e-3, lr_decay_style="constant", lr_warmup_iters=0,
        optimizer="adam", adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.1, clip_grad=1.0,
        use_distributed_optimizer=task["distributed_optimizer"], bf16=task["bf16"], fp16=False,
        params_dtype=torch.bfloat16 if task["bf16"] else torch.float32, use_legacy_models=False,
        transformer_impl="local", consumed_train_samples=2 * BATCH, iteration=2, seed=1234, save=task["out"],
        ckpt_format=task["format"], model_type=None,
    )  # fmt: skip


def _model_of(task: dict[str, Any], case: dict[str, Any]) -> list[Any]:
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=case["ffn"],
        num_query_groups=case["num_query_groups"], normalization=case["normalization"],
        add_bias_linear=case["add_bias_linear"], gated_linear_unit=case["swiglu"], layernorm_epsilon=1e-5,
        activation_func=torch.nn.functional.silu if case["swiglu"] else torch.nn.functional.gelu,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        tensor_model_parallel_size=task["tp"], pipeline_model_parallel_size=task["pp"],
        virtual_pipeline_model_parallel_size=task["vpp"], bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
        pipeline_dtype=torch.bfloat16 if task["bf16"] else torch.float32, bf16=task["bf16"],
        params_dtype=torch.bfloat16 if task["bf16"] else torch.float32, init_method_std=0.2,
    )  # fmt: skip
    chunks = []
    for chunk in range(task["vpp"] or 1):
        stage = {"vp_stage": chunk} if task["vpp"] else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=not task["vpp"], **stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=not task["vpp"], **stage)
        spec = get_gpt_layer_local_spec(normalization=case["normalization"])
        model = GPTModel(
            config, spec, VOCABULARY, SEQUENCE, pre_process=first, post_process=last,
            share_embeddings_and_output_weights=not case["untie"], parallel_output=True,
            position_embedding_type=case["position_embedding_type"], rotary_base=10000, **stage,
        )  # fmt: skip
        with torch.no_grad():  # so that each vector counts
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    generator = torch.Generator().manual_seed(sum(map(ord, name)))
                    noise = 0.2 * torch.randn(4096, generator=generator)
                    size = parameter.numel()
                    cut = getattr(parameter, "tensor_model_parallel", False)
                    start = parallel_state.get_tensor_model_parallel_rank() * size if cut else 0
                    parameter += noise[start : start + size].to(parameter.dtype)
        chunks.append(model.bfloat16() if task["bf16"] else model)
    return chunks


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.float().mean(), {"loss": output.float().mean().detach()}


def _forward(iterator: Any, model: Any) -> Any:
    tokens = next(iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE)[None].expand_as(inputs)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(inputs, positions, mask, labels=labels), _loss


class Training:
    """A model, its optimizer and its schedule."""

    def __init__(self, task: dict[str, Any], case: dict[str, Any]) -> None:
        self.task = task
        self.bare = _model_of(task, case)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=task["distributed_optimizer"], overlap_grad_reduce=False,
            bucket_size=None, check_for_nan_in_grad=False,
        )  # fmt: skip
        config = self.bare[0].config
        config.finalize_model_grads_func = finalize_model_grads
        if task["vpp"]:  # two pipeline ranks: messages both ways between one pair must not be batched
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        self.chunks = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=bool(index))
            for index, chunk in enumerate(self.bare)
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-3, min_lr=1e-3, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
                adam_eps=1e-8, clip_grad=1.0, bf16=task["bf16"],
                use_distributed_optimizer=task["distributed_optimizer"],
                params_dtype=torch.bfloat16 if task["bf16"] else torch.float32,
            ),
            self.chunks,
        )  # fmt: skip

        for group in self.optimizer.param_groups:  # as OptimizerParamScheduler.step does
            group["weight_decay"] = 0.1 * group["wd_mult"]

    def step(self, number: int) -> None:
        """Train for one iteration."""
        rank, dp = parallel_state.get_data_parallel_rank(), self.task["dp"]
        share = _tokens(number).chunk(dp)[rank].split(1)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=[iter(share) for _ in self.chunks], model=self.chunks,
            num_microbatches=len(share), seq_length=SEQUENCE, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        self.optimizer.step()

    def save(self, arguments: argparse.Namespace) -> None:
        """Save a checkpoint as Megatron-LM's ``save_checkpoint`` does."""
        task = self.task
        state: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": 2}
        folder = Path(task["out"]) / "iter_0000002"
        folder.mkdir(parents=True, exist_ok=True)
        sharded = task["format"] == "torch_dist"
        metadata = {"distrib_optim_sharding_type": task["sharding"], "chained_optim_avoid_prefix": True,
                    "distrib_optim_fully_reshardable_mem_efficient": True}  # fmt: skip
        for index, model in enumerate(self.bare):
            key = "model" if len(self.bare) == 1 else f"model{index}"
            state[key] = model.sharded_state_dict() if sharded else model.state_dict_for_save_checkpoint()
        if sharded:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=metadata)
            dist_checkpointing.save(state, str(folder), content_metadata=metadata)
        else:
            self._save_legacy(state, folder)
        if dist.get_rank() == 0:
            (Path(task["out"]) / "latest_checkpointed_iteration.txt").write_text("2")

    def _save_legacy(self, state: dict[str, Any], folder: Path) -> None:
        tp, pp = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        own = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.task["pp"] > 1 else ""))
        own.mkdir(parents=True, exist_ok=True)
        state["optimizer"] = self.optimizer.state_dict()
        if self.task["distributed_optimizer"]:
            self.optimizer.save_parameter_state(str(own / "distrib_optim.pt"))
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(state, own / "model_optim_rng.pt")

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters in float32, by their global layer: of the masters where there are some."""
        found = {}
        masters = {}
        inner = getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]
        for group, low in zip(
            getattr(inner, "fp32_from_float16_groups", []),
            getattr(inner, "float16_groups", []), strict=True,
        ):  # fmt: skip
            masters |= {id(a): b for a, b in zip(low, group, strict=True)}
        for model in self.bare:
            for name, parameter in model.named_parameters():
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
                found[".".join(parts)] = masters.get(id(parameter), parameter).detach().float().clone()
        return found


def main() -> None:
    task = json.loads(sys.argv[1])
    case = CASES[task["kind"]]
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        task["tp"], task["pp"], virtual_pipeline_model_parallel_size=task["vpp"]
    )
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(1)
    training = Training(task, case)
    training.step(0)
    training.step(1)
    training.save(namespace_of(task, case))
    out = Path(task["out"])
    if dist.get_world_size() == 1:
        with torch.no_grad():
            tokens = _tokens(7)[:, :-1]
            positions = torch.arange(SEQUENCE)[None].expand_as(tokens)
            mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
            torch.save(training.bare[0](tokens, positions, mask), out / "logits.pt")
    before = training.weights()
    training.step(2)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    place = f"tp{tp_rank}_pp{parallel_state.get_pipeline_model_parallel_rank()}"
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save({"before": before, "after": training.weights()}, out / f"next_{place}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with _OnCpu():
        main()
