"""The verb `myriad train` and its output in the terminal."""
