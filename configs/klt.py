"""Transform coding in learned bases: a few coefficients for the part that nodes have in common, top-k for the rest.

    python train.py --config configs/klt.py
    python train.py --config configs/klt.py --compressor.share 0.05 --compressor.refresh 0

digits_convnet5: 98.3 % with --compressor.share 0.002 --compressor.alpha 0.0005 (seed 0; uncompressed 98.6 %), 3.06 kB
up from every node in a step (uncompressed 1.56 MB). In longer training it has not beaten topk:
docs/results/codecs.md.
"""

from jgc.compress import Klt
from jgc.training.settings.config import Config


def get_config() -> Config[Klt]:
    """1 % of the coefficients in 8 bits, 0.1 % of the rest; the uncompressed steps before come from the workload."""
    return Config(compressor=Klt())
