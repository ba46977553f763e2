"""1-bit SGD: signs and two scales a layer, with error feedback.

    python train.py --config configs/onebit.py
    python train.py --config configs/onebit.py --compressor.bucket 512
"""

from jgc.compress import OneBit
from jgc.training.config import Config


def get_config() -> Config[OneBit]:
    """Two scales for each layer."""
    return Config(compressor=OneBit())
