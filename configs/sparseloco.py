"""SparseLoCo (Sarfi et al. 2025): DiLoCo with top-k and 2-bit values, residuals that decay, and no outer momentum.

    python train.py --config configs/sparseloco.py
    python train.py --config configs/sparseloco.py --local.every 10 --compressor.residual-decay 0.999

The 64 largest of every chunk of 4,096 values are sent. Chunks lie within layers. On ptb_gpt it ends at 1.680 nats a
character (3,000 steps, three seeds; AdamW in every step 1.193, a single node 1.411): docs/results/local_steps.
"""

from jgc.compress import TopK
from jgc.training.settings.config import Config
from jgc.training.settings.local_config import LocalConfig

COMPRESSOR = TopK(
    alpha=64 / 4096,
    selection="chunks",
    value_code="2bit-codebook",
    residual_decay=0.95,
)


def get_config() -> Config[TopK]:
    """H = 30, outer learning rate 1 without momentum."""
    local = LocalConfig(every=30, outer_learning_rate=1.0, outer_momentum=0.0)
    return Config(compressor=COMPRESSOR, workload="ptb_gpt", local=local)
