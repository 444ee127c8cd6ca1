"""The command line: one file per verb, each with ``register(app)``. Only this package writes to the terminal.

Large modules are imported only when a verb runs, so that ``myriad --help`` answers at once."""
