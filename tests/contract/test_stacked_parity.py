"""Clients that train as a stack end where they end one after another, to 1e-12 in float64, on any number of ranks."""

from __future__ import annotations

import csv
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from helpers.algorithms import every_variant
from helpers.device import DEVICE, on_several_ranks
from helpers.masking import PRUNERS
from helpers.networks import Classifier, module_for
from lightning_sparsefl import (
    APFL,
    FD,
    SCAFFOLD,
    FedAvg,
    FedDIP,
    FederatedTrainer,
    Federation,
    FedLPS,
    FedMef,
    FedNova,
    FedPM,
    FedProx,
    FedRep,
    FedRolex,
    FedSpa,
    FjORD,
    HeteroFL,
    PerFedAvg,
    PerFedMask,
    PFedMe,
    PruneTrain,
    SpaFL,
    SparsyFed,
    SubFedAvg,
)
from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GlobalMagnitudePruning,
    GradualPruning,
    GroupPenalty,
    LayerFreezing,
    LearnedImportance,
    NMPruning,
    ProximalTerm,
    StaticMask,
)
from lightning_sparsefl.callbacks.stacking import trees
from lightning_sparsefl.data import IID, Dirichlet, FederatedDigits
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedFit
from lightning_sparsefl.federated.local.stacked.recording.recorded_step import TrainingPass
from lightning_sparsefl.federated.local.stacked.scoring.evaluator import StackEvaluator
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.types import Update

TOLERANCE = 1e-12


