"""Commands on checkpoints: locate, convert, reshard, compare, sample, and begin a run with one."""
