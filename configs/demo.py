"""DeMo (Peng et al. 2024): the largest DCT coefficients of each node's momentum are sent; the aggregate is a sign.

    python train.py --config configs/demo.py
    python train.py --config configs/demo.py --compressor.k 8 --compressor.magnitude 0.01
    python train.py --config configs/demo.py --compressor.no-sign

digits_convnet5: 98.1 % (seed 0; uncompressed 98.6 %), 15.7 kB up from every node in a step, about a minute on two
cores.

Every value moves by the learning rate times `--compressor.magnitude` in every step: as little as with Adam.
"""

from jgc.compress import Demo
from jgc.training.settings.config import Config


def get_config() -> Config[Demo]:
    """32 coefficients of every 64 x 64 values, decay 0.999, sign times 0.03."""
    return Config(compressor=Demo())
