"""Narrow networks of the NumPy twins; a width is the numbers of the units that each hidden layer keeps."""

import itertools

import numpy as np

from reference.numpy_network import clipped, copied, layers, probabilities


def reach(weights, width):
    """For each tensor, the index of what a narrow network has of it: rows of its units, columns of those it reads."""
    places, reads = {}, None
    for (weight, bias), units in itertools.zip_longest(layers(weights), width):
        rows = np.arange(weights[weight].shape[0]) if units is None else np.array(units)
        columns = np.arange(weights[weight].shape[1]) if reads is None else reads
        places[weight], places[bias], reads = np.ix_(rows, columns), rows, rows
    return places


def narrow_gradient(weights, x, y, rate=1.0, own=None):
    """Of the mean loss, where hidden layers put out max(0, (a W^T + b) / rate), and logits of no own class are 0."""
    inputs, a, last = [], x, layers(weights)[-1]
    for weight, bias in layers(weights):
        inputs.append(a)
        a = a @ weights[weight].T + weights[bias]
        a = a if (weight, bias) == last else np.maximum(a / rate, 0.0)
    own = np.ones(a.shape[1]) if own is None else own
    delta = probabilities(a * own)
    delta[np.arange(len(y)), y] -= 1.0
    delta = delta * own / len(y)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        slopes[weight], slopes[bias] = delta.T @ a, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0) / rate
    return slopes


def train_narrow(received, batches, *, rate=1.0, own=None, lr, momentum=0.0, weight_decay=0.0, clip=None, names=None):
    """SGD on the arrays of a narrow network, or on the named ones of them."""
    weights = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in weights.items() if names is None or name in names}
    for x, y in batches:
        slopes = narrow_gradient(weights, x, y, rate, own)
        slopes = {name: slopes[name] for name in velocity}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
    return weights