def without_noise(module):
    """Return a module without dropout, whose draws differ in a stack."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


class Pictures(L.LightningModule):
    """Convolutions, pooling and norms, with an L2 term and two groups of parameters.

    Smooth for long comparisons: where two numbers are equal up to rounding, a maximum may be taken from either place.
    """

    def __init__(self, configure=None, norm="batch", smooth=False):
        super().__init__()
        self.configure = configure
        norms = {
            "batch": nn.BatchNorm2d,
            "group": lambda width: nn.GroupNorm(2, width),
            "none": lambda _: nn.Identity(),
        }
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            norms[norm](4),
            nn.Softplus() if smooth else nn.ReLU(),
            nn.AvgPool2d(2) if smooth else nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, groups=2, bias=False),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(8),
            nn.GELU(),
            nn.Linear(8, 10),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1], label_smoothing=0.1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"least": loss, "size": float(len(batch[1]))}, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("train_acc", (logits.argmax(1) == batch[1]).double().mean(), on_step=False, on_epoch=True)
        return {"loss": loss + 1e-3 * sum(p.square().sum() for p in self.parameters() if p.dim() > 1)}

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).double().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).double().mean())

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 1e-2}, {"params": others, "weight_decay": 0.0}]
        return self.configure(groups) if self.configure else torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.fixture
def stacks():
    """The sizes of all stacks that are trained, without those of the trials."""
    sizes, before = [], StackedWorker._fit_group

    def fit(worker, group):
        before(worker, group)
        if all(request.result for request in group):
            sizes.append(len(group))

    with mock.patch.object(StackedWorker, "_fit_group", fit):
        yield sizes


@pytest.fixture
def scored():
    """The sizes of all stacks that are evaluated, without those of the trials."""
    sizes, before = [], StackEvaluator._run_group

    def evaluate(evaluator, group):
        before(evaluator, group)
        if all(request.result for request in group):
            sizes.append(len(group))

    with mock.patch.object(StackEvaluator, "_run_group", evaluate):
        yield sizes


def with_losses(module):
    """Return a module that logs the loss of an evaluation as well, which shows differences that accuracies hide."""

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_acc", (logits.argmax(1) == batch[1]).double().mean())

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"validation_step": validation_step})
    return module


def close(ours, theirs):
    """Assert that two runs ended with equal weights and tables, up to rounding."""
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name].double(), tensor.double(), rtol=TOLERANCE, atol=TOLERANCE), name


def close_tables(ours, theirs):
    ours, theirs = rows(ours), rows(theirs)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if value and value.replace(".", "").replace("-", "").replace("e", "").isdigit():
                assert float(mine[key]) == pytest.approx(float(value), rel=1e-9, abs=TOLERANCE), key
            else:
                assert mine[key] == value, key


@every_variant
def test_stacked_clients_end_where_they_end_one_after_another(algorithm, federation, stacks, scored):
    weights = []
    for engine in ("fast", "stacked"):
        torch.manual_seed(1)
        module = with_losses(without_noise(module_for(algorithm)()))
        run = federation(
            algorithm,
            folder=engine,
            module=module,
            precision="64-true",
            federation={
                "local_engine": engine,
                "stack_size": 4,
                "capacities": [0.5, 1.0],
                "eval_after_training": True,
            },
        )
        weights.append((module.state_dict(), run))
    close(weights[1][0], weights[0][0])
    for table in ("metrics.csv", "clients.csv"):
        close_tables(weights[1][1].run_folder / table, weights[0][1].run_folder / table)
    assert stacks
    assert min(stacks) > 1
    assert scored


@pytest.mark.filterwarnings("ignore:.*cannot act on several of them at once with")
@every_variant
def test_stacked_clients_accumulate_gradients_as_they_do_one_after_another(algorithm, federation, stacks):
    weights = []
    for engine in ("fast", "stacked"):
        torch.manual_seed(1)
        module = with_losses(without_noise(module_for(algorithm)()))
        options = {"local_engine": engine, "stack_size": 4, "capacities": [0.5, 1.0], "eval_after_training": False}
        run = federation(
            algorithm,
            folder=engine,
            module=module,
            precision="64-true",
            accumulate_grad_batches=2,  # a power of 2, by which sums that cancel stay 0
            federation=options,
        )
        weights.append((module.state_dict(), run))
    close(weights[1][0], weights[0][0])
    close_tables(weights[1][1].run_folder / "clients.csv", weights[0][1].run_folder / "clients.csv")
    acts_on_batches = isinstance(algorithm, (APFL, FjORD, PerFedAvg, PFedMe))
    acts_on_batches |= isinstance(algorithm, FedLPS) and algorithm.pattern == "learned"
    assert bool(stacks) != acts_on_batches


RAGGED = Dirichlet(alpha=0.5)


def parts(batch_size=7, partition=RAGGED):
    return FederatedDigits(
        num_clients=8, batch_size=batch_size, eval_split="test", partition=partition, test_per_client=10
    )


def digits(
    folder,
    engine,
    module,
    algorithm=None,
    *,
    epochs=2,
    rounds=2,
    batch_size=7,
    devices=1,
    ckpt_path=None,
    partition=RAGGED,
    **more,
):
    """Run a federation of eight clients with different numbers of samples, and so of batches."""
    options = {"local_engine": engine, "clients_per_round": 6, "stack_size": 6, **more.pop("federation", {})}
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(**options),
        accelerator=DEVICE.type,
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=rounds,
        max_epochs=epochs,
        precision=more.pop("precision", "64-true"),
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        seed=0,
        timeout=120,
        **more,
    )
    data = parts(batch_size, partition)
    module = module() if callable(module) and not isinstance(module, nn.Module) else module
    trainer.fit(module, data, ckpt_path)
    return trainer, {name: tensor.to("cpu", copy=True) for name, tensor in module.state_dict().items()}


def compare(folder, module, algorithm=None, **options):
    theirs, before = digits(folder / "fast", "fast", module, algorithm, **options)
    ours, after = digits(folder / "stacked", "stacked", module, algorithm, **options)
    close(after, before)
    close_tables(ours.run_folder / "clients.csv", theirs.run_folder / "clients.csv")


def seeded(*args, kind=Pictures, **kwargs):
    def make():
        torch.manual_seed(1)
        return kind(*args, **kwargs)

    return make


OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda groups: torch.optim.Rprop([p for group in groups for p in group["params"]], lr=1e-3),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", ["Adam", *(name for name in OPTIMIZERS if name != "Adam")])
def test_optimizers_of_clients_with_different_numbers_of_batches(name, tmp_path, stacks):
    compare(tmp_path, seeded(OPTIMIZERS[name], norm="group"))
    assert stacks


def with_schedule(groups):
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    return [optimizer], [
        {"scheduler": schedules.ExponentialLR(optimizer, 0.9), "interval": "step"},
        {"scheduler": schedules.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
    ]


CASES = {
    "schedules": ({"configure": with_schedule, "norm": "group"}, {"partition": IID()}),
    "one cycle": (
        {
            "configure": lambda groups: (
                [optimizer := torch.optim.SGD(groups, lr=0.01)],
                [{"scheduler": schedules.OneCycleLR(optimizer, 0.1, total_steps=500), "interval": "step"}],
            )
        },
        {"partition": IID()},
    ),
    "clip by norm": ({"norm": "none", "smooth": True}, {"gradient_clip_val": 0.05}),
    "clip by value": (
        {"norm": "none", "smooth": True},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "limited batches": ({"norm": "group"}, {"limit_train_batches": 3}),
    "batch norm": ({"norm": "batch"}, {"batch_size": 6, "epochs": 1}),
    "wire and disk": ({"norm": "none", "smooth": True}, {"federation": {"wire": "encode", "store": "disk"}}),
    "accumulated": (
        {"configure": lambda groups: torch.optim.Adam(groups, lr=1e-2), "norm": "group"},
        {"accumulate_grad_batches": 3},
    ),
    "accumulated by other steps": ({"norm": "none", "smooth": True}, {"accumulate_grad_batches": 2, "epochs": 3}),
    "accumulated, schedules": (
        {"configure": with_schedule, "norm": "group"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "partition": IID()},
    ),
    "small stacks": ({"norm": "none", "smooth": True}, {"federation": {"stack_size": 2}}),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", CASES)
def test_settings_of_clients_with_different_numbers_of_batches(case, tmp_path, stacks):
    made, options = CASES[case]
    compare(tmp_path, seeded(**made), **options)
    assert stacks


class Seldom(Classifier):
    """Classifier that logs a key in the first epoch only, and another one in batches that not every client has."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 0:
            self.log("first", loss, on_step=True, on_epoch=True)
        if batch_idx == 8:
            self.log("ninth", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


def test_keys_that_are_not_logged_everywhere(tmp_path, stacks):
    compare(tmp_path, seeded(kind=Seldom), rounds=1)
    assert stacks
    ninth = [row["local/ninth"] for row in rows(next(tmp_path.glob("stacked/*/*/clients.csv")))]
    assert "" in ninth
    assert len(set(ninth)) > 1


class Counting(Classifier):
    """Classifier whose loss depends on the number of the client's steps, from an epoch on."""

    def __init__(self, first=0):
        super().__init__()
        self.first = first
        self.net = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + self.global_step) if self.current_epoch >= self.first else loss


