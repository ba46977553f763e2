"""signSGD: for every value the sign of the majority of nodes.

    python train.py --config configs/signsgd.py
    python train.py --config configs/signsgd.py --compressor.magnitude 0.001
    python train.py --config configs/signsgd.py --compressor.combine feedback

digits_convnet5: 98.6 % (seed 0; uncompressed 98.6 %), 48.7 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
"""

from jgc.compress import SignSgd
from jgc.training.settings.config import Config


def get_config() -> Config[SignSgd]:
    """Majority vote."""
    return Config(compressor=SignSgd())
