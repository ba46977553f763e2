from jgc.comm.collectives import *  # noqa: F403