@pytest.fixture
def together():
    """The numbers of clients that step together in the last epoch, and whether their numbers of steps are equal."""
    sizes, before = [], StackedFit._train

    def train(fit, started):
        low, high = started.one.metrics.low, started.one.metrics.high
        if fit.trainer.current_epoch == fit.requests[0].epochs - 1:
            sizes.append((high - low, len(set(fit.optimizer.taken[low:high])) == 1))
        return before(fit, started)

    with mock.patch.object(StackedFit, "_train", train):
        yield sizes


@pytest.mark.slow_after_first
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_clients_that_have_taken_different_numbers_of_steps_step_together(optimizer, tmp_path, together):
    compare(tmp_path, seeded(OPTIMIZERS[optimizer], norm="none", smooth=True), epochs=3)
    assert max(size for size, equal in together if not equal) > 2


def test_a_step_that_counts_its_clients_steps_has_equal_numbers(tmp_path, stacks, together):
    compare(tmp_path, seeded(kind=Counting))
    assert stacks
    assert together
    assert all(equal for _, equal in together)


def test_a_step_that_begins_to_count_later_is_undone(tmp_path, stacks):
    with pytest.warns(match="asks for the number of steps, of which each client has its own"):
        compare(tmp_path, seeded(1, kind=Counting), rounds=1)
    assert not stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "algorithm",
    [
        FedDIP(reconfigure_every=1, penalty=0.01, mu=0.1),
        FedSpa(),
        FedProx(mu=0.5),
        FedNova(mu=0.5),
        SCAFFOLD(),
        PerFedMask(masking="random"),
        APFL(adaptive=True),
        PFedMe(lam=2.0, steps=2, personal_lr=0.01),
        PerFedAvg(alpha=0.05, order="hessian"),
        FjORD(rates=(0.25, 0.5, 1.0), distill=True),
        SpaFL(),
        SparsyFed(density=0.5),
        SubFedAvg(min_score=0.0, gate="train"),
        PruneTrain(strength=0.01),
        FedMef(density=0.5, activation_density=0.5),
        FedMef(density=0.5, psi=8.0, max_lr=0.3),
        FedLPS(ratio="capacity"),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_methods_with_clients_of_different_sizes(algorithm, tmp_path, stacks):
    compare(tmp_path, seeded(norm="none", smooth=True), algorithm, federation={"capacities": [0.3, 1.0]})
    assert stacks


CHOICES = {
    "scores": (FedLPS(ratio="capacity"), "mask"),
    "scores of one client each": (FedLPS(ratio="capacity", score_lr=1.0, reduction="sum", mu=0.1), "mask"),
    "magnitudes": (FedLPS(ratio="capacity", pattern="magnitude"), "mask"),
    "a round's scores": (FedLPS(ratio="capacity", refresh="round"), "mask"),
    "a round's scores, cut": (FedLPS(ratio="capacity", refresh="round"), "cut"),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("optimizer", [None, "Adagrad"])
@pytest.mark.parametrize("choice", CHOICES)
def test_units_that_each_client_chooses(choice, optimizer, tmp_path, stacks):
    """Units change within a fit, and the optimizer forgets those that are dropped."""
    algorithm, execution = CHOICES[choice]
    made = seeded(OPTIMIZERS[optimizer] if optimizer else None, norm="none", smooth=True)
    compare(tmp_path, made, algorithm, federation={"capacities": [0.3, 0.6], "execution": execution})
    assert stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "algorithm",
    [FedLPS(ratio="capacity"), FedLPS(ratio="capacity", pattern="magnitude"), PruneTrain(strength=0.01)],
    ids=["scores", "magnitudes", "lasso"],
)
def test_clients_that_a_cache_does_not_hold_together_have_the_same_bits(algorithm, tmp_path, stacks, monkeypatch):
    made, options = seeded(norm="none"), {"federation": {"capacities": [0.3, 0.6]}, "precision": "32-true"}
    _, together = digits(tmp_path / "together", "stacked", made, algorithm, **options)
    total = sum(weight.nbytes for weight in made().parameters())
    for size in (1, 2 * total):  # one client, and two or three
        monkeypatch.setattr(trees, "_CACHE", size)
        _, blocks = digits(tmp_path / f"blocks {size}", "stacked", made, algorithm, **options)
        assert all(torch.equal(blocks[name], weight) for name, weight in together.items())
    assert 6 in stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize("pattern", ["learned", "magnitude", "ordered", "random", "rolling"])
def test_a_callback_that_chooses_units_has_its_state_after_a_stack(pattern, tmp_path, stacks):
    found = {}

    class Method(FedAvg):
        def train(self, message, client):
            chosen = LearnedImportance(
                0.3 + 0.05 * client.id, pattern, probe=False, turn=client.id, groups=client.units
            )
            result = client.fit(message.weights, callbacks=[chosen])
            trees = (chosen.scores, chosen.kept, chosen.masks, chosen.state_dict()["aside"])
            found.setdefault((client.round, client.id), []).append(trees)
            return Update(weights=result.weights, weight=client.num_examples)

    compare(tmp_path, seeded(norm="none", smooth=True), Method(), rounds=1, federation={"clients_per_round": 4})
    assert stacks
    for alone, together in found.values():
        for ours, theirs in zip(together, alone, strict=True):
            assert ours.keys() == theirs.keys()
            close(ours, theirs)


class Headed(Pictures):
    """Has a frozen first layer, in a group of the optimizer with a learning rate of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        frozen = list(self.net[0].parameters())
        return torch.optim.SGD([{"params": frozen, "lr": 0.01}, {"params": list(self.net[4:].parameters())}], lr=0.05)


class Unstepped(Pictures):
    """Has a frozen layer and a trainable one, of which the optimizer knows neither."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.net[1].parameters(), *self.net[9].parameters()], lr=0.05, momentum=0.9)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", [FedPM(), SpaFL(), SparsyFed(density=0.5)], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("kind", [Unstepped, Headed])
def test_weights_that_are_a_function_of_others_are_those_of_the_optimizer(kind, algorithm, tmp_path, stacks):
    compare(tmp_path, seeded(kind=kind, smooth=True), algorithm, rounds=2, epochs=1)
    assert 6 in stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "mask", [StaticMask(rescale=True), DynamicMask(rescale=True, every_n_steps=2)], ids=lambda each: type(each).__name__
)
def test_a_callback_before_a_mask_reads_masked_weights(mask, tmp_path, stacks):
    compare(tmp_path, seeded(smooth=True), epochs=1, client_callbacks=[ProximalTerm(1.0), mask])
    assert 6 in stacks


