"""Plain JAX to compare with jgc: a `psum`, and top-k with error feedback in twenty lines.

It uses nothing of jgc. Collectives are arguments, so that the benchmark can replace them by local copies.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree


def psum(grads, dtype, hosts, total):
    """The mean of all hosts' gradients as one vector of a dtype."""
    vector, unravel = ravel_pytree(grads)
    mean = total((vector / hosts).astype(dtype)).astype(vector.dtype)
    return unravel(mean)


def topk(grads, residual, share, hosts, gather):
    """The largest 0.1 % of each layer in one gather; the residual is kept for the next step."""
    leaves, tree = jax.tree.flatten(grads)
    values = [g.ravel() + r for g, r in zip(leaves, residual, strict=True)]
    counts = [max(1, round(share * v.size)) for v in values]
    top = [lax.top_k(jnp.abs(v), k)[1] for v, k in zip(values, counts, strict=True)]
    sent = [v[i] for v, i in zip(values, top, strict=True)]
    residual = [v.at[i].set(0) for v, i in zip(values, top, strict=True)]
    words = jnp.concatenate([*top, *(lax.bitcast_convert_type(s, jnp.int32) for s in sent)])
    everyone = gather(words)  # i32[hosts, 2 k]
    half, out, start = words.size // 2, [], 0
    for g, k in zip(leaves, counts, strict=True):
        at = everyone[:, start : start + k]
        what = lax.bitcast_convert_type(everyone[:, half + start : half + start + k], jnp.float32)
        out.append((jnp.zeros(g.size).at[at].add(what) / hosts).reshape(g.shape))
        start += k
    return jax.tree.unflatten(tree, out), residual


def over(axis):
    """The two collectives over a mesh axis: total, gather."""
    return partial(lax.psum, axis_name=axis), partial(lax.all_gather, axis_name=axis)
