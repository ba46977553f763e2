"""Train a network with compressed gradients.

    python train.py --config configs/lgc_ps.py
    python train.py --config configs/lgc_ps.py --help
"""

import sys

from jgc.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
