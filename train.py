"""Train a network with compressed gradients.

    python train.py --method lgc_ps
    python train.py --method lgc_ps --help
"""

import sys

from jgc.training.requirements import explain

try:
    from jgc.training.settings.cli import main
except ModuleNotFoundError as error:  # after `pip install jgc` without [train]
    sys.exit(explain(error))

if __name__ == "__main__":
    sys.exit(main())
