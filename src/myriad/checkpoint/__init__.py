"""Write, verify and load checkpoints in torch.distributed.checkpoint's on-disk format.

session             the checkpoints of one rank of a training run: the face that the trainer uses
checkpoint_files    write, read and compare one checkpoint without a snapshot server: the face that tools use
snapshots/          snapshots in memory: the snapshot server of a node, and its client in each rank
format/             the records and files of a checkpoint
storage/            folders of checkpoints, on a local disk or behind a URL
load/               find, plan and load the state that a run resumes from
foreign/            checkpoints of Hugging Face, Megatron-LM and DeepSpeed
"""
