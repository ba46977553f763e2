"""Top-k sparsification with error feedback: the "Sparse GD" of the LGC paper.

The LGC paper cites Strom 2015 for it, a method that sends plus or minus a fixed threshold for each value beyond it. But
the LGC paper describes and measures the selection of the top 0.1 %, as here.

    python train.py --config configs/topk.py

The uncompressed steps before come from the workload, as for lgc_ps.
digits_convnet5: 98.3 % (seed 0; uncompressed 98.6 %), 3.29 kB up from every node in a step (uncompressed 1.56 MB),
under two minutes on two cores.
"""

from jgc.compress import TopK
from jgc.training.settings.config import Config


def get_config() -> Config[TopK]:
    """alpha = 0.1 %, plain residuals; cifar10_resnet20 sets 0.5 % and `momentum_at_once`."""
    return Config(compressor=TopK())
