"""What runs on each node: the executor, its warm parent, and what they watch."""
