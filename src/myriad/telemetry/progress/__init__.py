"""The current activity of each rank: the progress page of a node, and the position of a GPU."""
