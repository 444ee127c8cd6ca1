"""``python -m myriad.train.worker RUN``: one rank of a run that `myriad train`, torchrun or Slurm started."""

import sys

from myriad.errors import MyriadError
from myriad.run import Run
from myriad.train.loop import Trainer

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Trains; gives the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m myriad.train.worker RUN\n")
        return 2
    run = Run(arguments[0])
    try:
        trainer = Trainer(run)
        trainer.train()
    except MyriadError as error:
        sys.stderr.write(f"myriad: error: {error}\n")
        return error.exit_code
    finally:
        run.flush_lines()
    trainer.close()
    return trainer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
