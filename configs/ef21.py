"""EF21 (Richtarik et al. 2021): top-k of the changes since the previous step; no residual accumulates.

    python train.py --config configs/ef21.py
    python train.py --config configs/ef21.py --compressor.eta 0.1 --learning-rate 0.1      # EF21-SGDM

EF21-SGDM averages the momentum on each node: the optimiser then has none, and the learning rate is ten times the rate
for momentum 0.9.
digits_convnet5: 93.9 % (seed 0; uncompressed 98.6 %), 3.29 kB up from every node in a step (uncompressed 1.56 MB),
one to three minutes on two cores.
The uncompressed steps before come from the workload, as for the other sparse methods.
"""

from jgc.compress import Ef21
from jgc.training.settings.config import Config


def get_config() -> Config[Ef21]:
    """alpha = 0.1 %, the optimiser's momentum."""
    return Config(compressor=Ef21())
