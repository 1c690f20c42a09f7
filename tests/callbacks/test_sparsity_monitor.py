from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import GlobalMagnitudePruning, ProximalTerm, SparsityMonitor, StaticMask
from lightning_sparsefl.errors import InvalidOption

LAYERS = ("net.0.weight", "net.2.weight", "net.4.weight")


class Logged(Callback):
    """What is logged at each epoch's end, and where zeros are then."""

    def __init__(self):
        self.rows, self.zeros = [], []

    def on_train_start(self, trainer, pl_module):
        self.note(pl_module)

    def note(self, pl_module):
        self.zeros.append(torch.cat([pl_module.get_parameter(name).detach().flatten() == 0 for name in LAYERS]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.note(pl_module)


def run(fit, module, callbacks, **options):
    logged = Logged()
    trainer = fit(module, [*callbacks, logged], **options)
    return logged, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_it_counts_zeros_whoever_made_them(net, fit):
    callback = GlobalMagnitudePruning(fraction=0.5, epochs=[0, 2])
    logged, last = run(fit, net(), [callback, SparsityMonitor()], epochs=3)
    dense = [float((~zeros).double().mean()) for zeros in logged.zeros]
    moved = [float((a ^ b).double().mean()) for a, b in zip(logged.zeros, logged.zeros[1:], strict=False)]
    assert last["density/all"] == pytest.approx(dense[-1])
    assert last["mask/changed"] == pytest.approx(moved[-1])
    assert moved == pytest.approx([0.5, 0.0, 0.25])
    for name in LAYERS:
        kept = callback.masks[name]
        assert last[f"density/layer/{name}"] == pytest.approx(float(kept.double().mean()))
    assert len(last) == 5


def test_without_a_mask_nothing_is_zero(net, fit):
    module = net()
    with torch.no_grad():
        module.net[4].weight[0] = 0  # and comes to life
    _, last = run(fit, module, [SparsityMonitor(per_layer=False), ProximalTerm()], epochs=1)
    assert last.keys() == {"density/all", "mask/changed"}
    assert last["density/all"] == 1.0
    assert last["mask/changed"] == pytest.approx(6 / 108)


def test_only_chosen_layers_and_only_some_epochs(net, fit):
    seen = []

    class Spy(SparsityMonitor):
        def on_train_epoch_end(self, trainer, pl_module):
            before, log = len(seen), pl_module.log_dict
            pl_module.log_dict = lambda values, **_: seen.append(values)
            super().on_train_epoch_end(trainer, pl_module)
            pl_module.log_dict = log
            assert len(seen) - before == ((trainer.current_epoch + 1) % 2 == 0)

    fit(net(), [StaticMask(0.5, "uniform"), Spy(every_n_epochs=2, layers="net.0*")], epochs=5)
    expected = {"density/all": 0.5, "density/layer/net.0.weight": 0.5, "mask/changed": 0.0}
    assert seen == [expected] * 2


def test_it_changes_nothing(net, fit, recipe):
    plain, watched = net(recipe), net(recipe)
    fit(plain, [], recipe)
    fit(watched, [SparsityMonitor()], recipe)
    for name, weight in plain.named_parameters():
        assert torch.equal(watched.get_parameter(name), weight)


@pytest.mark.filterwarnings("ignore:.*before epochs .1. pruned")
def test_drift_goes_on_over_a_resume(net, fit, tmp_path):
    def callbacks():
        return [GlobalMagnitudePruning(fraction=0.5, epochs=[0, 1]), SparsityMonitor(every_n_epochs=2)]

    _, straight = run(fit, net(), callbacks(), epochs=2)
    fit(net(), callbacks(), epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    _, resumed = run(fit, net(), callbacks(), epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert resumed == straight
    assert straight["mask/changed"] == pytest.approx(0.75)


def test_options_are_checked(net, fit):
    with pytest.raises(InvalidOption, match="every_n_epochs=0"):
        SparsityMonitor(every_n_epochs=0)
    with pytest.raises(InvalidOption, match=r"`SparsityMonitor`: the pattern 'conv\*' in `layers` matches no layer"):
        fit(net(), [SparsityMonitor(layers="conv*")], epochs=1)


class Forward(SparsityMonitor):
    """Notes what it logs."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def with_forward(net, recipe=None, example=None):
    module = net() if recipe is None else net(recipe)

    class Callable(type(module)):
        def forward(self, x):
            return self.net(x)

    module.__class__ = Callable
    module.example_input_array = example
    return module


@pytest.mark.parametrize("example", [None, torch.zeros(3, 4), (torch.zeros(2, 4),), {"x": torch.zeros(2, 4)}])
def test_flops_are_those_of_the_weights_that_are_left(net, fit, example):
    module, callback = with_forward(net, example=example), StaticMask(0.5, "uniform", layers="!net.0*")
    watch = Forward(layers="net.*")
    fit(module, [callback, watch], epochs=2)
    dense = 2 * (4 * 9 + 9 * 6 + 6 * 3) + 9 + 6 + 3
    saved = 2 * sum(int((~mask).sum()) for mask in callback.masks.values())
    assert [row["flops/forward"] for row in watch.rows] == [dense - saved] * 2
    assert watch.rows[0]["flops/forward_share"] == pytest.approx((dense - saved) / dense)


def test_flops_of_a_batch_that_is_a_mapping(net, fit):
    module = with_forward(net)
    module.on_after_batch_transfer = lambda batch, _: {"label": batch[1], "x": batch[0]}  # the input is not the first
    module.training_step = lambda batch: module(batch["x"]).square().mean()
    fit(module, [watch := Forward(layers="net.*")], epochs=1)
    assert watch.rows[0]["flops/forward"] == 2 * (4 * 9 + 9 * 6 + 6 * 3) + 9 + 6 + 3


def test_counting_changes_nothing(net, fit, recipe):
    plain, watched = with_forward(net, recipe), with_forward(net, recipe)
    fit(plain, [], recipe)
    fit(watched, [SparsityMonitor()], recipe)
    for name, weight in plain.named_parameters():
        assert torch.equal(watched.get_parameter(name), weight)


def test_a_module_whose_input_is_unknown_has_no_flops_and_one_message(net, fit, caplog):
    for _ in range(2):
        watch = Forward()
        with caplog.at_level("INFO"):
            fit(net(), [watch], epochs=1)
        assert "flops/forward" not in watch.rows[0]
    said = [record.message for record in caplog.records if "logs no FLOPs" in record.message]
    assert len(said) <= 1  # the first test of the session may have heard it
    fit(with_forward(net), [watch := Forward(flops=False)], epochs=1)
    assert "flops/forward" not in watch.rows[0]


class Board:
    """A logger's experiment that keeps images."""

    def __init__(self):
        self.images = []

    def add_image(self, tag, image, step):
        self.images.append((tag, tuple(image.shape), step))


@pytest.mark.pictures
def test_pictures_go_to_loggers_that_take_them(net, fit):
    board = Board()

    class Tensorboard(DummyLogger):
        @property
        def experiment(self):
            return board

    class Plain(DummyLogger):
        @property
        def experiment(self):
            return object()

    def run(monitor, loggers):
        fit(net(), [StaticMask(), monitor], epochs=2, logger=loggers, log_every_n_steps=1)

    run(SparsityMonitor(pictures=True, every_n_epochs=2), [Tensorboard(), Plain()])
    assert [(tag, step) for tag, _, step in board.images] == [
        ("mask/layers", 10),
        ("density/per_layer", 10),
    ]
    assert all(shape[0] == 3 and min(shape[1:]) > 100 for _, shape, _ in board.images)
    run(SparsityMonitor(), [Tensorboard()])
    run(SparsityMonitor(pictures=True), [Plain()])
    assert len(board.images) == 2


def test_operations_are_counted_again_if_layers_were_replaced(net, fit):
    module, work = with_forward(net), []
    for layer in (module.net[4], torch.nn.Sequential(torch.nn.Linear(6, 6), module.net[4])):
        module.net[4] = layer
        watch = Forward()
        fit(module, [watch], epochs=1)
        work.append(watch.rows[0]["flops/forward"])
    assert work[1] == work[0] + 2 * 36 + 6


def test_operations_are_counted_again_for_inputs_of_other_shapes(net, fit):
    module, work = with_forward(net), []
    for example in (torch.zeros(1, 4), torch.zeros(1, 3, 4), torch.zeros(1, 5), torch.zeros(1, 4)):
        module.example_input_array = example  # the third one does not fit
        watch = Forward()
        fit(module, [watch], epochs=1)
        work.append(watch.rows[0].get("flops/forward"))
    assert work == [work[0], 3 * work[0], None, work[0]]


def test_it_counts_the_weights_that_layers_compute(net, fit):
    module = net()
    chosen = [(module.net[0], "weight"), (module.net[2], "weight")]
    options = {
        "use_global_unstructured": False,
        "make_pruning_permanent": False,
        "use_lottery_ticket_hypothesis": False,
    }
    pruning = ModelPruning("l1_unstructured", chosen, amount=0.5, **options)
    last = fit(module, [pruning, SparsityMonitor()], epochs=1).callback_metrics
    kept = [0.5 * module.net[0].weight.numel(), 0.5 * module.net[2].weight.numel(), module.net[4].weight.numel()]
    sizes = [module.net[place].weight.numel() for place in (0, 2, 4)]
    assert last["density/layer/net.0.weight_orig"] == 0.5
    assert last["density/layer/net.4.weight"] == 1.0
    assert last["density/all"] == pytest.approx(sum(kept) / sum(sizes), abs=1e-6)


class Noisy(nn.Module):
    """A parametrization that counts its calls, and draws in any mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        return weight + torch.rand(())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.w_v = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
        self.register_forward_pre_hook(lambda layer, inputs: None)


def test_a_parameter_is_not_taken_for_part_of_another_one():
    found = SparsityMonitor(layers=["*"])._nonzero(nn.Sequential(Attention()))
    assert {name: bool(mask.all()) for name, mask in found.items()} == {"0.w": False, "0.w_v": True}


def test_a_parametrization_is_computed_without_a_trace(net, fit):
    module = net()
    nn.utils.parametrizations.spectral_norm(module.net[0])
    nn.utils.parametrizations.orthogonal(module.net[2])
    with torch.no_grad():
        module.net[0].parametrizations.weight.original[0] = 0
    nn.utils.parametrize.register_parametrization(module.net[4], "weight", Noisy())
    before, random = {name: tensor.clone() for name, tensor in module.state_dict().items()}, torch.get_rng_state()
    found = SparsityMonitor()._nonzero(module)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.net[0].parametrizations.weight[0].training
    assert not found["net.0.parametrizations.weight.original"][0].any()
    assert found["net.2.parametrizations.weight.original"].all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
def test_it_says_that_a_compiled_network_is_not_counted(net, fit, caplog):
    module, watch = net(), Forward()
    module.net = torch.compile(module.net, backend="eager")
    with caplog.at_level("INFO"):
        fit(module, [watch], epochs=1)
    assert "flops/forward" not in watch.rows[0]
    assert "has compiled layers, which cannot be traced; set `flops=False`" in caplog.text


class Picky(L.LightningModule):
    """Its first process, or none, takes batches that `forward` can be called with."""

    def __init__(self, everywhere):
        super().__init__()
        self.layer, self.everywhere = nn.Linear(3, 2, bias=False), everywhere

    def forward(self, x):
        if not self.everywhere and self.global_rank == 1:
            raise ValueError
        return self.layer(x)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("error:It is recommended to use .*sync_dist=True")
@pytest.mark.parametrize("everywhere", [True, False])
def test_several_processes_log_the_same_values_without_a_warning_of_lightning(everywhere, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    options = {"max_epochs": 2, "devices": 2, "strategy": "ddp_fork", "enable_checkpointing": False}
    trainer = L.Trainer(**quiet, **options, callbacks=[StaticMask(0.5, rescale=False), SparsityMonitor()])
    trainer.fit(Picky(everywhere), DataLoader(TensorDataset(torch.ones(4, 3))))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    flops = {"flops/forward": 12 * 0.5, "flops/forward_share": 0.5} if everywhere else {}
    assert values == {"density/all": 0.5, "density/layer/layer.weight": 0.5, "mask/changed": 0.0} | flops
