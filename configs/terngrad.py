"""TernGrad: every value is -s, 0 or s, at random, with one scale a layer that all nodes share.

    python train.py --config configs/terngrad.py
    python train.py --config configs/terngrad.py --compressor.clip 0

digits_convnet5: 98.6 % (seed 0; uncompressed 98.6 %), 97.5 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
"""

from jgc.compress import TernGrad
from jgc.training.settings.config import Config


def get_config() -> Config[TernGrad]:
    """Clipped at 2.5 times each layer's root mean square."""
    return Config(compressor=TernGrad())
