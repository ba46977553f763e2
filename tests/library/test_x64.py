"""With 64 bits switched on, as other parts of a program may want them, methods keep and send what they do without."""

import jax
import jax.numpy as jnp
import optax
import pytest
from contract import some_by_default

import jgc
from jgc.compress import METHODS, build

PARAMS = {
    "Conv_0": {"kernel": jnp.zeros((3, 3, 4, 8), jnp.float32)},
    "Dense_1": {"kernel": jnp.zeros((40, 60), jnp.float32), "bias": jnp.zeros(60, jnp.float32)},
}


@pytest.fixture
def sixty_four_bits():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def kept_and_sent(compressor, nodes):
    state = jax.eval_shape(lambda key: compressor.init(key, PARAMS, nodes), jax.random.key(0))
    wires = [compressor.wire(phase.value, PARAMS, nodes) for phase in compressor.schedule]
    return jax.tree.map(lambda x: (x.shape, x.dtype), state), [(w.physical, w.logical, w.once) for w in wires]


LEARNED = {"value_code": "1bit", "warmup_steps": 2}
def test_gradients_of_float64_are_exchanged_in_float32_with_a_warning(sixty_four_bits):
    init, _ = jgc.make_step(lambda p, x: jnp.mean(x @ p["w"]), jgc.compress.dense(), optax.sgd(1.0), jgc.make_nodes(1))
    with pytest.warns(UserWarning, match="the parameter 'w' is float64, and its gradients are exchanged in float32"):
        init(jax.random.key(0), {"w": jnp.zeros(2, jnp.float64)})


LGC = [("lgc_ring", jgc.compress.RING_PAPER_RECIPE), ("lgc_ps", {"positions": "leader", "code_dtype": "8bit"})]
CASES = [*((name, {}) for name in METHODS), ("learned_topk", LEARNED), *LGC]
BY_DEFAULT = [*((name, {}) for name in ("powersgd", "qsgd", "topk")), ("learned_topk", LEARNED), *LGC]


@pytest.mark.parametrize(("name", "settings"), some_by_default(CASES, BY_DEFAULT), ids=str)
def test_state_and_bytes_are_those_of_32_bits(name, settings, request):
    compressor, nodes = build(METHODS[name].settings(**settings)), jgc.make_nodes(8)
    expected = kept_and_sent(compressor, nodes)
    request.getfixturevalue("sixty_four_bits")
    assert kept_and_sent(compressor, nodes) == expected
