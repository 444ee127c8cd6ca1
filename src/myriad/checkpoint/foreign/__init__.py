"""Checkpoints of other training systems: Megatron-LM and DeepSpeed, weights and optimizer state.

archives          files of ``torch.save`` and of torch.distributed.checkpoint, read without trusting them
training_state    what an import needs, whatever the source
megatron_*        Megatron-LM: arguments, names, files of ranks, distributed checkpoints
deepspeed_zero    DeepSpeed: ZeRO 1 to 3, universal checkpoints
"""
