"""One rank of DeepSpeed on CPUs: trains a Hugging Face model two steps, saves, trains one more.

Started by `foreign_checkpoints.py`; needs ``deepspeed`` and ``transformers``.

    RANK=0 WORLD_SIZE=2 ... python benchmarks/checkpoint/foreign_deepspeed.py '{"out": ..., "stage": 3, ...}'
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu"}

import deepspeed
import transformers

torch.set_num_threads(1)
VOCABULARY, SEQUENCE, BATCH = 96, 16, 4


def _model(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
                initializer_range=0.2, tie_word_embeddings=False,
            )
        )  # fmt: skip
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=SEQUENCE, embd_pdrop=0.0,
            initializer_range=0.2, resid_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


def _step(engine: Any, number: int, dp: int) -> None:
    tokens = _tokens(number).chunk(dp)[dist.get_rank()]
    logits = engine(tokens[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters in float32 under their names: of the masters."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(parameter).detach().clone()
        for name, parameter in engine.module.named_parameters()
    }


def main() -> None:
    task = json.loads(sys.argv[1])
    deepspeed.init_distributed("gloo")
    dp = dist.get_world_size()
    model = _model(task["kind"])
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "zero_optimization": {"stage": task["stage"]},
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untrained_optimizer": True,
        **({"bf16": {"enabled": True}} if task["bf16"] else {}),
    }
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    out = Path(task["out"])
    for number in range(2):
        _step(engine, number, dp)
    engine.save_checkpoint(str(out))
    if dist.get_rank() == 0:
        model.config.save_pretrained(out)
    with torch.no_grad():
        logits = engine(_tokens(7)[:, :-1]).logits.float()
    before = _weights(engine)
    _step(engine, 2, dp)
    after = _weights(engine)
    if dist.get_rank() == 0:
        torch.save(logits, out / "logits.pt")
        torch.save({"before": before, "after": after}, out / "next.pt")
    dist.barrier()
    if dist.get_rank() == 0 and task.get("universal"):
        from deepspeed.checkpoint.ds_to_universal import main as convert
        from deepspeed.checkpoint.ds_to_universal import parse_arguments

        sys.argv = [
            "ds_to_universal", "--input_folder", str(out / "global_step2"),
            "--output_folder", str(out / "global_step2_universal"), "--inject_missing_state",
        ]  # fmt: skip
        convert(parse_arguments())
    os._exit(0)


if __name__ == "__main__":
    main()
