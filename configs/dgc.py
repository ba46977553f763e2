"""Deep gradient compression: top 0.1 % with momentum correction, factor masking and a ramp of sparsity.

    python train.py --config configs/dgc.py
    python train.py --config configs/dgc.py --compressor.clip-norm 1 --compressor.strategy warmup   # or fixed

The ramp (25 % of the values, 6.25 %, 1.5625 %, 0.4 %) is as long as the warm-up of other methods.

digits_convnet5: 98.1 % (seed 0; uncompressed 98.6 %), 3.29 kB up from every node in a step (uncompressed
1.56 MB), about two minutes on two cores. cifar10_resnet20: see docs/results/cifar10_compare.
"""

from jgc.compress import Dgc
from jgc.training.settings.config import Config


def get_config() -> Config[Dgc]:
    """alpha = 0.1 % after the ramp, momentum 0.9 on each node, no clipping."""
    return Config(compressor=Dgc())
