import numpy as np
import pytest
import tensorflow as tf
from sklearn.linear_model import LogisticRegression

import keras_moco as km
from keras_moco.evaluation.axes import Axes
from keras_moco.evaluation.probe import RIDGE, _Heads, probe_features


def clouds(count, classes=5, width=12, spread=1.6, seed=0):
    """Features that overlap, on scales that differ, and their labels."""
    centres = np.random.default_rng(7).normal(size=(classes, width))
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, count)
    features = centres[labels] + spread * draw.normal(size=(count, width))
    scales = 10.0 ** np.random.default_rng(8).uniform(-2, 2, width)
    return (features * scales + 3 * scales).astype("float32"), labels


def test_probe_is_as_good_as_logistic_regression():
    features, labels = clouds(4000)
    test_features, test_labels = clouds(4000, seed=1)
    mean, std = features.mean(axis=0), features.std(axis=0)
    regression = LogisticRegression(max_iter=1000)
    regression.fit((features - mean) / std, labels)
    expected = regression.score((test_features - mean) / std, test_labels)
    assert 0.5 < expected < 0.95
    found = probe_features(features, labels, test_features, test_labels)
    assert abs(found["test_top1"] - expected) < 0.006
    assert abs(found["test_top1_last"] - expected) < 0.01
    assert found["test_top5"] == 1.0  # of five classes
    low, high = found["interval"]
    assert low < found["test_top1"] < high


def test_counts_are_those_of_the_answers():
    features, labels = clouds(600, classes=3, spread=0.01)  # Far apart.
    test_features, answers = clouds(300, classes=3, spread=0.01, seed=1)
    test_labels = np.where(np.arange(300) < 60, 2, answers)
    found = probe_features(
        features, labels, test_features, test_labels, epochs=5
    )
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (test_labels, answers), 1)
    np.testing.assert_array_equal(found["confusion"], confusion)
    assert found["test_top1"] == np.mean(test_labels == answers) < 0.95
    assert found["test_top1_last"] == found["test_top1"]
    np.testing.assert_allclose(
        found["per_class"], np.diag(confusion) / confusion.sum(axis=1)
    )
    assert 1 <= found["setting"]["epoch"] <= 5


def standardised(features, correlated):
    """Rows on their axes with a 1, variances there, and the way back."""
    mean, std = features.mean(axis=0), features.std(axis=0)
    rows = (features - mean) / std
    variances, axes = np.ones(len(std)), np.eye(len(std))
    if correlated:
        variances, axes = np.linalg.eigh(rows.T @ rows / len(rows))
    rows = np.pad(rows @ axes, ((0, 0), (0, 1)), constant_values=1.0)
    back = np.eye(len(std) + 1)
    back[:-1, :-1] = axes / std[:, None]
    back[-1, :-1] = -mean @ back[:-1, :-1]
    return rows, np.append(variances, 1.0), back


