"""Projects as users write them, without this package in mind, and the masking callbacks that are put into them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import callbacks
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import kept

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "StaticMask": (callbacks.StaticMask, {"density": 0.3}),
    "RigL": (callbacks.DynamicMask, {"density": 0.3, "every_n_steps": 2}),
    "SET": (callbacks.DynamicMask, {"density": 0.3, "growth": "random", "every_n_steps": 2}),
    "GradualPruning": (callbacks.GradualPruning, {"density": 0.3, "every_n_steps": 2}),
    "GradualPruning, global": (callbacks.GradualPruning, {"density": 0.3, "every_n_steps": 2, "scope": "global"}),
    "GlobalMagnitudePruning": (callbacks.GlobalMagnitudePruning, {"fraction": 0.7}),
    "NMPruning": (callbacks.NMPruning, {"n": 1, "m": 4}),
    "DynamicPruningWithFeedback": (callbacks.DynamicPruningWithFeedback, {"density": 0.3, "every_n_steps": 2}),
    "LotteryRewind": (callbacks.LotteryRewind, {"density": 0.3, "cycles": 2}),
    "LearnedImportance": (callbacks.LearnedImportance, {"density": 0.3}),
}
SCHEDULED = (
    callbacks.GradualPruning,
    callbacks.DynamicPruningWithFeedback,
    callbacks.LotteryRewind,
    callbacks.NMPruning,
)
"""Those that may begin with a dense model; the others have one density in all forward passes."""


def pytest_collection_modifyitems(items: Any) -> None:
    """Ignore Lightning's own complaints about a tiny run."""
    for item in items:
        if "tests/foreign" in item.path.as_posix():
            for message in (
                ":lightning.fabric.utilities.warnings.PossibleUserWarning",
                ".*LeafSpec.*:FutureWarning",
                ".*does not have many workers.*",
                ".*lr_scheduler.step.*before.*optimizer.step.*",
                ".*Checkpoint directory.*",
                ".*never moves its mask.*",
            ):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


def documented(name: str) -> Any:
    """Return the block of code in callbacks/README.md that has a name, compiled."""
    page = (Path(__file__).parents[2] / "callbacks" / "README.md").read_text()
    (block,) = (part for part in page.split("```python\n")[1:] if name in part.partition("```")[0])
    return compile(block.partition("```")[0], "callbacks/README.md", "exec")


class Net(L.LightningModule):
    """A classifier."""

    def __init__(self, optimizer: Any = None, net: Any = None, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = net or nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer, self.lr, self.batch_size = optimizer, 0.1, 4

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.optimizer is not None:
            return self.optimizer(self.parameters())
        return SGD(self.parameters(), self.lr, momentum=0.9, weight_decay=1e-3)


def loader(batch_size: int = 4, batches: int = 6) -> Any:
    x = torch.randn(4 * batches, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=batch_size)


class Watch(Callback):
    """Before every forward pass: what is not held is exactly 0, and exactly as many weights are held as asked for."""

    def __init__(self, callback: MaskingCallback, in_process: bool = False) -> None:
        self.callback, self.in_process, self.forwards, self.dense = callback, in_process, 0, 0
        self.counts: list[int] = []

    def look(self, module: Any) -> None:
        self.forwards += module.training
        masks, weights = self.callback.masks, dict(module.named_parameters())
        if not masks and isinstance(self.callback, callbacks.LearnedImportance):
            return  # its masks are made for the first batch
        assert masks
        self.dense += any(bool(weights[name].detach()[~mask].any()) for name, mask in masks.items())
        self.counts.append(kept(masks))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.handle = pl_module.register_forward_pre_hook(lambda module, _: self.look(module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(pl_module)
        self.handle.remove()
        if self.in_process:  # which may be spawned
            self.assert_held()

    def assert_held(self, forwards: int = 1) -> None:
        assert self.forwards >= forwards
        assert self.dense == 0
        assert self.counts == sorted(self.counts, reverse=True)
        learned = isinstance(self.callback, callbacks.LearnedImportance)
        assert isinstance(self.callback, SCHEDULED) or len(set(self.counts[learned:])) == 1  # after its probe
        if learned:
            for units in self.callback.kept.values():
                assert int(units.sum()) == max(1, int(self.callback.density * len(units) + 0.5))
        else:
            assert self.counts[-1] == asked(self.callback)


def asked(callback: Any) -> int:
    """How many weights the options of a callback ask for."""
    sizes = {name: mask.numel() for name, mask in callback.masks.items()}
    total = sum(sizes.values())
    if isinstance(callback, callbacks.StaticMask | callbacks.DynamicMask):
        shapes = {name: mask.shape for name, mask in callback.masks.items()}
        return sum(kept_counts(shapes, erk(shapes, callback.density)).values())
    if isinstance(callback, callbacks.GlobalMagnitudePruning):
        for _ in callback.epochs:
            total = int((1 - callback.fraction) * total + 1e-9)
        return total
    if isinstance(callback, callbacks.NMPruning):
        return total * callback.n // callback.m
    if getattr(callback, "scope", "global") == "layer":
        return sum(max(1, int(callback.density * size + 1e-9)) for size in sizes.values())
    return int(callback.density * total + 1e-9)


class Project:
    """A trainer for projects, with one masking callback in it."""

    Net, Watch, KINDS = Net, Watch, KINDS
    loader, documented = staticmethod(loader), staticmethod(documented)

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def make(self, kind: str, **options: Any) -> Any:
        cls, given = KINDS[kind]
        return cls(**{**given, **options})

    def trainer(self, attached: list[Any], **options: Any) -> L.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        saves = any(isinstance(callback, Checkpoint) for callback in attached)
        given = {"max_epochs": 4, "devices": 1, "enable_checkpointing": saves, "default_root_dir": self.folder}
        return L.Trainer(callbacks=attached, **{**quiet, **given, **options})

    def fit(
        self, kind: Any, module: Any, data: Any = None, beside: Any = (), before: Any = (), **options: Any
    ) -> Watch:
        """Train, and assert that the mask was held; returns what was seen."""
        callback = self.make(kind, **options.pop("arguments", {})) if isinstance(kind, str) else kind
        watch = Watch(callback)
        trainer = self.trainer([*before, callback, *beside, watch], **options)
        validation = loader() if is_overridden("validation_step", module) else None
        trainer.fit(module, loader() if data is None else data, validation)
        watch.trainer = trainer
        watch.assert_held()
        assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
        return watch


@pytest.fixture
def project(tmp_path: Any) -> Project:
    torch.manual_seed(0)
    return Project(tmp_path)


def pytest_generate_tests(metafunc: Any) -> None:
    """Run a test that takes `kind` over every exported masking callback."""
    if "kind" in metafunc.fixturenames and "kind" not in str(metafunc.definition.own_markers):
        exported = {getattr(callbacks, name) for name in callbacks.__all__}
        masking = {each for each in exported if inspect.isclass(each) and issubclass(each, MaskingCallback)}
        assert masking == {cls for cls, _ in KINDS.values()}
        metafunc.parametrize("kind", KINDS)