class WritesWeights(Pictures):
    """Moves weights in its training step, which masks have to undo before the optimizer's step."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[9].weight.add_(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "algorithm", [FedSpa(density=0.5), FedLPS(ratio="capacity", pattern="magnitude")], ids=["FedSpa", "FedLPS"]
)
def test_masks_hold_weights_that_a_step_writes(algorithm, tmp_path, stacks):
    compare(tmp_path, seeded(kind=WritesWeights, smooth=True), algorithm, federation={"capacities": [0.5, 1.0]})
    assert 6 in stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", [SCAFFOLD(), FedNova(), APFL(adaptive=True)], ids=lambda a: type(a).__name__)
def test_a_first_group_without_gradients_does_not_count(algorithm, tmp_path, stacks):
    made, runs = seeded(kind=Headed, norm="none", smooth=True), {}
    for engine in ("trainer", "fast", "stacked"):
        runs[engine] = digits(tmp_path / engine, engine, made, algorithm, rounds=2, epochs=1)
    trainer, expected = runs.pop("trainer")
    for run, weights in runs.values():
        close(weights, expected)
        close_tables(run.run_folder / "clients.csv", trainer.run_folder / "clients.csv")
    assert (expected["net.9.weight"] - made().net[9].weight).abs().max() > 0.01
    assert stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_frozen_weights_that_all_clients_share_are_stored_once(norm, tmp_path, stacks):
    """FedRep trains heads above the server's body, and then bodies below the clients' own heads."""
    head = {"net.9.weight", "net.9.bias"}
    shared, before = [], StackedFit._shared

    def noted(fit):
        shared.append(set(before(fit)))
        return list(shared[-1])

    with mock.patch.object(StackedFit, "_shared", noted):
        compare(tmp_path, seeded(norm=norm, smooth=True), FedRep(), batch_size=6, rounds=1)
    body = {name for name, _ in Pictures(norm=norm).named_parameters()} - head
    assert body in shared
    assert all(names in (body, set()) for names in shared)
    assert stacks


class Halved(Callback):
    """Halves the gradients, and the momentum at the start of an epoch."""

    stackable = True

    def on_train_epoch_start(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)


class Noting(Callback):
    """Trains with a weight decay that is the loss of the last batch."""

    stackable = True

    def on_fit_start(self, trainer, pl_module):
        self.last = 0.0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.01 * self.last)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = float(outputs["loss"])


CALLBACKS = {
    "own": Halved,
    "dynamic mask": lambda: DynamicMask(density=0.5, every_n_steps=2, stop=1.0, rescale=False),
    **{kind.__name__: kind for kind in PRUNERS},
    "global pruning": lambda: GlobalMagnitudePruning(fraction=0.3, epochs=[0, 1]),
    "drawn mask": lambda: StaticMask(density=0.5),
    "gradual pruning": lambda: GradualPruning(density=0.3, every_n_steps=3),
    "pruning with feedback": lambda: DynamicPruningWithFeedback(density=0.3, every_n_steps=3),
    "1:4": lambda: NMPruning(1, 4),
    "stairs": lambda: GroupPenalty(0.2, stairs=3),
    "losses": Noting,
    "units": lambda: GroupPenalty(0.02, stairs=2, groups="units", units=units_of),
    "scales": lambda: GroupPenalty(0.1, stairs=2, groups="scales"),
}


def units_of(parameters):
    """Return the groups of units of :class:`Pictures`."""
    with torch.random.fork_rng(devices=[]):
        net = Pictures(norm="none", smooth=True)
    assert {name: value.shape for name, value in net.named_parameters()} == {n: p.shape for n, p in parameters.items()}
    return find_groups(net, torch.zeros(1, 1, 8, 8))


@pytest.fixture
def repeated():
    """The recorded steps that are repeated."""
    steps, before = [], TrainingPass.repeat

    def repeat(one, recorded):
        steps.append(recorded)
        before(one, recorded)

    with mock.patch.object(TrainingPass, "repeat", repeat):
        yield steps


@pytest.mark.slow_after_first
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_act_on_the_rows_of_their_clients(name, parts, tmp_path, stacks, repeated):
    class Method(FedAvg):
        def callbacks(self, message, client):
            return [CALLBACKS[name]()]

    compare(tmp_path, seeded(norm="none", smooth=True), Method(), accumulate_grad_batches=parts)
    assert stacks
    assert repeated


INHERITED = {kind.__name__ for kind in PRUNERS if "stackable" not in vars(kind)}
"""Callbacks whose base class is stackable, which does not count in `client_callbacks`."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", sorted(CALLBACKS.keys() - INHERITED))
def test_callbacks_of_the_user_act_on_the_rows_of_their_clients(name, parts, tmp_path, stacks, repeated):
    """A term of the gradient behind them is masked too, before the optimizer remembers it."""
    chosen = [CALLBACKS[name](), ProximalTerm(0.1)]
    compare(tmp_path, seeded(norm="none", smooth=True), client_callbacks=chosen, accumulate_grad_batches=parts)
    assert stacks
    assert repeated


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", ["dynamic mask", "global pruning"])
def test_masks_hold_frozen_entries_that_another_callback_restores(name, tmp_path, stacks):
    weight = Pictures(norm="none", smooth=True).net[9].weight
    trained = {"net.9.weight": torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5}
    chosen = [CALLBACKS[name](), LayerFreezing(trained)]
    compare(tmp_path, seeded(norm="none", smooth=True), client_callbacks=chosen)
    assert stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", [FedAvg(), PerFedMask()], ids=lambda algorithm: type(algorithm).__name__)
