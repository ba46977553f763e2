"""A type for values that are equal on all devices although JAX cannot know it."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jgc.types import Array

# a primitive, so that the type stays where JAX traces a program again, as in `lax.cond`
_equal = Primitive("equal_on_all")
_equal.def_impl(lambda x, axes: x)
mlir.register_lowering(_equal, lambda ctx, x, axes: [x])
batching.defvectorized(_equal)


@_equal.def_abstract_eval
def _type(x: Any, axes: tuple[str, ...]) -> Any:
    return x.update(manual_axis_type=x.mat.update(varying=x.mat.varying - set(axes)))


def equal_on_all(x: Array, axes: tuple[str, ...]) -> Array:
    """x as a value that does not vary along `axes`.

    The caller knows that it is equal on all devices along them, or that they are vmapped axes.
    """
    return _equal.bind(x, axes=axes)
