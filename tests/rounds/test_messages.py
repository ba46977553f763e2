"""What a reader says of objects that are no messages of its run."""

import numpy as np
import pytest

from jgc.rounds.messages import BadObject, packed_message, read_message

FIELDS = {"words": np.arange(4, dtype=np.uint32)}


def _message(run="run", node="a", number=3, fields=FIELDS, secret=None, tokens=5):
    return packed_message(run, node, "life", number, tokens, "digest", fields, secret)


def _read(data, secret=None):
    return read_message(data, "run", "a", 3, FIELDS, secret)


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_a_message_is_read_as_it_was_written(secret):
    message = _read(_message(secret=secret), secret)
    assert (message.node, message.round, message.tokens, message.theta) == ("a", 3, 5, "digest")
    np.testing.assert_array_equal(message.fields["words"], FIELDS["words"])


@pytest.mark.parametrize("data, text", [
    (b"", "truncated"), (_message()[:100], "wrong checksum"), (_message()[:-1], "wrong checksum"),
    (b"x" * 99, "not an object"), (_message(run="other"), "of a different run, other"),
    (_message(node="b"), "node b for round 3"), (_message(number=2), "round 2, not of a for 3"),
    (_message(fields={"words": np.zeros(5, np.uint32)}), "other settings.*uint32.5.*uint32.4"),
    (_message(secret=b"s"), "signed: set"), (_message(tokens=-1), "tokens"),
])  # fmt: skip
def test_what_is_no_message_is_one_line(data, text):
    with pytest.raises(BadObject, match=text) as error:
        _read(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data, text", [(_message(), "unsigned"), (_message(secret=b"t"), "a different secret")])
def test_with_a_secret_other_seals_are_refused(data, text):
    with pytest.raises(BadObject, match=text):
        _read(data, b"s")


def test_any_flipped_bit_is_seen():
    data = _message()
    for at in range(len(data)):
        with pytest.raises(BadObject):
            _read(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