def test_layers_that_the_user_freezes_stay(algorithm, tmp_path, stacks):
    """As a whole and in part, alone and beside those that the method freezes."""
    shapes = {name: value.shape for name, value in Pictures(norm="none", smooth=True).named_parameters()}
    frozen = {"net.0.weight": torch.zeros(shapes["net.0.weight"], dtype=torch.bool)}
    frozen["net.9.weight"] = torch.rand(shapes["net.9.weight"], generator=torch.Generator().manual_seed(0)) < 0.5
    compare(tmp_path, seeded(norm="none", smooth=True), algorithm, client_callbacks=[LayerFreezing(frozen)])
    assert stacks


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (LayerFreezing({"net.8.wait": torch.zeros(3, dtype=torch.bool)}), "`net.8.wait`"),
        (StaticMask(masks={"net.0.weight": torch.ones(4, 1, 3, 3)}), "`net.0.weight`"),
    ],
    ids=["no such name", "no bools"],
)
def test_a_callback_that_does_not_fit_the_module_is_refused_as_without_stacks(callback, words, tmp_path, stacks):
    with pytest.raises(IncompatibleMasks, match=words):
        digits(tmp_path, "stacked", seeded(norm="none", smooth=True), client_callbacks=[callback])
    assert not stacks


def test_a_callback_of_the_user_acts_on_stacks_of_a_method_with_masks(tmp_path, stacks):
    compare(tmp_path, seeded(norm="none", smooth=True), FedSpa(), client_callbacks=[ProximalTerm(0.1)])
    assert stacks


