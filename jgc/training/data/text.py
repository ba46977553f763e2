"""Text as one stream of words, cut into windows for truncated back-propagation through time.

For a batch of B streams the n words of the training text are cut into B streams of n // B words. Step s of an epoch
takes words s T to (s + 1) T of every stream (T: the window), so a model carries its state from step to step; `start`
marks the first window of an epoch, which has no carried state. Node k of K has streams k B / K to (k + 1) B / K for the
whole run. The labels of a window are the words shifted by one. The seed has no effect, and words that do not fill a
stream or a window are not trained on, as in the program of Zaremba, Sutskever and Vinyals, "Recurrent Neural Network
Regularization", arXiv:1409.2329, 2014.

A text of characters is for models without a carried state: its windows start at random places that depend on seed and
step only, and its score is the loss of a character.
"""

import zlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgc.training.data.score import BITS, NATS, PERPLEXITY
from jgc.training.data.source import EvalBatch, Labels, Source

Words = npt.NDArray[np.int32]  # [n], numbers of words

EVALUATED_STREAMS = 20  # fixed, so that the perplexity does not depend on batch and nodes; Zaremba's number


class Text(NamedTuple):
    """A text as numbers of words."""

    name: str  # for messages
    train: Words  # int32[n], from 0 to len(vocabulary) - 1
    validation: Words  # int32[m], likewise
    test: Words  # int32[k], likewise
    vocabulary: tuple[str, ...]  # the words by number
    window: int  # T, words of each stream in a step
    characters: bool = False  # whether the words are characters, for models without a carried state


class Window(NamedTuple):
    """The model's input: words int32[..., b, T], start bool[..., b], True for streams without a carried state."""

    words: Words
    start: npt.NDArray[np.bool_]


def text_source(text: Text) -> Source:
    """The `Source` of a text, with the next word as label; the score is the perplexity, of characters the loss."""
    if text.window < 1:
        raise ValueError(f"the window must be at least 1 word, got {text.window}")
    if len(text.validation) < 2:
        raise ValueError(f"the validation text of {text.name} must have two words or more, got {len(text.validation)}")
    evaluation, both = partial(evaluation_windows, text.validation, text.window), (text.train, text.validation)
    sizes, sums = [len(words) for words in both], [zlib.crc32(words.tobytes()) for words in both]
    return Source(
        kind="text",
        classes=len(text.vocabulary),
        score=NATS if text.characters else PERPLEXITY,
        further=(BITS,) if text.characters else (),
        vocabulary=text.vocabulary if text.characters else (),
        inputs=lambda count: Window(np.zeros((count, text.window), np.int32), np.zeros(count, bool)),
        batch=partial(text_batch, text),
        evaluation=evaluation,
        validation=evaluation,
        epoch_steps=partial(epoch_steps, text),
        facts=f"{text.name} of {sizes[0]} and {sizes[1]} words, {len(text.vocabulary)} different, of checksums {sums}",
    )


def epoch_steps(text: Text, streams: int) -> int:
    """Windows of each stream in the training text."""
    steps = (len(text.train) // streams - 1) // text.window if streams > 0 else 0
    if steps < 1:
        raise ValueError(
            f"{text.name} has {len(text.train)} words to train on, which are no batch of {streams} streams with "
            f"{text.window} words each and one that follows"
        )
    return steps


def text_batch(
    text: Text, seed: int, step: int, nodes: int, batch_size: int, local: slice = slice(None)
) -> tuple[Window, Labels]:
    """The training batch of a step: a window of int32[nodes, batch_size / nodes, T] words, and labels likewise."""
    if nodes < 1 or batch_size % nodes or step < 0:
        raise ValueError(
            "`nodes` must divide `batch_size` and `step` be at least 0, "
            f"got {nodes} nodes, a batch of {batch_size}, step {step}"
        )
    at = step % epoch_steps(text, batch_size) * text.window
    if text.characters:
        first = np.random.default_rng([seed, step]).integers(0, len(text.train) - text.window, batch_size)
    else:
        first = np.arange(batch_size) * (len(text.train) // batch_size) + at
    first = first.reshape(nodes, -1)[local]
    words = text.train[first[..., None] + np.arange(text.window + 1)].astype(np.int32)
    return Window(words[..., :-1], np.full(first.shape, text.characters or at == 0)), words[..., 1:]


def evaluation_windows(words: Words, window: int, multiple: int = 1) -> Iterator[EvalBatch]:
    """A whole text in windows int32[streams, T] in order, with every word but the first as a label exactly once."""
    labels = len(words) - 1
    stretch = -(-labels // EVALUATED_STREAMS)
    count = -(-EVALUATED_STREAMS // multiple) * multiple
    for start in range(0, stretch, window):
        at = start + np.arange(window)
        places = np.arange(count)[:, None] * stretch + at
        mask = (at < stretch) & (places < labels)
        places = np.where(mask, places, 0)
        inputs = Window(words[places].astype(np.int32), np.full(count, start == 0))
        yield EvalBatch(inputs, words[places + 1].astype(np.int32), mask)
