"""SparseLoCo (Sarfi et al. 2025): DiLoCo with top-k and 2-bit values, residuals that decay, and no outer momentum.

    python train.py --config configs/sparseloco.py
    python train.py --config configs/sparseloco.py --local.every 10 --compressor.residual-decay 0.999

The share is that of 64 of 4,096 values. Values are selected in each layer; the paper selects them in chunks of 4,096.
"""

from jgc.compress import TopK
from jgc.training.config import Config
from jgc.training.local_config import LocalConfig

COMPRESSOR = TopK(
    alpha=64 / 4096,
    value_code="2bit-codebook",
    residual_decay=0.95,
)


def get_config() -> Config[TopK]:
    """H = 30, outer learning rate 1 without momentum."""
    local = LocalConfig(every=30, outer_learning_rate=1.0, outer_momentum=0.0)
    return Config(compressor=COMPRESSOR, workload="ptb_gpt", local=local)
