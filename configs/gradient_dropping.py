"""Gradient dropping: the top 1 % of each node's whole gradient, by one threshold over all layers.

    python train.py --config configs/gradient_dropping.py
    python train.py --config configs/gradient_dropping.py --compressor.scope layer

The uncompressed steps before come from the workload, as for lgc_ps; --compressor.strategy fixed has none.

digits_convnet5: 98.3 % (seed 0; uncompressed 98.6 %), 20.9 kB up from every node in a step (uncompressed
1.56 MB), about two minutes on two cores. cifar10_resnet20: see docs/results/cifar10_compare.
"""

from jgc.compress import GradientDropping
from jgc.training.settings.config import Config


def get_config() -> Config[GradientDropping]:
    """alpha = 1 %, plain residuals; cifar10_resnet20 sets 0.5 % and `momentum_at_once`."""
    return Config(compressor=GradientDropping())
