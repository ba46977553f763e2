"""docs/inside.md names the functions that a step enters, in their order."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jgc

PAGE = (Path(__file__).parents[2] / "docs" / "inside.md").read_text()


def named() -> list[tuple[str, str]]:
    """File and function of each row of the page's table, in order."""
    rows = re.findall(r"^\| \d+ \| `jgc\.([\w.]+)\.(\w+)`", PAGE, re.MULTILINE)
    return [(f"{module.replace('.', '/')}.py", name) for module, name in rows]


def entered() -> list[tuple[str, str]]:
    """The functions of jgc that tracing a step of topk enters, each where it is first entered."""
    nodes, params = jgc.make_nodes(2, jax.devices()[:1]), {"a": jnp.zeros((64, 64))}
    compressor, root = jgc.compress.topk(), str(Path(jgc.__file__).parent)
    state = compressor.init(jax.random.key(0), params, nodes)
    step = jgc.compress.step_on_nodes(compressor.aggregate, "top-k", nodes)
    order: dict[tuple[str, str], None] = {}

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            order[str(Path(code.co_filename).relative_to(root)), code.co_name] = None

    grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params)
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        jax.make_jaxpr(step)(jax.random.key(0), grads, state)
    finally:
        sys.setprofile(before)
    return list(order)


def test_a_step_enters_the_functions_of_the_page_in_its_order():
    rows, order = named(), entered()
    assert len(rows) == 11 and not [row for row in rows if row not in order]
    assert [order.index(row) for row in rows] == sorted(order.index(row) for row in rows)


def test_all_names_of_the_page_exist():
    root = Path(jgc.__file__).parents[1]
    for name in set(re.findall(r"`(jgc(?:\.\w+){2,})`", PAGE)):
        module, _, last = name.rpartition(".")
        if not root.joinpath(*name.split(".")).with_suffix(".py").exists():
            text = root.joinpath(*module.split(".")).with_suffix(".py").read_text()
            assert re.search(rf"\bdef {last}\(|^{last}\b.* = ", text, re.MULTILINE), name