@pytest.fixture(params=["flat", "correlated"])
def few(request):
    """60 features that do or do not vary alike along all axes, and labels."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 60)
    features = draw.normal(size=(60, 4)) + 0.3 * labels[:, None]
    if request.param == "correlated":
        features[:, 1] = features[:, 0] + 0.2 * features[:, 1]
    features = features * [1, 100, 0.1, 5] + [3, 7, 0.1, -50]
    return features, labels, request.param == "correlated"


def test_one_step_is_the_scaled_gradient_of_each_setting(few):
    features, labels, correlated = few
    rates, decays = np.array([0.5, 0.1]), np.array([0.0, 0.01])
    axes = Axes(features, np.arange(60))
    heads = _Heads(axes, 3, rates, decays)
    rows, variances, back = standardised(features, correlated)
    heads.train(axes.centre(features), labels, 1.0)
    # From zero all classes are equally likely, and decay has nothing to do.
    first_gradient = rows.T @ (np.full((60, 3), 1 / 3) - np.eye(3)[labels]) / 60
    firsts = []
    for setting, (rate, decay) in enumerate(zip(rates, decays, strict=True)):
        scale = rate / (variances + decay + RIDGE)
        firsts.append(-scale[:, None] * first_gradient)
        kept, last = heads.of(setting)
        np.testing.assert_array_equal(kept, 0.0)
        np.testing.assert_allclose(
            last, back @ firsts[-1], rtol=1e-3, atol=1e-4
        )
    heads.train(axes.centre(features), labels, 0.25)
    heads.keep(np.array([True, False]))
    for setting, first in enumerate(firsts):
        rate, decay = rates[setting], decays[setting]
        scale = rate / (variances + decay + RIDGE)
        scores = np.exp(rows @ first - (rows @ first).max(1)[:, None])
        answer = scores / scores.sum(axis=1, keepdims=True)
        gradient = rows.T @ (answer - np.eye(3)[labels]) / 60
        gradient[:-1] += decay * first[:-1]  # The bias does not decay.
        velocity = 0.9 * first - scale[:, None] * gradient
        expected = back @ (first + 0.25 * velocity)
        kept, last = heads.of(setting)
        np.testing.assert_allclose(last, expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(kept, last if setting == 0 else 0.0)


def test_heads_start_at_the_linear_discriminant(few):
    features, labels, correlated = few
    decays = np.array([0.0, 0.2])
    axes = Axes(features, np.arange(60))
    heads = _Heads(axes, 3, np.ones(2), decays)
    rows, variances, back = standardised(features, correlated)
    seen = np.where(np.arange(60) % 5, labels, -1)
    heads.start(axes.sums(features, seen, 3))
    counts = np.bincount(labels[seen >= 0])
    for setting, decay in enumerate(decays):
        for cloud in range(3):
            mean = rows[seen == cloud, :-1].mean(axis=0)
            weights = mean / (variances[:-1] + 3 * decay + RIDGE)
            bias = np.log((counts[cloud] + 1) / 48) - weights @ mean / 2
            np.testing.assert_allclose(
                heads.of(setting)[1][:, cloud],
                back @ np.append(weights, bias),
                rtol=1e-3,
                atol=1e-4,
            )


def test_axes_are_uncorrelated_and_of_the_variance_that_is_said():
    draw = np.random.default_rng(0)
    mixed = draw.normal(size=(3000, 6)) @ draw.normal(size=(6, 6)) + 5
    mixed[:, 2] = 7.0  # Tells nothing.
    axes = Axes(mixed, np.arange(3000))
    turned = axes.centre(mixed) @ axes.to_features(tf.eye(7))
    np.testing.assert_allclose(turned[:, -1], 1.0)
    covariance = np.cov(turned[:, :-1].numpy().T)
    np.testing.assert_allclose(covariance, np.diag(axes.variances), atol=0.01)
    np.testing.assert_allclose(axes.variances.sum(), 5.0, atol=0.01)
    assert axes.steps == 44


def test_features_alike_in_all_directions_are_standardised_alone():
    draw = np.random.default_rng(0)
    features = (draw.normal(size=(5000, 4)) * [1, 10, 0.1, 5] + 3).astype("f")
    axes = Axes(features, np.arange(5000))
    rows, variances, _ = standardised(features, correlated=False)
    found = axes.centre(features) @ axes.to_features(tf.eye(5))
    np.testing.assert_allclose(found, rows, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(axes.variances, variances[:-1])
    assert axes.steps == 22


def test_axes_of_little_variance_are_learned_as_well():
    """SGD on the features as they are would take thousands of steps."""
    draw = np.random.default_rng(0)

    def data(count):
        labels = draw.integers(0, 2, count)
        common = draw.normal(size=(count, 1))
        own = 0.02 * (2 * labels[:, None] - 1 + draw.normal(size=(count, 1)))
        return np.hstack([common + own, common - own]), labels

    found = probe_features(*data(4000), *data(4000))
    # The normal distribution up to 1: what the best boundary reaches.
    assert abs(found["test_top1"] - 0.8413) < 0.02


def test_a_feature_counts_however_small_beside_the_others():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 2000)
    features = np.full((2000, 3), 0.1)  # The last is constant.
    features[:, 0] = 1500 + draw.normal(size=2000)
    features[:, 1] = 1e-9 * (labels + 0.1 * draw.normal(size=2000))
    features = features.astype("float32")
    variances = Axes(features, np.arange(2000)).variances
    np.testing.assert_allclose(sorted(variances), [0, 1, 1], atol=0.1)
    found = probe_features(features, labels, features, labels)
    assert found["test_top1"] > 0.99


def test_same_seed_gives_the_same():
    arguments = *clouds(300), *clouds(100, seed=1)
    first, again = (probe_features(*arguments, epochs=3) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    "other",
    (lambda y: y.astype("int32"), lambda y: y.astype("uint8")[:, None], list),
)
def test_labels_may_be_of_any_whole_type(other):
    features, labels = clouds(100)
    expected = probe_features(features, labels, features, labels, epochs=2)
    labels = other(labels)
    found = probe_features(features, labels, features, labels, epochs=2)
    assert found == expected


def test_diverging_settings_are_not_chosen():
    arguments = *clouds(300), *clouds(100, seed=1)
    # The decay alone overshoots by 1e30 in each step.
    found = probe_features(
        *arguments,
        learning_rates=(1e30, 0.1),
        weight_decays=(1.0,),
        batch_size=20,
        epochs=5,
    )
    assert found["setting"]["learning_rate"] == 0.1
    assert found["test_top1"] > 0.4
    with pytest.raises(ValueError, match="All settings diverged: .*1e\\+30"):
        probe_features(
            *arguments,
            learning_rates=(1e30,),
            weight_decays=(1.0,),
            batch_size=20,
            epochs=5,
        )


def test_an_image_is_left_to_train_on():
    features = np.arange(10.0)[:, None]
    labels = np.arange(10) % 2
    found = probe_features(features, labels, features, labels, holdout=0.99)
    assert found["holdout_top1"] in np.arange(10) / 9


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rates": (0.1, np.nan)},
        {"learning_rates": ()},
        {"weight_decays": (-1.0,)},
        {"epochs": 0},
        {"batch_size": 0},
        {"holdout": 1.0},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_numbers_out_of_range_are_one_line(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"`{name}` must be") as error:
        probe_features(*clouds(50), *clouds(20), **wrong)
    assert "\n" not in str(error.value)


def test_constant_features_give_chance_and_a_warning():
    labels = np.arange(100) % 4
    constant = np.full((100, 3), 5.0, "float32")
    with pytest.warns(UserWarning, match="constant"):
        found = probe_features(constant, labels, constant, labels, epochs=2)
    assert found["test_top1"] == 0.25
    assert np.isfinite(found["interval"]).all()


def test_what_cannot_be_probed_is_one_line():
    features, labels = clouds(50)
    good = (features, labels)
    broken = features.copy()
    broken[[3, 8], 1] = np.nan
    for arguments, words in (
        ((broken, labels, *good), r"2 training images .*3, 8"),
        ((features, None, *good), "training images have no labels"),
        ((features, labels - 1, *good), "training images have no labels"),
        ((features, np.eye(5)[labels], *good), r"numbers.* of shape \(50, 5\)"),
        ((*good, features, labels[:40]), r"one an image.* of shape \(40,\)"),
        ((*good, features, labels / 2), "test images must be .*: float64"),
        ((*good, broken, labels), r"2 test images"),
        ((features, 0 * labels, *good), "two classes.*class 0"),
        ((*good, features, labels + 3), "training images lack: 5"),
        ((features, labels.astype(str), *good), "must be class numbers"),
        ((features, [], *good), "training images have no labels"),
        ((features[:, 0], labels, *good), r"training features .* \(50,\)"),
        ((*good, features[:, :9], labels), "one encoder.*: 12 and 9"),
        ((*good, features[:0], labels[:0]), "no test images"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            probe_features(*arguments)
        assert "\n" not in str(error.value)


def test_probe_of_an_encoder_reads_its_features(tiny_encoder):
    draw = np.random.default_rng(0)
    labels = np.arange(64) % 2
    shade = 0.2 + 0.6 * labels[:, None, None, None]
    images = shade + 0.1 * draw.random((64, 8, 8, 3))
    data = tf.data.Dataset.from_tensor_slices(
        (images.astype("float32"), labels)
    ).batch(16)
    for encoder in (tiny_encoder(), None):
        found = km.linear_probe(encoder, data, data, epochs=10)
        assert found["test_top1"] == 1.0
