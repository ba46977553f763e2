"""Invariant 9: a message decodes to the same bits under a different instruction set."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("obstore")

from jgc import compress
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.messages import sha256_of

METHODS = {
    "topk": lambda: compress.topk(alpha=0.1, strategy="fixed", value_code="2bit"),
    "qsgd": lambda: compress.qsgd(bits=4),
    "natural": compress.natural,
    "onebit": compress.onebit,
    "cast": compress.cast,
}


def _coder(name):
    return CompressorCoder(METHODS[name](), {"w": jnp.zeros((40, 50)), "b": jnp.zeros(50)}, 0)


def _digests(words):
    """SHA-256 of the decoded messages, by method."""
    return {
        name: sha256_of(_coder(name).decode(0, {"words": np.array(x, np.uint32)}).tobytes())
        for name, x in words.items()
    }


@pytest.mark.slow
def test_messages_decode_to_the_same_bits_without_avx(tmp_path):
    difference = np.random.default_rng(0).normal(size=2050).astype(np.float32)
    words = {}
    for name in METHODS:
        coder = _coder(name)
        words[name] = coder.encode(0, coder.first(), difference, 7)[0]["words"].tolist()
    path = tmp_path / "words.json"
    path.write_text(json.dumps(words))
    flags = {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    output = subprocess.check_output(
        [sys.executable, __file__, path], env=os.environ | flags | {"JAX_PLATFORMS": "cpu"}, text=True
    )
    assert json.loads(output) == _digests(words)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(_digests(json.load(file))))
