"""scikit-learn's handwritten digits: 1,797 real 8x8 images that come with the library.

A smoke test, not a benchmark: a ConvNet5 reaches 98 to 99 % after 50 steps of batch 128.
"""

import numpy as np

from jgc.training.data.dataset import Augment, Dataset

TEST_EXAMPLES = 360
SPLIT_SEED = 0  # not the run's seed: every run is tested on the same images


def load_digits(shift: int = 0) -> Dataset:
    """The digits, 1,437 to train and 360 to test on, stratified by digit: f32[n, 8, 8, 1] from 0 to 16.

    `shift`: training images move by up to this many pixels (at most 7) in each direction, with zeros moving in.

    References:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """
    if not 0 <= shift < 8:
        raise ValueError(f"`shift` must be from 0 to 7 pixels, got {shift}")
    from sklearn import datasets, model_selection  # here, because it takes a second

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32)
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=TEST_EXAMPLES, stratify=labels, random_state=SPLIT_SEED
    )
    mean = train_x.mean(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
    std = train_x.std(axis=(0, 1, 2), dtype=np.float64).astype(np.float32)
    return Dataset("digits", train_x, train_y, test_x, test_y, 10, mean, std, Augment(pad=shift))
