"""The records and files of a checkpoint.

stored_shard           one shard of a tensor, as it is in a snapshot and in a file
checkpoint_manifest    ``manifest.json``: every file, shard and hash
dcp_archive            what torch needs around the bytes of a shard
dcp_metadata           the ``.metadata`` file of torch.distributed.checkpoint
run_state              tensors that a run stores beside the model: progress and random generators
"""
