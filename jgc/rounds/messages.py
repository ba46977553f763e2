"""Objects of a bucket as bytes: a header in JSON, arrays, and a seal over both.

    magic "JGCR", version u8, signed u8, length of the header u32    all little-endian
    header                                                           JSON
    arrays                                                           one by one, C order
    seal, 32 bytes               SHA-256 of all before, or HMAC-SHA256 with the run's secret

With a secret nothing unsigned is read. Nothing is unpickled: a header names dtypes and shapes, and
a reader compares both with the expected ones before it reads a payload.
"""

import hashlib
import hmac
import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jgc.rounds.arithmetic import Arrays

SECRET = "JGC_ROUNDS_SECRET"  # the environment variable
_START = struct.Struct("<4sBBI")
_MAGIC, _VERSION, _SEAL = b"JGCR", 1, 32
_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32")

Header = dict[str, Any]


class BadObject(Exception):
    """An object that is not counted; the text says in one line why."""


class Message(NamedTuple):
    """A node's message of a round, checked."""

    node: str
    incarnation: str  # the process that speaks for the node
    round: int  # its round
    tokens: int  # its weight
    theta: str  # digest of the shared state from which the sender started
    fields: Arrays  # the payload's arrays
    sha256: str  # of the whole object, in hexadecimal
    size: int  # of the whole object in bytes
    attempt: int = 0  # which of the node's names it has (see `names.message_name`)


def secret_of_environment() -> bytes | None:
    """The run's secret, or None if the variable JGC_ROUNDS_SECRET is not set or empty."""
    return os.environ.get(SECRET, "").encode() or None


def sealed(header: Header, arrays: Arrays, secret: bytes | None) -> bytes:
    """The bytes of an object.

    Example:
      >>> data = sealed({"kind": "here"}, {"x": np.float32([1])}, secret=b"s")
      >>> opened(data, b"s")
      ({'kind': 'here'}, {'x': array([1.], dtype=float32)})
    """
    parts = {name: _little(x) for name, x in arrays.items()}
    described = {name: [x.dtype.name, list(x.shape)] for name, x in parts.items()}
    text = json.dumps({"header": header, "arrays": described}, separators=(",", ":")).encode()
    start = _START.pack(_MAGIC, _VERSION, secret is not None, len(text))
    body = b"".join([start, text, *(x.tobytes() for x in parts.values())])
    return body + _seal(body, secret)


def opened(data: bytes, secret: bytes | None) -> tuple[Header, Arrays]:
    """Header and arrays of an object, read-only views. BadObject unless authentic and whole."""
    if len(data) < _START.size + _SEAL:
        raise BadObject(f"truncated: {len(data)} bytes")
    magic, version, signed, length = _START.unpack_from(data)
    if magic != _MAGIC:
        raise BadObject(f"not an object of jgc.rounds: it begins with {data[:4]!r}")
    if version != _VERSION:
        raise BadObject(f"format {version}, and this jgc reads format {_VERSION}")
    if secret is not None and not signed:
        raise BadObject(f"unsigned, and this process has a secret ({SECRET})")
    if secret is None and signed:
        raise BadObject(f"signed: set the run's secret in {SECRET}")
    body, seal = data[:-_SEAL], data[-_SEAL:]
    # compares in constant time
    if not hmac.compare_digest(seal, _seal(body, secret)):
        other = "signed with a different secret, or truncated" if secret else "truncated or changed"
        raise BadObject(f"{other}: {len(data)} bytes with a wrong checksum")
    try:
        text = json.loads(body[_START.size : _START.size + length])
        if not isinstance(text["header"], dict):
            raise TypeError("it is no JSON object")
        return text["header"], _arrays(body, _START.size + length, text["arrays"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadObject(f"a header that cannot be read ({type(error).__name__}: {error})") from None


def packed_message(
    run: str, node: str, incarnation: str, number: int, tokens: int, theta: str, fields: Arrays,
    secret: bytes | None,
) -> bytes:  # fmt: skip
    """The bytes of a node's message of round `number`."""
    header = {
        "kind": "message", "run": run, "node": node, "incarnation": incarnation, "round": number,
        "tokens": tokens, "theta": theta,
    }  # fmt: skip
    return sealed(header, fields, secret)


def read_message(
    data: bytes, run: str, node: str, number: int, shapes: Mapping[str, Any], secret: bytes | None
) -> Message:
    """The message of a node in a round. BadObject for other runs, nodes, rounds or fields."""
    header, fields = opened(data, secret)
    check_header(header, "message", run)
    if (header.get("node"), header.get("round")) != (node, number):
        raise BadObject(
            f"the message of node {header.get('node')} for round {header.get('round')}, not of "
            f"{node} for {number}"
        )
    tokens, theta, incarnation = (header.get(x) for x in ("tokens", "theta", "incarnation"))
    if not (isinstance(tokens, int) and 0 <= tokens < 2**53):
        raise BadObject(f"tokens must be a number of at least 0, got {tokens!r}")
    if not (isinstance(theta, str) and isinstance(incarnation, str)):
        raise BadObject("a header without digest or incarnation")
    wanted = {name: (np.dtype(x.dtype).name, tuple(x.shape)) for name, x in shapes.items()}
    sent = {name: (x.dtype.name, x.shape) for name, x in fields.items()}
    if sent != wanted:
        raise BadObject(
            f"other settings: it has the fields {_described(sent)}, not {_described(wanted)}"
        )
    return Message(node, incarnation, number, tokens, theta, fields, sha256_of(data), len(data))


def check_header(header: Header, expected: str, run: str) -> None:
    """Raise BadObject unless an object is of this kind and run."""
    if header.get("kind") != expected:
        raise BadObject(f"a {header.get('kind')}, not a {expected}")
    if header.get("run") != run:
        raise BadObject(f"of a different run, {header.get('run')}")


def sha256_of(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _seal(body: bytes, secret: bytes | None) -> bytes:
    return hashlib.sha256(body).digest() if secret is None else hmac.digest(secret, body, "sha256")


def _little(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype.name not in _DTYPES:
        raise TypeError(
            f"an array of {x.dtype} does not fit into an object; there are {', '.join(_DTYPES)}"
        )
    return x.astype(x.dtype.newbyteorder("<"), copy=False)


def _arrays(body: bytes, at: int, described: Mapping[str, Any]) -> Arrays:
    arrays = {}
    for name, (dtype, shape) in described.items():
        if dtype not in _DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"array {name} of {dtype} {shape}")
        count, little = math.prod(shape), np.dtype(dtype).newbyteorder("<")
        if count > len(body):
            raise ValueError(f"array {name} of {count} values in {len(body)} bytes")
        arrays[name] = np.frombuffer(body, little, count, at).reshape(shape)
        at += arrays[name].nbytes
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes more than its arrays have")
    return arrays


def _described(fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    forms = [f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in fields.items()]
    return ", ".join(forms) or "(none)"
