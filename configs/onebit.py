"""1-bit SGD: signs and two scales a layer, with error feedback.

    python train.py --config configs/onebit.py
    python train.py --config configs/onebit.py --compressor.bucket 512

digits_convnet5: 98.3 % (seed 0; uncompressed 98.6 %), 48.8 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
"""

from jgc.compress import OneBit
from jgc.training.settings.config import Config


def get_config() -> Config[OneBit]:
    """Two scales for each layer."""
    return Config(compressor=OneBit())
