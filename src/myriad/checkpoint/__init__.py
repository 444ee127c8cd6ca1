"""Write, verify and load checkpoints in torch.distributed.checkpoint's on-disk format."""
