"""What makes the tests quick: XLA compiles with little effort, and LGC's autoencoder is narrow.

Nearly all of the tests' time goes into compiling. pytest and every Python process that a test starts import this
module. library/test_autoencoder.py tests the filters of the paper's Tables I and II, under `paper_filters`.
"""

from jgc.compress.lgc import autoencoder
from jgc.lab.chaos.tiny import HAS_OLDER_GENERATOR as HAS_OLDER_GENERATOR, XLA_FLAGS as XLA_FLAGS, narrow

PAPER_FILTERS = autoencoder.ENCODER_FILTERS, autoencoder.DECODER_FILTERS
# With the paper's filters one phase of lgc_ps trains for 50 s in the contract suite.
narrow()
