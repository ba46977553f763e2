"""Codes in words: every width and every length comes back, and takes what it should."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgc.wire.bits import pack_bits, packed_words, unpack_bits


def there_and_back(codes, bits):
    """The words of codes, and the codes of the words."""

    @jax.jit
    def run(codes):
        words = pack_bits(codes, bits)
        return words, unpack_bits(words, bits, codes.size)

    return run(codes)


@pytest.mark.parametrize("bits", range(1, 33))
def test_every_width_roundtrips(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, 77, dtype=np.uint32)
    words, back = there_and_back(codes, bits)
    assert words.dtype == np.uint32 and words.shape == (packed_words(77, bits),)
    assert np.array_equal(back, codes)


@given(st.integers(0, 200), st.sampled_from([1, 3, 4, 9]), st.integers(0, 2**32 - 1))
def test_every_length_roundtrips(n, bits, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, n, dtype=np.uint32)
    words, back = there_and_back(codes, bits)
    assert words.size == packed_words(n, bits) == -(-n // 32) * bits
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