@pytest.mark.parametrize(
    ("algorithm", "more"), [(FedSpa(), []), (FedAvg(), [GlobalMagnitudePruning(fraction=0.3, epochs=[0])])]
)
def test_callbacks_that_mask_the_same_weights_are_refused(algorithm, more, tmp_path, stacks):
    chosen = [DynamicMask(density=0.5, every_n_steps=2, stop=1.0), *more]
    with pytest.raises(InvalidOption, match="both claim"):
        digits(tmp_path, "stacked", seeded(norm="none", smooth=True), algorithm, client_callbacks=chosen)
    assert not stacks


class Alone(Callback):
    """Says nothing of stacks."""


def test_a_callback_that_prevents_stacks_is_named(tmp_path, stacks):
    class Method(FedAvg):
        def callbacks(self, message, client):
            return [Alone()]

    with pytest.warns(UserWarning, match="since the callback Alone cannot act on several of them at once; set "):
        compare(tmp_path, seeded(norm="none", smooth=True), Method())
    assert not stacks


@pytest.mark.slow_after_first
@pytest.mark.parametrize("execution", ["cut", "mask"])
@pytest.mark.parametrize(
    "algorithm",
    [HeteroFL(rates=(0.5, 1.0)), FD(keep=0.5), FedRolex(rates=(0.5, 1.0))],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_clients_of_equal_width_are_stacked(algorithm, execution, tmp_path, stacks):
    """Two widths, with and without the units that a client does not have."""
    options = {"capacities": [0.5, 1.0], "execution": execution, "clients_per_round": 8}
    compare(tmp_path, seeded(norm="batch", smooth=True), algorithm, federation=options, batch_size=6, epochs=1)
    assert stacks
    if isinstance(algorithm, HeteroFL) and execution == "cut":
        assert max(stacks) == 4  # half of the clients have each width


class Divided(Pictures):
    """A group norm of eight channels, of which each group can lose more or fewer."""

    def __init__(self):
        super().__init__(norm="group", smooth=True)
        self.net[0], self.net[1] = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.net[4] = nn.Conv2d(8, 8, 3, bias=False)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("algorithm", "most"), [(FD(keep=0.5), 2), (HeteroFL(rates=(0.5, 1.0)), 4)], ids=["other units", "the same units"]
)
def test_narrow_group_norms_are_stacked_where_their_channels_are_the_same(algorithm, most, tmp_path, stacks):
    """A client of FD has other units of a layer, of which other ones belong to a group of the norm."""
    options = {"capacities": [0.5, 1.0], "execution": "cut", "clients_per_round": 8}
    compare(tmp_path, seeded(kind=Divided), algorithm, federation=options, batch_size=6, epochs=1)
    assert max(stacks) == most


