import numpy as np
import pytest

from keras_moco.data.images import Images, match_classes


def labelled(labels, names):
    array = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return Images(array, labels=np.array(labels), class_names=names)


def test_classes_are_matched_by_name():
    bank = labelled([0, 1, 2], ["ant", "bee", "cat"])
    test = match_classes(bank, labelled([0, 1, 1], ["ant", "cat"]))
    np.testing.assert_array_equal(test.labels, [0, 2, 2])
    assert test.class_names == bank.class_names


def test_labels_that_are_unknown_stay_so():
    bank = labelled([0, 1], ["ant", "bee"])
    test = match_classes(bank, labelled([0, -1], ["bee"]))
    np.testing.assert_array_equal(test.labels, [1, -1])


def test_classes_that_training_lacks_are_named():
    bank = labelled([0, 1], ["ant", "bee"])
    with pytest.raises(ValueError, match="lack: cow, dog"):
        match_classes(bank, labelled([0, 1, 2], ["bee", "cow", "dog"]))
