"""TernGrad: every value is -s, 0 or s, at random, with one scale a layer that all nodes share.

    python train.py --config configs/terngrad.py
    python train.py --config configs/terngrad.py --compressor.clip 0
"""

from jgc.compress import TernGrad
from jgc.training.config import Config


def get_config() -> Config[TernGrad]:
    """Clipped at 2.5 times each layer's root mean square."""
    return Config(compressor=TernGrad())
