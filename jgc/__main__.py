"""`python -m jgc COMMAND`: what can be run beside training. `python -m jgc --help` lists the commands."""

import sys

from jgc.lab.commands import main

if __name__ == "__main__":
    sys.exit(main())
