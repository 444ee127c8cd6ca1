"""The verb `myriad runs`: many runs in the terminal."""
