"""The momentum update as a low-pass filter: what it does, and what is found.

NumPy alone. At each step key = m key + (1 - m) query, m being the momentum: the
query of j steps before has the weight (1 - m) m^j in the key. A jump of the
query has reached the key by 1 - 1/e after about 1 / (1 - m) steps, the time
constant.

Reference: section 3.2 of He et al. 2019, arXiv:1911.05722; as the average of a
teacher's weights, Tarvainen and Valpola 2017, arXiv:1703.01780.
"""

import math

import numpy as np


def exponential_average(query, momentum, start=None):
    """The key that follows a query.

    Args:
        query: Float array (steps, parameters).
        momentum: Float in [0, 1).
        start: Float array (parameters,). The key at the first step; None is
            the query there.

    Returns:
        Float64 array like `query`.
    """
    query = np.asarray(query, "float64")
    key = np.empty_like(query)
    key[0] = query[0] if start is None else start
    for step in range(1, len(query)):
        key[step] = momentum * key[step - 1] + (1 - momentum) * query[step]
    return key


def ramp_lag(momentum):
    """Steps by which the key of a steady ramp lags.

    A key that is d steps late fulfils t - d = m (t - 1 - d) + (1 - m) t, so
    d = m / (1 - m): one less than the time constant.
    """
    return momentum / (1 - momentum)


def walk_lag(momentum):
    """Steps back at which the query of a random walk is nearest to the key.

    The mean squared distance is smallest at the median of the average's
    weights: the first j at which 1 - m^(j + 1) is a half.
    """
    if momentum == 0:
        return 0
    return math.ceil(round(-math.log(2) / math.log(momentum), 9)) - 1


def white_share(momentum):
    """Share of the variance of white noise that is left in the key.

    The sum of the squares of (1 - m) m^j is (1 - m)^2 / (1 - m^2).
    """
    return (1 - momentum) / (1 + momentum)


def correlated_share(momentum, correlation):
    """The same of noise whose correlation over j steps is a^j.

    Pairs of weights j steps apart add 2 (m a)^j each to the 1 of white noise,
    in all (1 + m a) / (1 - m a).
    """
    both = momentum * correlation
    return white_share(momentum) * (1 + both) / (1 - both)


def measure_ramp(query, key):
    """Lag and noise of the key of noisy ramps, in their second half.

    Args:
        query: Float array (steps, parameters). Each parameter rises from 0 to
            1 over the steps, with noise of its own.
        key: Float array like it.

    Returns:
        Pair of floats: by how many steps of the ramp the key lies below the
        query, and the variance across parameters, key over query.
    """
    late = len(query) // 2
    lag = (query - key)[late:].mean() * len(query)
    noise = [x[late:].var(axis=1, ddof=1).mean() for x in (key, query)]
    return lag, noise[0] / noise[1]


def measure_trace(query, key, momentum):
    """What the recorded weights of a run say about their average.

    Args:
        query: Float array (1 + steps, weights), before and after each step.
        key: Float array like it.
        momentum: Float in [0, 1).

    Returns:
        Dict.
        `difference`: the greatest one of the key and the average of the query.
        `apart`: the greatest one of key and query.
        `distance`: array, the root mean square distance of the key and the
        query of 0, 1, ... steps before; each weight in units of its own step.
        `lag`: where that is smallest.
        `noise`: the variance of a step, key over query, in the median weight.
        `correlation`: of two consecutive steps of the query, in the median
        weight.
        The last four are of the second half, and of the weights that move.
    """
    query, key = (np.asarray(x, "float64") for x in (query, key))
    found = {
        "difference": np.abs(
            key - exponential_average(query, momentum, key[0])
        ),
        "apart": np.abs(key - query),
    }
    found = {name: value.max() for name, value in found.items()}
    late, steps = len(query) // 2, len(query)
    moving = np.ptp(np.diff(query[late:], axis=0), axis=0) > 0
    query, key = query[:, moving], key[:, moving]
    query_step, key_step = (np.diff(x[late:], axis=0) for x in (query, key))
    scale = np.sqrt((query_step**2).mean(axis=0))
    query, key = query / scale, key / scale
    distance = [
        np.sqrt(((key[late:] - query[late - lag : steps - lag]) ** 2).mean())
        for lag in range(min(late, math.ceil(3 / (1 - momentum))) + 1)
    ]
    centred = query_step - query_step.mean(axis=0)
    products = (centred[1:] * centred[:-1]).sum(axis=0)
    return {
        **found,
        "distance": np.array(distance),
        "lag": int(np.argmin(distance)),
        "noise": np.median(key_step.var(axis=0) / query_step.var(axis=0)),
        "correlation": np.median(products / (centred**2).sum(axis=0)),
    }
