"""A codec behind a Hadamard rotation, which spreads outliers before a code of a few bits."""

from jgc.layout.pack import Layers
from jgc.method.exchange import Codec, Payload
from jgc.types import Array, Key
from jgc.wire.hadamard import check_block, rotate, rotate_back


def rotated(codec: Codec, block: int, bucket: int = 0) -> Codec:
    """The codec of rotated vectors; decoded values and means are rotated back. 0 for no rotation.

    Args:
      codec: of every value; its payload is unchanged in form.
      block: values that are rotated together, see `jgc.wire.hadamard`.
      bucket: consecutive values that share a scale, or 0.

    Raises:
      ValueError: a block that is no power of two, or that does not fit the bucket.
    """
    check_block(block)
    if not block:
        return codec
    if bucket and bucket % block and block % bucket:
        raise ValueError(
            f"hadamard must divide the {bucket} values of a scale or be a multiple of them, "
            f"got {block}"
        )

    def encode(key: Key, v: Array, layers: Layers, *agreed: Array) -> Payload:
        return codec.encode(key, rotate(v, block), layers, *agreed)

    def agreeing(agree):
        return lambda v, layers: agree(rotate(v, block), layers)

    def back(decode):
        return lambda *payload_and_layers: rotate_back(decode(*payload_and_layers), block)

    tiled = codec.tiled
    return codec._replace(
        encode=encode,
        decode=back(codec.decode),
        mean=back(codec.mean),
        agree=None if codec.agree is None else agreeing(codec.agree),
        tiled=None if tiled is None else tiled._replace(mean=back(tiled.mean)),
    )
