"""LGC as printed: `PAPER_RECIPE` against a NumPy transcription of equations (2) to (16), the ring's likewise.

What the transcription has of jgc are the initial weights, the node that leads, and differences 1, 4, 9, 11 and 12 (at
the leader's positions 7, too) of `jgc.compress.lgc.server`.
"""

import functools

import jax
import numpy as np
import pytest
from contract import some_by_default
from lgc_helpers import PARAMS, K, nodes_of

import jgc
from jgc.compress import PAPER_RECIPE, RING_PAPER_RECIPE, lgc_ps, lgc_ring
from jgc.compress.lgc.ring import draw_leader
from jgc.layout.pack import make_packing, pack

SIZES, COUNTS, M = (160, 80, 10), (16, 8, 1), 32  # values and selected values of each layer; these padded
INNOVATIONS = (2, 1, 1)  # 10 % of each layer's selected values, at least one
RATE, MOMENTUM, LAMBDA_1, LAMBDA_2 = 0.001, 0.9, 1.0, 0.5
PHASES = ("dense", "top-k", "top-k", "compressed", "compressed")
SETTINGS = {"warmup_steps": 1, "autoencoder_steps": 2, "alpha": 0.1, "factor_masking": True}
METHODS = {
    "server": lgc_ps(**PAPER_RECIPE, **SETTINGS),
    "server, leader's positions": lgc_ps(**PAPER_RECIPE, **SETTINGS, positions="leader"),
    "ring": lgc_ring(**RING_PAPER_RECIPE, **SETTINGS),
}


# --- Tables I and II ------------------------------------------------------------------------------------------------


def layers_of(params, decoder):
    """Kernel and bias of each layer, in their order; a decoder begins with its deconvolutions."""
    names = sorted(params["params"], key=lambda name: (name[:5] != "ConvT" if decoder else 0, name))
    return [params["params"][name] for name in names]


class Net:
    """1-D convolutions with their gradients: (kernel [k, c, f], stride, dilation of the input, padding) and biases."""

    def __init__(self, params, decoder: bool, linear: bool = False):
        layers = layers_of(params, decoder)
        self.kernels = [np.array(layer["kernel"], float) for layer in layers]
        self.biases = [np.array(layer["bias"], float) for layer in layers]
        last = len(layers) - 1
        if decoder:  # SAME: a deconvolution multiplies the length by its stride
            self.how = [(1, 1, (1, 1)), *[(1, 2, (2, 1))] * (last - 1), (1, 1, (0, 0))]
        else:
            self.how = [*[(2, 1, (0, 1))] * last, (1, 1, (0, 0))]

    def forward(self, x, innovation=None):
        """[l, c] -> [l', c'], and what the gradients need."""
        kept = []
        for i, (kernel, bias, (stride, dilation, pad)) in enumerate(
            zip(self.kernels, self.biases, self.how, strict=True)
        ):
            last = i == len(self.kernels) - 1
            if last and innovation is not None:
                x = np.concatenate([x, innovation], axis=1)
            wide = np.zeros(((len(x) - 1) * dilation + 1 + sum(pad), x.shape[1]))
            wide[pad[0] : len(wide) - pad[1] : dilation] = x
            at = np.arange(0, len(wide) - len(kernel) + 1, stride)[:, None] + np.arange(len(kernel))
            y = np.einsum("lkc,kcf->lf", wide[at], kernel) + bias
            slope = np.ones_like(y) if last else np.where(y < 0, 0.01, 1.0)  # leaky ReLU
            kept.append((wide, at, slope))
            x = y * slope
        return x, kept

    def backward(self, kept, error):
        """Gradients of kernels and biases, and of the input, for the gradient of the output."""
        kernels, biases = [], []
        for kernel, (_, dilation, pad), (wide, at, slope) in zip(
            self.kernels[::-1], self.how[::-1], kept[::-1], strict=True
        ):
            error = error[:, : kernel.shape[2]] * slope  # without that of the innovation, which is data
            kernels.insert(0, np.einsum("lkc,lf->kcf", wide[at], error))
            biases.insert(0, error.sum(0))
            back = np.zeros_like(wide)
            np.add.at(back, at, np.einsum("lf,kcf->lkc", error, kernel))
            error = back[pad[0] : len(back) - pad[1] : dilation]
        return kernels, biases, error

    def descend(self, *gradients):
        """SGD at 0.001 on sums of gradients."""
        for kernels, biases in gradients:
            for mine, g in zip(self.kernels + self.biases, kernels + biases, strict=True):
                mine -= RATE * g


# --- equations (2) to (16) ------------------------------------------------------------------------------------------


