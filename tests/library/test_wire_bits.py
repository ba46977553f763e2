"""Codes in words: every width and every length comes back, and takes what it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default
from hypothesis import given, strategies as st

from jgc.wire import bits
from jgc.wire.bits import ones_at, pack_bits, unpack_bits


def there_and_back(codes, bits):
    """The words of codes, and the codes of the words."""

    @jax.jit
    def run(codes):
        words = pack_bits(codes, bits)
        return words, unpack_bits(words, bits, codes.size)

    return run(codes)


@pytest.mark.parametrize("bits", some_by_default(range(1, 33), [1, 2, 3, 4, 7, 8, 16, 17, 31, 32]))
def test_every_width_roundtrips(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, 77, dtype=np.uint32)
    words, back = there_and_back(codes, bits)
    assert words.dtype == np.uint32 and words.shape == (3 * bits,)
    assert np.array_equal(back, codes)


@pytest.mark.slow
@given(st.integers(0, 200), st.sampled_from([1, 3, 4, 9]), st.integers(0, 2**32 - 1))
def test_every_length_roundtrips(n, bits, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, n, dtype=np.uint32)
    words, back = there_and_back(codes, bits)
    assert words.size == -(-n // 32) * bits
    assert np.array_equal(back, codes)


def test_words_are_full_where_the_number_of_codes_is_a_multiple_of_32():
    assert np.array_equal(pack_bits(np.full(64, 7, np.uint32), 3), np.full(6, 2**32 - 1, np.uint32))
    assert np.array_equal(pack_bits(np.eye(1, 32, 5, dtype=np.uint32)[0], 1), [1 << 5])


@pytest.mark.parametrize("bits", [0, -1, 33])
def test_other_widths_are_an_error(bits):
    with pytest.raises(ValueError, match=f"bits must be 1 to 32, got {bits}"):
        pack_bits(np.zeros(1, np.uint32), bits)
    with pytest.raises(ValueError, match=f"bits must be 1 to 32, got {bits}"):
        unpack_bits(np.zeros(1, np.uint32), bits, 1)


def test_outside_jit():
    codes = np.arange(50, dtype=np.uint32) % 16
    assert np.array_equal(unpack_bits(pack_bits(codes, 4), 4, 50), codes)


@pytest.mark.parametrize(("nodes", "n"), [(1, 1), (3, 100), (11, 700)])
def test_ones_of_several_messages_are_counted(nodes, n):
    codes = np.random.default_rng(n).integers(0, 2, (nodes, n)).astype(np.uint32)
    words = jnp.stack([pack_bits(jnp.asarray(one), 1) for one in codes])
    assert np.array_equal(ones_at(words, n), codes.sum(0))


@pytest.mark.parametrize("bits_", [1, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 1000, 33_000])
def test_words_are_the_same_on_tpu(bits_, n, monkeypatch):
    codes = jnp.asarray(np.random.default_rng(n).integers(0, 2**bits_, n), jnp.uint32)
    words = pack_bits(codes, bits_)
    monkeypatch.setattr(bits, "backend", lambda: "tpu")
    assert np.array_equal(pack_bits(codes, bits_), words)
    assert np.array_equal(unpack_bits(words, bits_, n), codes)
