"""Invariant 9: a message decodes to the same bits under a different instruction set, and a different JAX."""

import json
import os
import subprocess
import sys

import jax
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
    "qsgd, rotated": lambda: compress.qsgd(bits=4, hadamard=64),
    "nvfp4, rotated": lambda: compress.cast(format="nvfp4", hadamard=64),
    "natural": compress.natural,
    "onebit": compress.onebit,
    "cast": compress.cast,
}


SIZES = {"parts of groups": (2050,), "whole groups": (64, 64)}  # of values with a scale; compiled in two ways


def _coder(name):
    method, size = name.split(": ")
    return CompressorCoder(METHODS[method](), {"w": jnp.zeros(SIZES[size])}, 0)


def _words():
    """A message of each method and size."""
    words = {}
    for name in (f"{method}: {size}" for method in METHODS for size in SIZES):
        coder = _coder(name)
        difference = np.random.default_rng(0).normal(size=coder.size).astype(np.float32)
        words[name] = coder.encode(0, coder.first(), difference, 7)[0]["words"].tolist()
    return words


def _decoded(name, words):
    return np.asarray(_coder(name).decode(0, {"words": np.array(words, np.uint32)}))


def _digests(words):
    """SHA-256 of the decoded messages, by method and size."""
    return {name: sha256_of(_decoded(name, x).tobytes()) for name, x in words.items()}


def test_compiled_decoders_have_the_bits_of_single_operations():
    """JAX 0.10.2 moves constant factors under jit (findings/jit_moves_a_constant_factor.sh), later ones do not."""
    for name, words in _words().items():
        compiled = _decoded(name, words)
        with jax.disable_jit():
            assert np.array_equal(compiled, _decoded(name, words)), name


@pytest.mark.slow
@pytest.mark.parametrize("python, flags", [
    (sys.executable, {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2", "JAX_ENABLE_COMPILATION_CACHE": "false"}),
    (os.environ.get("JGC_OTHER_PYTHON", sys.executable), {"XLA_FLAGS": ""}),  # with a different JAX, if that is set
], ids=["without avx", "other python"])  # fmt: skip
def test_messages_decode_to_the_same_bits(python, flags, tmp_path):
    words, path = _words(), tmp_path / "words.json"
    path.write_text(json.dumps(words))
    environment = os.environ | flags | {"JAX_PLATFORMS": "cpu"}
    output = subprocess.check_output([python, __file__, path], env=environment, text=True)
    assert json.loads(output) == _digests(words)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(_digests(json.load(file))))
