"""`python -m jgc COMMAND`, also as `jgc COMMAND`; `jgc --help` lists the commands."""

import sys

from jgc.lab.commands import main

if __name__ == "__main__":
    sys.exit(main())
