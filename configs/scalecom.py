"""ScaleCom: the nodes take turns in choosing the top 0.1 % for all, and an all-reduce sums the values.

    python train.py --config configs/scalecom.py
    python train.py --config configs/scalecom.py --compressor.beta 0.1     # low-pass memory, for large batches

The uncompressed steps before come from the workload, as for lgc_ps.

digits_convnet5: 97.8 % (seed 0; uncompressed 98.6 %), 3.29 kB up from the step's leader and 2.7 kB from each
other node in a step (uncompressed 1.56 MB), about two minutes on two cores. cifar10_resnet20: see
docs/results/cifar10_compare.
"""

from jgc.compress import ScaleCom
from jgc.training.settings.config import Config


def get_config() -> Config[ScaleCom]:
    """alpha = 0.1 %, plain error feedback (beta = 1)."""
    return Config(compressor=ScaleCom())
