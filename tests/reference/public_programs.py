"""Inputs for the authors' public programs, and the script that runs those programs on them.

    python tests/reference/public_programs.py --feddip DIR --dispfl DIR --fedlps DIR --perfedmask DIR

writes `public_programs.json`, which `test_public_programs.py` compares the package with. The folders are checkouts of
github.com/EricLoong/feddip at 4327d96, github.com/rong-dai/DisPFL at e2f47d4 (a public program of FedSpa's group),
github.com/sunnyxuejj/FedLPS at 35fafba and github.com/MehdiSet/PerFedMask at 2ecd165. Nothing of them is stored but
results.

The inputs are exact multiples of a power of two, so that every machine has the same ones.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import math
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn

RESULTS = Path(__file__).with_suffix(".json")
ROUND, ROUNDS, LR, DECAY, EPOCHS = 73, 200, 0.1, 5e-4, 2
"""FedDIP: a round of the run (from 0), its number of rounds, and the local training."""
SEARCHES, SEARCH_ROUNDS = (0, 13, 50, 99), 99
"""DisPFL: rounds of a search, and its number of rounds; its schedule reaches 0 in the round after the last one."""
ERK_DENSITY, KEPT_SHARE = 0.5, 0.3
GROUPS, CAPACITIES = (40, 120, 200, 360, 80), (0.25, 0.25, 0.25, 0.5, 1.0, 1.0)
"""PerFedMask: parameters of each group, and the share of all of them that each client can train."""


def numbers(shape, seed):
    """Different numbers in [-.5, .5), spread by a linear congruential generator of full period."""
    count, state, found = math.prod(shape), seed, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        found.append(state / 2**31 - 0.5)
    return torch.tensor(found, dtype=torch.float64).to(torch.float32).view(shape)


class Net(nn.Module):
    """A small network with the names that FedDIP's program expects."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(36, 10), nn.ReLU(), nn.Linear(10, 3))
        for seed, value in enumerate(self.parameters()):
            value.data.copy_(numbers(value.shape, seed))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def weight_masks(seed=100):
    """A mask for every weight matrix of the network, about half of it kept."""
    names = [name for name, value in Net().named_parameters() if value.dim() > 1]
    return {n: numbers(Net().state_dict()[n].shape, seed + i) < 0 for i, n in enumerate(names)}


def pruned_net():
    """The network as a client receives it."""
    net = Net()
    for name, mask in weight_masks().items():
        net.get_parameter(name).data.mul_(mask)
    return net


def batches():
    """Four batches of 5 images of 8x8 pixels, with labels of three classes."""
    return [(2 * numbers((5, 1, 8, 8), 200 + i), torch.tensor([(7 * i + j) % 3 for j in range(5)])) for i in range(4)]


def search_inputs():
    """Weights, gradients and masks of a search, each about half kept."""
    shapes = {"a": (12, 17), "b": (5, 4, 3, 3)}
    trees = [{n: numbers(s, 300 + 10 * k + i) for i, (n, s) in enumerate(shapes.items())} for k in range(3)]
    return trees[0], trees[1], {name: value < 0 for name, value in trees[2].items()}


def shapes_of(model):
    return {name: value.shape for name, value in model.state_dict().items()}


def erk_models():
    """Name, shapes: for FedDIP weights only, for DisPFL all parameters."""
    from lightning_sparsefl.models import VGG11, AlexNet, LeNet5

    feddip = {"LeNet5": LeNet5(variant="1998"), "AlexNet": AlexNet()}
    dispfl = {"LeNet5": LeNet5(26), "VGG11": VGG11()}
    weights = {n: {k: s for k, s in shapes_of(m).items() if len(s) > 1} for n, m in feddip.items()}
    return weights, {n: shapes_of(m) for n, m in dispfl.items()}


def bits(mask):
    """A mask as a string of digits."""
    return "".join(str(int(value)) for value in mask.flatten())


def _options(**values):
    return types.SimpleNamespace(**values)


