"""Configurations of other systems as jobs: Megatron-LM's arguments and DeepSpeed's JSON."""
