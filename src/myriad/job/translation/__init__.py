"""Convert configurations of other systems to jobs: Megatron-LM's arguments and DeepSpeed's JSON."""
