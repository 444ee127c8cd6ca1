"""Training of one rank: it builds the engine and the loader, runs the loop, and closes."""
