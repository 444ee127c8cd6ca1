"""Checkpoints of other systems: Hugging Face (weights), Megatron-LM and DeepSpeed (with optimizer state).

hugging_face      folders in Hugging Face's layout, read and written; `_config` and `_names` map both ways
archives          files of ``torch.save`` and of torch.distributed.checkpoint, read without trusting them
training_state    what an import needs, for any source
megatron_*        Megatron-LM: arguments, names, files of ranks, distributed checkpoints
deepspeed_zero    DeepSpeed: ZeRO 1 to 3, universal checkpoints
"""
