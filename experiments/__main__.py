"""`python -m experiments COMMAND`: what pages of docs/results measured once."""

import sys

from experiments.commands import main

if __name__ == "__main__":
    sys.exit(main())