def run_feddip(folder):
    """One client's round, the server's new mask, and the densities of ERK."""
    sys.path.insert(0, str(folder))
    from client import Client

    args = _options(prunefl=False, prune=True, prox=False, sparse=True, local_ep=EPOCHS, local_batchsize=5)
    args.__dict__.update(amount_sparsity=0.9, init_sparsity=0.5, epochs=ROUNDS, lambda_shrink=1e-3, pnorm=2)
    args.__dict__.update(erk_power_scale=1, num_workers=0, model="lenet5")
    data = [(x[0], int(y[0])) for x, y in batches()]
    client = Client(args, (data, data), ([0], [0]), pruned_net(), 0)
    client.trainloader = batches()
    masks = {f"{name}_mask": mask.float() for name, mask in weight_masks().items()}
    client.train_model(ROUND, LR, pruning_mask=masks)
    trained = {
        name: [float(f"{number:.9g}") for number in value.flatten()]
        for name, value in client.model.state_dict().items()
    }
    server = client.prune_4_mask(pruned_net(), 1 - KEPT_SHARE)
    counts = {}
    for model, shapes in erk_models()[0].items():
        params = {name: torch.empty(shape) for name, shape in shapes.items()}
        sparsities = client.calculate_sparsities(params, sparse=ERK_DENSITY)
        counts[model] = {n: int(m.sum()) for n, m in client.init_masks(params, sparsities).items()}
    return {
        "penalty": client.lambda_shrink_cur(ROUND),
        "trained": trained,
        "mask": {name.removesuffix("_mask"): bits(mask) for name, mask in server.items()},
        "erk": {model: {n.removesuffix("_mask"): c for n, c in found.items()} for model, found in counts.items()},
    }


def run_dispfl(folder):
    """Searches in four rounds, and the densities of ERK."""
    tree = ast.parse((folder / "fedml_api/standalone/DisPFL/my_model_trainer.py").read_text())
    tree.body = [node for node in tree.body if "fedml" not in ast.unparse(node).partition("(")[0] or _is_class(node)]
    tree.body = [node for node in tree.body if not isinstance(node, ast.Try)]
    space = {"ModelTrainer": object, "__name__": "trainer"}
    exec(compile(tree, "my_model_trainer", "exec"), space)
    trainer = object.__new__(space["MyModelTrainer"])
    trainer.args, trainer.logger = _options(erk_power_scale=1), logging.getLogger("silent")
    sys.path.insert(0, str(folder / "fedml_api/standalone/DisPFL"))
    sys.modules.pop("client", None)
    from client import Client

    client = object.__new__(Client)
    client.args = _options(anneal_factor=0.5, comm_round=SEARCH_ROUNDS, dis_gradient_check=False)
    client.device = "cpu"
    weights, gradients, masks = search_inputs()
    found = {}
    for number in SEARCHES:
        fired, removed = client.fire_mask({n: m.float() for n, m in masks.items()}, weights, number)
        grown = client.regrow_mask(fired, removed, gradients)
        found[number] = {
            "fired": {n: bits(m) for n, m in fired.items()},
            "grown": {n: bits(m) for n, m in grown.items()},
        }
    counts = {}
    for model, shapes in erk_models()[1].items():
        params = {name: torch.empty(shape) for name, shape in shapes.items()}
        sparsities = trainer.calculate_sparsities(params, sparse=ERK_DENSITY)
        counts[model] = {n: int(m.sum()) for n, m in trainer.init_masks(params, sparsities).items()}
    return {"search": found, "erk": counts}


def _is_class(node):
    return isinstance(node, ast.ClassDef)


def run_fedlps(folder):
    """The utility of accuracies."""
    tree = ast.parse((folder / "FedLPS.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "U_function"]
    space = {"math": math}
    exec(compile(tree, "FedLPS", "exec"), space)
    return {"utility": {str(x): space["U_function"](x) for x in (0.0, 0.25, 0.5, 0.9, 1.0)}}


def run_perfedmask(folder):
    """The best of the program's 1000 starts, and its objective."""
    tree = ast.parse((folder / "fed_perfedmask.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "varInit"]
    tree.body[0].body[-1] = ast.parse("def f():\n return bestM, minPenObjVal").body[0].body[0]
    sampler = types.SimpleNamespace(tot=lambda: len(CAPACITIES))
    space = {"np": np, "fed": types.SimpleNamespace(client_sampler=sampler)}
    exec(compile(ast.fix_missing_locations(tree), "fed_perfedmask", "exec"), space)
    np.random.seed(0)
    plan, objective = space["varInit"](len(CAPACITIES), len(GROUPS), CAPACITIES, sum(GROUPS), np.array(GROUPS))
    return {"plan": plan.astype(int).tolist(), "objective": float(np.squeeze(objective))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("feddip", "dispfl", "fedlps", "perfedmask"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="checkout of the program")
    options = parser.parse_args()
    found = {
        "feddip": run_feddip(options.feddip),
        "dispfl": run_dispfl(options.dispfl),
        "fedlps": run_fedlps(options.fedlps),
        "perfedmask": run_perfedmask(options.perfedmask),
    }
    RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
