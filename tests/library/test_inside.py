"""docs/inside.md names the functions that a step enters, in their order."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgc

PAGE = (Path(__file__).parents[2] / "docs" / "inside.md").read_text()


def rows() -> list[tuple[str, str, str]]:
    """File, function and the row or the function that it is in, of each row of the page's table."""
    table = re.findall(r"^\| \d+ \| `jgc\.([\w.]+)\.(\w+)` \| `?(\w+)`? \|", PAGE, re.MULTILINE)
    return [(f"{module.replace('.', '/')}.py", name, inside) for module, name, inside in table]


def entered() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """The functions of jgc that tracing a step of topk enters, in that order, and the functions around each."""
    nodes, root = jgc.make_nodes(2, jax.devices()[:1]), str(Path(jgc.__file__).parent)
    init, step = jgc.make_step(lambda params, x: jnp.mean(x @ params["a"]), jgc.compress.topk(), optax.sgd(0.1), nodes)
    state = init(jax.random.key(0), {"a": jnp.zeros((64, 64))})
    order: dict[tuple[str, str], set[tuple[str, str]]] = {}

    def name_of(frame):
        code = frame.f_code
        return code.co_filename.startswith(root) and (str(Path(code.co_filename).relative_to(root)), code.co_name)

    def watch(frame, event, _):
        if event == "call" and (name := name_of(frame)) and name not in order:
            order[name] = set()
            while frame := frame.f_back:
                order[name] |= {name_of(frame) or name}

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        step(state, np.ones((2, 4, 64), np.float32))
    finally:
        sys.setprofile(before)
    return order


def test_a_step_enters_the_functions_of_the_page_in_its_order():
    page, order = rows(), entered()
    names = [(file, name) for file, name, _ in page]
    assert len(page) == 14 and not [name for name in names if name not in order]
    places = list(order)
    assert [places.index(name) for name in names] == sorted(map(places.index, names))
    for name, (_, _, inside) in zip(names, page, strict=True):
        outer = names[int(inside) - 1] if inside.isdigit() else ("loops/step_program.py", "update")
        assert outer in order[name], f"{name[1]} is not entered in {outer[1]}"


def test_all_names_of_the_page_exist():
    root = Path(jgc.__file__).parents[1]
    for name in set(re.findall(r"`(jgc(?:\.\w+){2,})`", PAGE)):
        module, _, last = name.rpartition(".")
        if not root.joinpath(*name.split(".")).with_suffix(".py").exists():
            text = root.joinpath(*module.split(".")).with_suffix(".py").read_text()
            assert re.search(rf"\b(def|class) {last}\(|^{last}\b.* = ", text, re.MULTILINE), name
