"""EGC: the entropy of a layer's gradient decides how many of its values are sent, about 1 in 1,024.

    python train.py --config configs/egc.py
    python train.py --config configs/egc.py --compressor.ratio 256 --compressor.measure-every 0   # once per epoch
    python train.py --config configs/egc.py --compressor.literal   # Algorithm 1 to the letter, with room for all values
    python train.py --config configs/egc.py --schedule validation --data.validation 0.1   # Algorithm 2

The uncompressed steps before come from the workload, as for the other sparse methods; the paper has none.

digits_convnet5: 97.8 % (seed 0; uncompressed 98.6 %), 2.1 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
"""

from jgc.compress import Egc
from jgc.training.settings.config import Config


def get_config() -> Config[Egc]:
    """N = 2 bins, K = 1024, momentum correction, entropy and threshold measured in every step."""
    return Config(compressor=Egc())