def largest(v, sizes, counts):
    """Positions of each layer's largest magnitudes, ascending."""
    starts = np.cumsum((0, *sizes))[:-1]
    return np.concatenate([
        np.sort(start + np.argsort(-np.abs(v[start : start + size]), kind="stable")[:count])
        for start, size, count in zip(starts, sizes, counts, strict=True)
    ])  # fmt: skip


def column(x):
    return np.pad(x, (0, M - len(x)))[:, None]


def innovation(x):
    """g_k^I of (2): the largest selected values of each layer, zeros elsewhere."""
    out, at = np.zeros_like(x), largest(x, COUNTS, INNOVATIONS)
    out[at] = x[at]
    return out


def train_server(encoder, decoders, x, leader):
    """One step of SGD on (7) from the selected values x [K, mu]."""
    codes, kept = zip(*(encoder.forward(column(g)) for g in x), strict=True)  # (3), of all nodes
    of_code = [LAMBDA_2 * 4 * sum(codes[k] - codes[m] for m in range(K)) for k in range(K)]  # gradient of (5)
    for k, decoder in enumerate(decoders):
        decoded, layers = decoder.forward(codes[leader], column(innovation(x[k])))  # (4)
        *gradient, into = decoder.backward(layers, LAMBDA_1 * 2 * (decoded - column(x[k])))  # of (6)
        of_code[leader] = of_code[leader] + into
        decoder.descend(gradient)
    encoder.descend(*[encoder.backward(one, error)[:2] for one, error in zip(kept, of_code, strict=True)])


def decode_server(encoder, decoders, x, leader):
    """(12): what the decoders make of the leader's code and their nodes' innovations, of each node."""
    code, _ = encoder.forward(column(x[leader]))
    return [d.forward(code, column(innovation(g)))[0][: x.shape[1], 0] for d, g in zip(decoders, x, strict=True)]


def train_ring(encoder, decoders, x, leader):
    """One step of SGD on (11)."""
    codes, kept = zip(*(encoder.forward(column(g)) for g in x), strict=True)  # (8)
    decoded, layers = decoders[0].forward(np.mean(codes, axis=0))  # (9), (10)
    *gradient, into = decoders[0].backward(layers, 2 * (decoded - column(x.mean(0))))
    decoders[0].descend(gradient)
    encoder.descend(*[encoder.backward(one, into / K)[:2] for one in kept])


def decode_ring(encoder, decoders, x, leader):
    """(17) to (19): one mean for all nodes."""
    code = np.mean([encoder.forward(column(g))[0] for g in x], axis=0)
    return [decoders[0].forward(code)[0][: x.shape[1], 0]] * K


def leader_of(name, key):
    return int(draw_leader(key, nodes_of())) if name == "ring" else 0


def transcription(name, gradients, keys, weights):
    """Weights of the model after every step, velocities and residuals [K, n]; the encoder and the decoders."""
    train, decode = (train_ring, decode_ring) if name == "ring" else (train_server, decode_server)
    encoder = Net(weights.encoder, decoder=False)
    if name == "ring":
        decoders = [Net(weights.decoder, decoder=True)]
    else:
        decoders = [Net(jax.tree.map(lambda w, k=k: w[k], weights.decoders), decoder=True) for k in range(K)]
    u, r, w, out = np.zeros((K, sum(SIZES))), np.zeros((K, sum(SIZES))), np.zeros(sum(SIZES)), []
    for phase, g, key in zip(PHASES, gradients, keys, strict=True):
        u = MOMENTUM * u + g
        v, leader, step = r + u, leader_of(name, key), np.zeros(sum(SIZES))
        if phase == "dense":
            step, r = v.mean(0), np.zeros_like(v)  # (14)
        else:
            at = np.stack([largest(v[k if name == "server" else leader], SIZES, COUNTS) for k in range(K)])
            x = np.take_along_axis(v, at, axis=1)
            sent = x if phase == "top-k" else decode(encoder, decoders, x, leader)
            np.add.at(step, at, np.asarray(sent) / K)  # (13), (15), (16)
            if phase == "top-k":
                train(encoder, decoders, x, leader)
            r, u = v.copy(), u.copy()
            for values in (r, u):
                np.put_along_axis(values, at, 0, axis=1)  # sent: its error is lost, its velocity starts again
        w = w - step
        out.append((w, u, r))
    return out, [encoder, *decoders]


# --- jgc ------------------------------------------------------------------------------------------------------------


def flat(tree):
    return np.asarray(pack(jax.tree.map(jax.numpy.asarray, tree), make_packing(PARAMS)), float)


