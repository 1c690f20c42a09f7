"""How many weights a mask keeps in each layer."""

import math


def layer_densities(shapes, density, rule):
    """Uniform, or Erdos-Renyi-Kernel: eps (sum s / prod s), where a tensor that would exceed 1 is dense."""
    if rule == "uniform" or density >= 1:
        return dict.fromkeys(shapes, density)
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / size[name] for name, shape in shapes.items()}
    dense = set()
    while True:
        sparse = [name for name in shapes if name not in dense]
        budget = density * sum(size[name] for name in sparse) - (1 - density) * sum(size[name] for name in dense)
        eps = budget / sum(raw[name] * size[name] for name in sparse)
        over = {name for name in sparse if eps * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in dense else eps * raw[name] for name in shapes}
        dense |= over


def kept_counts(shapes, density, rule):
    """floor(density_l N_l), at least 1."""
    shares = layer_densities(shapes, density, rule)
    return {name: max(1, math.floor(shares[name] * math.prod(shape) + 1e-9)) for name, shape in shapes.items()}
