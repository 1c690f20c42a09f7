"""Overhead of a masking callback in a training step: an MLP of width 512 and a ResNet18, SGD with momentum, one thread.

Both sides run the same plain loop on their own copy of the module, one of them with the hooks of the callback where a
Trainer calls them. They take turns within a cycle. A ratio is the median over the cycles of the CPU time of the masked
side divided by that of the dense side. Steps in which the mask changes are excluded from `ratio`; `ratio_with_moves`
adds their mean extra time, spread over the default number of steps between two changes. The script stops if a weight
that is not kept differs from 0 in the end.

    python benchmarks/masked_step.py --out result.json
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_sparsefl import callbacks
from lightning_sparsefl.models import MLP, ResNet18

RATES = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
CALLBACKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "StaticMask": (callbacks.StaticMask, {"density": 0.2}),
    "DynamicMask (RigL)": (callbacks.DynamicMask, {"stop": 1.0}),
    "DynamicMask (SET)": (callbacks.DynamicMask, {"growth": "random", "stop": 1.0}),
    "GradualPruning": (callbacks.GradualPruning, {"end": 1.0}),
    "GradualPruning (global)": (callbacks.GradualPruning, {"end": 1.0, "scope": "global"}),
    "GlobalMagnitudePruning": (callbacks.GlobalMagnitudePruning, {"fraction": 0.8}),
    "DynamicPruningWithFeedback": (callbacks.DynamicPruningWithFeedback, {"end": 1.0}),
}
"""Callbacks at density 0.2 or with it as the target; masks change until the end."""


class Side:
    """One side of a comparison: a module, its optimizer and optionally a callback, for which it acts as the trainer.

    Args:
        net: Module; trained in place.
        batch: Inputs and labels of each step.
        callback: Callback; None for dense training.
        total: Number of steps of the fit, for the schedule of the callback.
    """

    current_epoch = 0
    accumulate_grad_batches = 1
    should_stop = False
    max_epochs = 1
    max_steps = -1

    def __init__(self, net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], callback: Any, total: int) -> None:
        self.net, self.batch, self.callback = net, batch, callback
        self.lightning_module = net
        self.global_step, self.num_training_batches, self.estimated_stepping_batches = 0, total, total
        self.optimizers = [torch.optim.SGD(net.parameters(), **RATES)]
        self.callbacks = [] if callback is None else [callback]
        self.precision_plugin = SimpleNamespace(scaler=None)
        self.state, self.strategy = SimpleNamespace(fn="fit"), SimpleNamespace(restore_checkpoint_after_setup=False)
        if callback is not None:
            callback.setup(self, net, "fit")
        for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
            if callback is not None:
                getattr(callback, hook)(self, net)

    def step(self) -> tuple[float, bool]:
        """Run one step; return its CPU time in seconds and whether the mask changed."""
        (optimizer,), (inputs, targets) = self.optimizers, self.batch
        before = None if self.callback is None else dict(self.callback.masks)
        start = time.process_time()
        if self.callback is not None:
            self.callback.on_train_batch_start(self, self.net, self.batch, self.global_step)
        optimizer.zero_grad()
        cross_entropy(self.net(inputs), targets).backward()
        if self.callback is not None:
            self.callback.on_before_optimizer_step(self, self.net, optimizer)
        optimizer.step()
        self.global_step += 1
        if self.callback is not None:
            self.callback.on_train_batch_end(self, self.net, None, self.batch, self.global_step - 1)
        taken = time.process_time() - start
        moved = before is not None and any(self.callback.masks[name] is not mask for name, mask in before.items())
        return taken, moved

    def require_masked(self) -> None:
        """Exit if a weight that is not kept differs from 0."""
        for name, mask in self.callback.masks.items():
            if bool(self.net.get_parameter(name)[~mask].any()):
                raise SystemExit(f"{type(self.callback).__name__} has not held its mask of {name}.")


def compare(net: nn.Module, batch: Any, kind: Any, options: dict[str, Any], size: dict[str, int]) -> dict[str, float]:
    """Compare the masked and the dense side by medians over the cycles.

    Args:
        net: Module, which is copied for each side.
        batch: Inputs and labels of each step.
        kind: Class of the callback.
        options: Options of the callback.
        size: Number of steps of a turn, of cycles, and of steps between two changes of the mask.
    """
    moves = callbacks_interval(kind)
    given = options | ({"every_n_steps": size["moves"]} if moves else {})
    total = size["steps"] * (size["cycles"] + 1)
    sides = [Side(copy.deepcopy(net), batch, callback, total) for callback in (None, kind(**given))]
    ratios, dense, masked, moving = [], [], [], []
    for cycle in range(size["cycles"] + 1):
        taken: dict[int, list[tuple[float, bool]]] = {}
        for index in (0, 1) if cycle % 2 else (1, 0):
            taken[index] = [sides[index].step() for _ in range(size["steps"])]
        if cycle == 0:
            continue  # the first cycle allocates memory
        plain = [seconds for seconds, _ in taken[0]]
        held = [seconds for seconds, moved in taken[1] if not moved]
        dense.append(statistics.median(plain))
        if held:
            masked.append(statistics.median(held))
            ratios.append(masked[-1] / dense[-1])
        moving += [seconds for seconds, moved in taken[1] if moved]
    sides[1].require_masked()
    step = statistics.median(masked)
    move = max(0.0, statistics.mean(moving) - step) if moving and moves else 0.0
    floor, ratio = statistics.median(dense), statistics.median(ratios)
    return {
        "dense_us": floor * 1e6,
        "masked_us": step * 1e6,
        "move_us": move * 1e6,
        "ratio": ratio,
        "ratio_with_moves": ratio + (move / floor / moves if moves else 0.0),
        "live_bytes_a_weight": live_bytes(sides[1]),
    }


def callbacks_interval(kind: Any) -> int:
    """Return the default number of steps between two changes of the mask; 0 if it does not change."""
    return int(getattr(kind(), "every_n_steps", 0))


def live_bytes(side: Side) -> float:
    """Compute the bytes per weight of all tensors that belong to the callback and not to the module."""
    own = {weight.data_ptr() for weight in side.net.parameters()}
    held = {t.data_ptr(): t.numel() * t.element_size() for t in tensors(vars(side.callback)) if t.data_ptr() not in own}
    return sum(held.values()) / sum(mask.numel() for mask in side.callback.masks.values())


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def models(width: int, batch: int) -> dict[str, tuple[nn.Module, Any]]:
    """Create the two modules, each with a batch.

    Args:
        width: Width of the hidden layers of the MLP.
        batch: Batch size of the MLP; that of ResNet18 is a quarter.
    """
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    found = {}
    for name, module, shape, samples in (
        ("mlp", MLP(hidden=(width, width)), (1, 28, 28), batch),
        ("resnet18", ResNet18(num_classes=10), (3, 32, 32), max(1, batch // 4)),
    ):
        inputs = torch.randn(samples, *shape, generator=rng)
        found[name] = (module, (inputs, torch.randint(10, (samples,), generator=rng)))
    return found


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="width of the two hidden layers of the MLP")
    parser.add_argument("--batch", type=int, default=128, help="batch size of the MLP; that of ResNet18 is a quarter")
    parser.add_argument("--steps", type=int, nargs=2, default=(20, 4), help="number of steps of a turn: MLP, ResNet18")
    parser.add_argument("--cycles", type=int, nargs=2, default=(30, 5), help="number of cycles: MLP, ResNet18")
    parser.add_argument("--models", nargs="*", default=["mlp", "resnet18"], choices=["mlp", "resnet18"])
    parser.add_argument("--callbacks", nargs="*", default=list(CALLBACKS), choices=list(CALLBACKS))
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "width": arguments.width,
        "batch": arguments.batch,
        "steps": list(arguments.steps),
        "cycles": list(arguments.cycles),
    }
    for place, (model, (net, batch)) in enumerate(models(arguments.width, arguments.batch).items()):
        if model in arguments.models:
            size = {"steps": arguments.steps[place], "cycles": arguments.cycles[place]}
            size["moves"] = max(2, size["steps"] // 2)
            result[model] = {name: compare(net, batch, *CALLBACKS[name], size=size) for name in arguments.callbacks}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
