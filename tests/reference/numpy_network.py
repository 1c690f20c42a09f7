"""The network of the NumPy twins and its local training: linear layers with ReLU between them, cross-entropy, SGD.

The twins use only NumPy in float64 and the standard library; nothing is imported from torch or the package. Weights are
dicts of arrays, masks dicts of bool arrays, True = kept. What chance decides is handed in: the cohort, the batches, the
first masks, random scores. Each method has a class with `round(batches)`, where `batches[k]` are the mini-batches of
client k, and `personal(k)`, the weights that it is scored with.
"""

import math

import numpy as np

CLIP_EPSILON = 1e-6
"""What PyTorch adds to the norm before it divides by it."""


def copied(tree):
    return {name: value.copy() for name, value in tree.items()}


def masked(weights, masks):
    return {name: value * masks[name] if name in masks else value.copy() for name, value in weights.items()}


def layers(weights):
    """The names of each layer's weight and bias, in the order of the forward pass."""
    names = list(weights)
    return list(zip(names[0::2], names[1::2], strict=True))


def forward(weights, x):
    """The input of every layer, and the logits: a_{l+1} = max(0, a_l W_l^T + b_l), the last one without max."""
    inputs, last = [], layers(weights)[-1]
    for weight, bias in layers(weights):
        inputs.append(x)
        x = x @ weights[weight].T + weights[bias]
        if (weight, bias) != last:
            x = np.maximum(x, 0.0)
    return inputs, x


def probabilities(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def loss(weights, x, y):
    """Mean over the batch of -log p(y)."""
    chosen = probabilities(forward(weights, x)[1])[np.arange(len(y)), y]
    return -np.log(chosen).mean()


def gradient(weights, x, y):
    """Of the mean loss: dL/dlogits = (p - onehot) / B, then layer by layer backwards."""
    inputs, logits = forward(weights, x)
    delta = probabilities(logits)
    delta[np.arange(len(y)), y] -= 1.0
    delta /= len(y)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        slopes[weight], slopes[bias] = delta.T @ a, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0)
    return {name: slopes[name] for name in weights}


def clipped(slopes, limit):
    """All gradients times limit / norm where their common Euclidean norm exceeds the limit."""
    norm = math.sqrt(sum(float((slope**2).sum()) for slope in slopes.values()))
    factor = min(1.0, limit / (norm + CLIP_EPSILON))
    return {name: slope * factor for name, slope in slopes.items()}


def train(
    received, batches, *, lr, momentum=0.0, weight_decay=0.0, clip=None, masks=None, mu=0.0, offset=None, after=None
):
    """SGD from the received weights, one step a batch; `after(weights, step)` may replace the weights after a step.

    g = grad f(w) + mu (w - received) + offset;  g <- m g;  clip;  g <- g + decay w;  v <- momentum v + g
    w <- m (w - lr v)
    """
    masks = masks or {}
    weights = masked(received, masks)
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for step, (x, y) in enumerate(batches):
        slopes = gradient(weights, x, y)
        slopes = {name: slope + mu * (weights[name] - received[name]) for name, slope in slopes.items()}
        if offset is not None:
            slopes = {name: slope + offset[name] for name, slope in slopes.items()}
        slopes = masked(slopes, masks)
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
        weights = masked(weights, masks)
        if after is not None:
            weights = after(weights, step)
    return weights


def weighted_mean(trees, sizes):
    """sum_k n_k w_k / sum_k n_k over the trees of the clients k."""
    total = sum(sizes[k] for k in trees)
    names = next(iter(trees.values()))
    return {name: sum(sizes[k] * tree[name] for k, tree in trees.items()) / total for name in names}
