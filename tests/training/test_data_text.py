"""Text: vocabulary, batches as pure functions of the step, evaluation windows."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from text_helpers import SIZES, WORDS, write_text

from jgc.training import data
from jgc.training.data import MissingDataError, Text, load_ptb
from jgc.training.data.ptb import numbers, vocabulary_of, words_of
from jgc.training.data.text import EVALUATED_STREAMS, epoch_steps, evaluation_windows, text_batch

TFDS = Path(os.environ.get("JGC_TEST_DATA") or Path(__file__).parents[2] / "../shared/data/tfds").resolve()
PTB = TFDS.parent


def counting(n: int, window: int) -> Text:
    """A text in which every word occurs once, so a word's number is its position."""
    words = np.arange(n, dtype=np.int32)
    return Text("counting", words, words[: n // 2], words[: n // 3], tuple(map(str, range(n))), window)


# Words.


def test_vocabulary_from_training_text():
    words = words_of("the cat sat \n the <unk> sat on the mat\n")
    vocabulary = vocabulary_of(words)
    assert vocabulary[0] == "the" and vocabulary[1:3] == ("<eos>", "sat")  # by frequency, then by alphabet
    assert set(vocabulary) == {"the", "cat", "sat", "<eos>", "<unk>", "on", "mat"}
    assert [vocabulary[i] for i in numbers(words, vocabulary)] == words
    unseen = numbers(["dog", "cat", "cats"], vocabulary)
    assert [vocabulary[i] for i in unseen] == ["<unk>", "cat", "<unk>"] and unseen.dtype == np.int32


def test_files(tmp_path):
    text = load_ptb(write_text(tmp_path))
    assert set(text.vocabulary) == {*WORDS, "<eos>", "<unk>"} and text.window == 20
    for split, words in zip(SIZES, (text.train, text.validation, text.test), strict=True):
        file = (tmp_path / "ptb" / f"ptb.{split}.txt").read_text()
        assert len(words) == SIZES[split] + file.count("\n")
        assert " ".join(text.vocabulary[i] for i in words).replace("<eos>", "\n").split() == file.split()


def test_binary_file(tmp_path):
    file = write_text(tmp_path) / "ptb/ptb.valid.txt"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(MissingDataError, match=r"ptb: cannot read .*ptb.valid.txt: 'utf-8' codec"):
        data.load_dataset("ptb", tmp_path)


@pytest.mark.parametrize("spoil", ["folder", "file", "empty"])
def test_missing_text(tmp_path, spoil):
    file = write_text(tmp_path) / "ptb/ptb.valid.txt"
    if spoil == "empty":
        file.write_text("")
    else:
        file.unlink()
    where = tmp_path / "elsewhere" if spoil == "folder" else tmp_path
    with pytest.raises(MissingDataError) as raised:
        data.load_dataset("ptb", where)
    message = str(raised.value)
    assert str(where / "ptb") in message and "\n" not in message and "Mikolov" in message
    assert ("no words in" in message) == (spoil == "empty")
    assert all(name in message for name in ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"))


# Batches.


@given(st.integers(1, 6), st.integers(1, 7), st.integers(48, 90))
def test_epoch_covers_every_word(streams, window, n):
    text = counting(n, window)
    steps = epoch_steps(text, streams)
    batches = [text_batch(text, 0, step, 1, streams) for step in range(2 * steps)]
    for epoch in (batches[:steps], batches[steps:]):
        rows = np.concatenate([inputs.words[0] for inputs, _ in epoch], axis=1)
        assert np.all(np.diff(rows) == 1)  # each step's words follow on those of the one before
        assert len(np.unique(rows)) == rows.size  # none twice
        stretch = n // streams
        assert rows[:, 0].tolist() == [i * stretch for i in range(streams)]
        assert stretch - rows.shape[1] <= window  # left over: what does not fill a window, and the last label
        assert [bool(inputs.start.all()) for inputs, _ in epoch] == [True] + [False] * (steps - 1)
        assert not any(inputs.start.any() for inputs, _ in epoch[1:])
    for inputs, labels in batches:
        np.testing.assert_array_equal(labels, inputs.words + 1)
        assert labels.dtype == inputs.words.dtype == np.int32


def test_disjoint_streams():
    text = counting(200, window=5)
    for step in range(8):
        whole = text_batch(text, 0, step, 1, 8)
        for nodes in (2, 4, 8):
            shared = text_batch(text, 0, step, nodes, 8)
            assert shared[1].shape == (nodes, 8 // nodes, 5) and shared[0].start.shape == (nodes, 8 // nodes)
            np.testing.assert_array_equal(shared[0].words.reshape(8, 5), whole[0].words[0])
            np.testing.assert_array_equal(shared[1].reshape(8, 5), whole[1][0])
            own = text_batch(text, 0, step, nodes, 8, local=slice(1, 2))
            np.testing.assert_array_equal(own[0].words, shared[0].words[1:2])
            np.testing.assert_array_equal(own[1], shared[1][1:2])


def test_batches_are_pure():
    text = counting(100, window=5)
    there = [text_batch(text, 0, step, 2, 4) for step in range(12)]
    for step in reversed(range(12)):
        inputs, labels = text_batch(text, step, step, 2, 4)  # whatever came before, and whatever the seed
        np.testing.assert_array_equal(inputs.words, there[step][0].words)
        np.testing.assert_array_equal(labels, there[step][1])


def test_bad_batches():
    text = counting(50, window=5)
    with pytest.raises(ValueError, match="got 3 nodes, a batch of 4"):
        text_batch(text, 0, 0, 3, 4)
    with pytest.raises(ValueError, match="step -1"):
        text_batch(text, 0, -1, 1, 4)
    assert epoch_steps(text, 8) == 1  # six words: five and one that follows
    with pytest.raises(ValueError, match="counting has 50 words to train on, which are no batch of 9 streams with 5"):
        epoch_steps(text, 9)
    with pytest.raises(ValueError, match="the window must be at least 1 word, got 0"):
        data.source_of(text._replace(window=0))
    with pytest.raises(ValueError, match="two words or more, got 1"):
        data.source_of(text._replace(validation=text.validation[:1]))


# Evaluation.


@given(st.integers(2, 150), st.integers(1, 9), st.integers(1, 8))
def test_evaluation_covers_every_word(n, window, multiple):
    batches = list(evaluation_windows(np.arange(n, dtype=np.int32), window, multiple))
    shapes = {batch.labels.shape for batch in batches}
    ((count, width),) = shapes
    assert width == window and count % multiple == 0 and EVALUATED_STREAMS <= count < EVALUATED_STREAMS + multiple
    assert sorted(np.concatenate([batch.labels[batch.mask] for batch in batches])) == list(range(1, n))
    for batch in batches:
        assert np.all((batch.inputs.words + 1 == batch.labels)[batch.mask])
    assert [bool(batch.inputs.start[0]) for batch in batches] == [True] + [False] * (len(batches) - 1)
    streams = np.concatenate([np.where(batch.mask, batch.labels, -1) for batch in batches], axis=1)
    for stream in streams:  # without gaps, so that a state can be handed on
        labels = stream[stream >= 0]
        assert np.all(np.diff(labels) == 1) and np.all(stream[: len(labels)] >= 0)


def test_text_and_image_sources():
    text, images = data.source_of(counting(50, window=5)), data.source_of(data.load_dataset("digits"))
    assert (text.score, images.score) == (data.PERPLEXITY, data.ACCURACY)
    for source, batch_size in ((text, 4), (images, 16)):
        inputs, labels = source.batch(0, 0, 2, batch_size)
        zeros = source.inputs(batch_size // 2)
        for mine, like in zip(*(x if isinstance(x, tuple) else (x,) for x in (inputs, zeros)), strict=True):
            assert mine.shape == (2, *like.shape) and mine.dtype == like.dtype
        assert labels.max() < source.classes and source.epoch_steps(batch_size) >= 1
        (batch, *_) = source.evaluation(3)
        assert len(batch.labels) % 3 == 0 and batch.mask.shape == batch.labels.shape
    assert images.epoch_steps(128) == pytest.approx(1437 / 128) and text.epoch_steps(4) == 2
    assert text.facts != data.source_of(counting(51, window=5)).facts


def test_score_direction():
    assert data.ACCURACY.is_as_good(0.5) and data.ACCURACY.is_as_good(-1.0) and not data.ACCURACY.is_as_good(-1.1)
    assert data.PERPLEXITY.is_as_good(-30) and not data.PERPLEXITY.is_as_good(2.1)
    assert data.ACCURACY.text(0.5) == "50.00 %" and data.PERPLEXITY.text(123.456) == "123.46"
    assert data.PERPLEXITY.text(None) == "-"
    assert data.score_of({"test_accuracy": 0.5}) is data.ACCURACY  # of a run that wrote no name
    assert data.final({"score": "validation_perplexity", "validation_perplexity": 90.0}) == 90.0
    with pytest.raises(ValueError, match=r"must be one of test_accuracy, validation_perplexity, .*got 'bleu'"):
        data.score_of({"score": "bleu"})


@pytest.mark.skipif(not (PTB / "ptb").is_dir(), reason=f"no Penn Treebank in {PTB} (set JGC_TEST_DATA)")
def test_real_data():
    text = load_ptb(PTB)
    assert [len(words) for words in (text.train, text.validation, text.test)] == [929_589, 73_760, 82_430]
    assert len(text.vocabulary) == 10_000 and text.vocabulary[1:3] == ("<unk>", "<eos>")
    assert max(words.max() for words in text[1:4]) == 9_999
    assert data.source_of(text).epoch_steps(20) == 2323
