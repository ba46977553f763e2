"""Top-k sparsification with error feedback: what the LGC paper compares with as "Sparse GD".

The LGC paper cites Strom 2015 for it, whose method sends what exceeds a fixed threshold, as plus or minus the
threshold; what it describes and measures is the selection of the top 0.1 %, which stands here.

    python train.py --config configs/topk.py

The uncompressed steps before are the workload's, the same as for lgc_ps.
digits_convnet5: 98.3 % (seed 0; uncompressed 98.6 %), 3.29 kB up from every node in a step (uncompressed 1.56 MB),
under two minutes on two cores.
"""

from jgc.compress import TopK
from jgc.training.settings.config import Config


def get_config() -> Config[TopK]:
    """alpha = 0.1 %, plain residuals; cifar10_resnet20 sets 0.5 % and momentum at once."""
    return Config(compressor=TopK())