def stacked(tree):
    return np.stack([flat(jax.tree.map(lambda x, k=k: x[k], tree)) for k in range(K)])


def gradients(steps):
    random = np.random.default_rng(0)
    return [jax.tree.map(lambda x: random.normal(size=(K, *x.shape)).astype(np.float32), PARAMS) for _ in range(steps)]


@functools.cache
def step_of(name, phase):
    return jax.jit(jgc.compress.step_on_nodes(METHODS[name].aggregate, phase, nodes_of()))


@functools.cache
def first_state(name):
    init = jax.jit(lambda key: METHODS[name].init(key, PARAMS, nodes_of()))
    return jax.tree.map(np.asarray, init(jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_default(METHODS, ("server", "ring")))
def test_paper_recipe_is_the_papers_equations(name):
    came, keys, state = gradients(len(PHASES)), jax.random.split(jax.random.key(1), len(PHASES)), first_state(name)
    expected, nets = transcription(name, [stacked(g) for g in came], keys, state.shared.autoencoder.weights)
    w = np.zeros(sum(SIZES))
    for phase, g, key, (theirs, u, r) in zip(PHASES, came, keys, expected, strict=True):
        aggregated, state, _ = step_of(name, phase)(key, g, state)
        w = w - flat(aggregated)
        np.testing.assert_allclose(w, theirs, atol=1e-5, err_msg=phase)
        np.testing.assert_allclose(state.local.memory.velocity, u, atol=1e-5)
        np.testing.assert_allclose(state.local.memory.residual, r, atol=1e-5)
    for net, trained, start in zip(nets, networks(name, state), networks(name, first_state(name)), strict=True):
        for i, (layer, before) in enumerate(zip(trained, start, strict=True)):
            for mine, theirs, first in (
                (layer["kernel"], net.kernels[i], before["kernel"]),
                (layer["bias"], net.biases[i], before["bias"]),
            ):
                moved = mine - first
                assert np.abs(moved).max() > 0
                np.testing.assert_allclose(moved, theirs - first, atol=0.02 * np.abs(moved).max())


def networks(name, state):
    """Layers of the encoder, then of each decoder, in jgc's state."""
    weights = state.shared.autoencoder.weights
    if name == "ring":
        decoders = [weights.decoder]
    else:
        decoders = [jax.tree.map(lambda w, k=k: w[k], weights.decoders) for k in range(K)]
    return [layers_of(weights.encoder, decoder=False), *(layers_of(one, decoder=True) for one in decoders)]


def test_a_residual_counts_once():
    """Algorithm 1 to the letter adds g_l, which contains g_acc, to g_acc: it doubles in every step."""
    g, steps = gradients(1)[0], 20
    state, letter = first_state("server"), np.zeros((K, sum(SIZES)))
    for _ in range(steps):
        letter = letter + (stacked(g) + letter)  # where nothing is sent
        _, state, _ = step_of("server", "compressed")(jax.random.key(0), g, state)
    u = [stacked(g) * sum(MOMENTUM**i for i in range(t + 1)) for t in range(steps)]
    quiet = np.abs(state.local.memory.velocity - u[-1]) < 1e-4  # never sent
    assert quiet.any() and np.abs(letter[quiet]).max() > 1e4
    residual = np.asarray(state.local.memory.residual)
    np.testing.assert_allclose(residual[quiet], sum(u)[quiet], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_innovations_are_the_largest_of_each_layer_and_do_not_replace_what_is_decoded():
    name = "server, leader's positions"
    state, g = first_state(name), gradients(1)[0]
    x = stacked(g)[:, largest(stacked(g)[0], SIZES, COUNTS)]
    overwritten = lgc_ps(**{**PAPER_RECIPE, **SETTINGS, "overwrite": True, "positions": "leader"})
    step = jax.jit(jgc.compress.step_on_nodes(overwritten.aggregate, "compressed", nodes_of()))
    (mean, *_), (other, *_) = (s(jax.random.key(0), g, state) for s in (step_of(name, "compressed"), step))
    at = largest(stacked(g)[0], SIZES, COUNTS)
    moved = np.flatnonzero(np.abs(flat(mean) - flat(other))[at] > 1e-6)
    assert set(moved) == set(np.flatnonzero(sum(innovation(values) != 0 for values in x)))
    sent = {m.field: m.bytes for m in METHODS[name].wire("compressed", PARAMS, nodes_of()).logical
            if (m.role, m.direction) == ("worker", "up")}  # fmt: skip
    assert sent["innovations"] == 4 * sum(INNOVATIONS)
