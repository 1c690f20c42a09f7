"""Units that are multiplied by zero against units that are cut out."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import FederatedAlgorithm, FederatedTrainer, Federation, FedLPS
from lightning_sparsefl.data import FederatedDigits
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.models import MLP
from lightning_sparsefl.sparse.submodel import keep_statistics
from lightning_sparsefl.sparse.units import keep_units, unit_counts, unit_masks, unit_norms
from lightning_sparsefl.types import Message, Update


class Narrower(FederatedAlgorithm):
    """Each client trains the largest half or third of the units."""

    frozen = ""

    def download(self, server, view):
        return Message(weights=server.weights)

    def train(self, message, client):
        kept = keep_units(unit_norms(client.units, message.weights), unit_counts(client.units, 1 / (2 + client.id % 2)))
        frozen = {n: torch.zeros_like(w, dtype=torch.bool) for n, w in message.weights.items() if n == self.frozen}
        result = client.fit(message.weights, trainable=frozen, units=kept)
        masks = unit_masks(client.units, kept, message.weights)
        assert all(bool((result.weights[name][~mask] == 0).all()) for name, mask in masks.items())
        return Update(weights=result.weights, votes=masks, weight=client.num_examples, metrics=result.metrics)

    def may_vote(self, message):
        return {}


class PartlyFrozen(Narrower):
    frozen = "net.fc2.weight"


class Grouped(L.LightningModule):
    """A residual network with group norms."""

    widths: set = set()  # noqa: RUF012 - a note of the test

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.block_norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        self.widths.add(int(self.stem.weight.shape[0]))
        h = F.relu(self.norm(self.stem(x)))
        h = F.relu(h + self.block_norm(self.block(h)))
        return self.head(h.mean((2, 3)))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Normed(Grouped):
    """The network with batch norms, whose statistics are averaged."""

    def __init__(self):
        super().__init__()
        self.norm, self.block_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(8)


def mlp():
    return MLP(num_classes=10, sample_shape=(1, 8, 8))


@pytest.fixture
def fit(tmp_path):
    def run(algorithm, make, execution, engine="fast"):
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            algorithm=algorithm,
            federation=Federation(clients_per_round=3, execution=execution, local_engine=engine),
            accelerator="cpu",
            devices=1,
            max_rounds=2,
            max_epochs=2,
            logger=False,
            seed=0,
            enable_progress_bar=False,
            precision="64-true",  # behind batch norms, rounding in single precision decides which activations are cut
            default_root_dir=str(tmp_path / execution),
            gradient_clip_val=1.0,
        )
        summary = trainer.fit(make(), FederatedDigits(num_clients=4, batch_size=64, val_fraction=0.2))
        content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
        return content["state_dict"], summary

    return run


@pytest.mark.slow_after_first
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize(
    ("algorithm", "make", "engine"),
    [
        (Narrower(), mlp, "fast"),
        (Narrower(), mlp, "trainer"),
        (PartlyFrozen(), mlp, "fast"),
        (Narrower(), Grouped, "fast"),
        (Narrower(), Normed, "fast"),
        (Narrower(), Normed, "trainer"),
        (Narrower(), Normed, "stacked"),
    ],
)
def test_cutting_gives_the_weights_of_masking(fit, algorithm, make, engine):
    masked, same = fit(algorithm, make, "mask", engine)
    narrow, summary = fit(algorithm, make, "cut", engine)
    for name, value in masked.items():
        torch.testing.assert_close(narrow[name], value, rtol=1e-10, atol=1e-10, msg=name)
    for name in same:
        if name.split("/")[0] in ("global", "personal", "flops", "comm"):
            assert summary[name] == pytest.approx(same[name], rel=1e-3), name


class Checked(FedLPS):
    """Checks that a client's update leaves the statistics of the units that it has dropped."""

    def train(self, message, client):
        update = super().train(message, client)
        moved = {name: update.weights[name] for name in client.buffers}
        still = {name: torch.zeros_like(value) for name, value in moved.items()}
        masked = keep_statistics(moved, client.units, update.memory["kept"], still, client.buffers)
        assert all(torch.equal(moved[name], masked[name]) for name in moved)
        assert all(0 < int((value == 0).sum()) < value.numel() for value in moved.values())
        return update


@pytest.mark.parametrize("refresh", ["step", "round"])
def test_dropped_units_keep_their_statistics_for_the_clients_that_have_them(fit, refresh):
    state, _ = fit(Checked(refresh=refresh, ratio="fixed"), Normed, "mask")
    assert all(bool((state[name] > 0.01).all()) for name in state if name.endswith("running_var"))


def test_a_cut_client_trains_a_narrow_module(fit):
    Grouped.widths.clear()
    fit(Narrower(), Grouped, "cut")
    assert Grouped.widths == {3, 4, 8}  # a third and half of 8, and the whole model when it is scored
    Grouped.widths.clear()
    fit(Narrower(), Grouped, "mask")
    assert Grouped.widths == {8}


class Teacher(MLP):
    """Follows a layer with a copy of it that `forward` does not use."""

    def __init__(self):
        super().__init__(num_classes=10, sample_shape=(1, 8, 8))
        self.teacher = copy.deepcopy(self.net.fc1).requires_grad_(False)

    def on_train_batch_end(self, *_):
        self.teacher.weight.lerp_(self.net.fc1.weight.detach(), 0.1)


def test_an_error_of_torch_in_a_cut_module_names_the_other_execution(fit):
    words = r"The size of tensor .*; layers are cut in this run, and `federation\.execution: mask` keeps their shapes"
    with pytest.raises(ClientFailed, match=words):
        fit(Narrower(), Teacher, "cut")
    fit(Narrower(), Teacher, "mask")


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_the_density_is_that_of_what_clients_train(fit):
    def make():
        return MLP(num_classes=10, sample_shape=(1, 8, 8), hidden=(8, 6))

    weights, summary = fit(FedLPS(ratio="fixed", refresh="round"), make, "cut")
    kept = {  # half of the hidden units, so a quarter of what lies between two hidden layers
        name: (0.25 if "fc2" in name and value.dim() > 1 else 0.5) * value.numel()
        for name, value in weights.items()
        if name != "net.fc3.bias"
    }
    assert summary["density/all"] == pytest.approx(sum(kept.values()) / sum(weights[n].numel() for n in kept))


def test_a_model_without_units_is_refused_by_name(fit):
    class Flat(Grouped):
        def __init__(self):
            super().__init__()
            del self.stem, self.norm, self.block, self.block_norm
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(x.flatten(1))

    with pytest.raises(InvalidOption, match="`Flat` has no units; expected a hidden layer"):
        fit(Narrower(), Flat, "cut")


def test_a_module_that_depends_on_its_width_is_not_cut(fit):
    class ByWidth(Grouped):
        def forward(self, x):
            return super().forward(x) / self.stem(x).shape[1]

    with pytest.raises(InvalidOption, match=r"`federation.execution` is 'cut', but .* `ByWidth` computes some"):
        fit(Narrower(), ByWidth, "cut")
