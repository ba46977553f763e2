"""What makes the tests quick: XLA compiles with little effort, and LGC's autoencoder is narrow.

Nearly all of the tests' time goes into compiling. pytest and every Python process that a test starts import this
module. library/test_autoencoder.py tests the filters of the paper's Tables I and II, under `paper_filters`.
"""

import jax

from jgc.compress.lgc import autoencoder

# XLA's older code generator compiles in 40 % of the time. Later versions have the newer one alone.
HAS_OLDER_GENERATOR = jax.__version_info__ < (0, 11)

# The same HLO but for fusions; slower code.
XLA_FLAGS = {
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
if HAS_OLDER_GENERATOR:
    XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"

PAPER_FILTERS = autoencoder.ENCODER_FILTERS, autoencoder.DECODER_FILTERS
# With the paper's filters one phase of lgc_ps trains for 50 s in the contract suite.
autoencoder.ENCODER_FILTERS, autoencoder.DECODER_FILTERS = (4, 8, 8, 4), (4, 4, 8, 8, 4)
