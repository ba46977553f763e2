"""`python -m experiments COMMAND`: what pages of docs/results measured once."""

import sys

from jgc.training.requirements import explain

try:
    from experiments.commands import main
except ModuleNotFoundError as error:  # after `pip install -e .` without [train]
    sys.exit(explain(error))

if __name__ == "__main__":
    sys.exit(main())
