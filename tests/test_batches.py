import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.layers import swap_batch_norm


def moco_of(encoder):
    head = km.projection_head(encoder.output_shape[-1], 4)
    return km.MoCo(encoder, head, queue_size=16)


def test_masking_needs_an_index(build_golden, golden_pairs, golden_sgd):
    model = build_golden(mask_same_image=True)
    model.compile(golden_sgd())
    with pytest.raises(ValueError, match="query, key, index"):
        model.fit(golden_pairs, verbose=0)


def test_a_batch_must_be_a_pair(build_golden, golden_pairs, golden_sgd):
    model = build_golden()
    model.compile(golden_sgd())
    with pytest.raises(ValueError, match="A batch must be"):
        model.fit(golden_pairs.map(lambda query, key: query), verbose=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k: (q, tf.range(6)), "views of the same images.*labels"),
        (lambda q, k: (q, k[:4]), "views of the same images.*6.*4"),
        (
            lambda q, k: (q, k, tf.as_string(tf.range(6))),
            "integer numbers of its images. Received: string",
        ),
    ],
)
def test_a_batch_must_be_two_views_and_numbers(
    build_golden, golden_pairs, golden_sgd, change, message
):
    model = build_golden()
    model.compile(golden_sgd())
    with pytest.raises(ValueError, match=message):
        model.fit(golden_pairs.map(change), verbose=0)


def test_bytes_are_no_views(tiny_encoder, random_pairs):
    model = moco_of(tiny_encoder())
    model.compile(km.SGD(0.01))
    as_bytes = random_pairs().map(
        lambda *pair: tuple(tf.cast(255 * x, tf.uint8) for x in pair)
    )
    with pytest.raises(ValueError, match="Views must be float.*uint8"):
        model.fit(as_bytes, verbose=0)


def test_replicas_must_divide_the_batch(
    two_replicas, tiny_encoder, random_pairs
):
    with two_replicas.scope():
        model = moco_of(tiny_encoder())
        model.compile(km.SGD(0.1))
    with pytest.raises(ValueError, match="2 replicas. Received: 5") as error:
        model.fit(random_pairs(batch=5), verbose=0)
    assert "\n" not in str(error.value)


def test_batches_must_fall_into_the_groups(tiny_encoder, random_pairs):
    encoder = swap_batch_norm(tiny_encoder(), groups=4)
    model = moco_of(encoder)
    model.compile(km.SGD(0.1))
    with pytest.raises(ValueError, match="batch_norm_groups=4, batch_size=6"):
        model.fit(random_pairs(batch=6), verbose=0)
    unknown = random_pairs(steps=1, batch=16).unbatch().batch(8)
    with pytest.raises(ValueError, match="drop_remainder=True") as error:
        model.fit(unknown, verbose=0)
    assert "\n" not in str(error.value)
    known = random_pairs(steps=1, batch=16).unbatch().batch(8, True)
    model.fit(known, verbose=0)
