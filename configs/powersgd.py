"""PowerSGD: every layer as two thin factors, warm from step to step; two all-reduces a step.

    python train.py --config configs/powersgd.py
    python train.py --config configs/powersgd.py --compressor.rank 4
    python train.py --config configs/powersgd.py --compressor.algorithm ring

digits_convnet5: 98.3 % (seed 0; uncompressed 98.6 %), 19.1 kB up from every node in a step (uncompressed 1.56 MB).
The uncompressed steps before come from the workload, as for lgc_ps.
"""

from jgc.compress import PowerSgd
from jgc.training.settings.config import Config


def get_config() -> Config[PowerSgd]:
    """Rank 1, error feedback; the momentum is the optimiser's."""
    return Config(compressor=PowerSgd())
