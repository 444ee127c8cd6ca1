"""The command line: one file per verb, each with ``register(app)``; the only code that talks to the screen.

Nothing heavy is imported before a verb runs, so that ``myriad --help`` answers at once.
"""