@on_several_ranks
def test_clients_are_fine_tuned_as_stacks(tmp_path, stacks):
    options = {"rounds": 1, "epochs": 1, "federation": {"finetune_epochs": 1}}
    tables = []
    for folder, engine, devices in (("fast", "fast", 1), ("one", "stacked", 1), ("two", "stacked", 2)):
        made = seeded(norm="none", smooth=True)
        trainer, _ = digits(tmp_path / folder, engine, made, FedSpa(), devices=devices, **options)
        tables.append(trainer.run_folder / "finetuned.csv")
    assert stacks == [6, 4, 4]  # a cohort of six, and all eight clients
    close_tables(tables[1], tables[0])
    assert rows(tables[2]) == rows(tables[1])


def state(trainer):
    content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return {name: (str(t.dtype), t.numpy().tobytes()) for name, t in content["state_dict"].items()}


@on_several_ranks
def test_ranks_and_resumed_runs_have_the_bytes_of_one(tmp_path, stacks):
    options = {"precision": "32-true", "rounds": 3, "federation": {"stack_size": 2}}
    one, _ = digits(tmp_path / "one", "stacked", seeded(norm="none", smooth=True), **options)
    for devices in (2, 3):
        several, _ = digits(
            tmp_path / str(devices), "stacked", seeded(norm="none", smooth=True), devices=devices, **options
        )
        assert state(several) == state(one)
        assert rows(several.run_folder / "clients.csv") == rows(one.run_folder / "clients.csv")
    digits(tmp_path / "stopped", "stacked", seeded(norm="none", smooth=True), **{**options, "rounds": 2})
    resumed, _ = digits(tmp_path / "stopped", "stacked", seeded(norm="none", smooth=True), ckpt_path="last", **options)
    assert state(resumed) == state(one)
    with (resumed.run_folder / "metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert stacks


class Noting(FedAvg):
    """Keeps each update where it is made."""

    def __init__(self):
        super().__init__()
        self.updates = {}

    def train(self, message, client):
        update = super().train(message, client)
        self.updates[client.id] = {name: tensor.clone() for name, tensor in update.weights.items()}
        return update


def test_a_fit_that_is_run_again_has_the_company_that_it_had(tmp_path, stacks):
    options = {"precision": "32-true", "rounds": 1, "deterministic": True, "federation": {"stack_size": 3}}
    algorithm = Noting()
    trainer, _ = digits(tmp_path, "stacked", seeded(norm="none"), algorithm, **options)
    assert stacks == [3, 3]
    first = dict(algorithm.updates)
    for client in list(first)[::3]:
        again = trainer.replay(seeded(norm="none")(), parts(), client=client, round=0)
        for name, tensor in again.update.weights.items():
            assert torch.equal(tensor, first[client][name]), name
    assert stacks == [3] * 4
