"""`python -m jgc COMMAND`, also as `jgc COMMAND`; `jgc --help` lists the commands."""

import sys

from jgc.training.requirements import explain

try:
    from jgc.lab.commands import main
except ModuleNotFoundError as error:  # after `pip install jgc` without [train]
    sys.exit(explain(error))

if __name__ == "__main__":
    sys.exit(main())
