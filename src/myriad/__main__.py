"""``python -m myriad``: the command line, where the command `myriad` is not on the path."""

from myriad.cli.main import main

if __name__ == "__main__":
    main()
