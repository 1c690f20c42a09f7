"""A model of a run as files that need no federation."""

import copy
import csv
import errno
import importlib.util
import shutil
import sys

import lightning as L
import numpy as np
import pytest
import torch
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import (
    FedAvg,
    FederatedTrainer,
    Federation,
    FedLPS,
    FedSpa,
    HeteroFL,
    Local,
    SplitMix,
    load_sparse,
)
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import CheckpointMismatch, DiskFull, ExportMismatch, InvalidOption
from lightning_sparsefl.federated.commands import export as exporting
from lightning_sparsefl.federated.commands import onnx_file

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(onnx|torch|copyreg).*",
    "ignore::FutureWarning:(onnx|torch|copyreg).*",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:.*LeafSpec.*:FutureWarning",
)  # of the exporter's libraries, and of a stock Trainer
needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))), reason="ONNX needs the extra `onnx`"
)


class Net(L.LightningModule):
    def __init__(self, width=16, loss=F.cross_entropy):
        super().__init__()
        self.save_hyperparameters(*(["width"] if loss is F.cross_entropy else []))
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))
        self.loss = loss

    def forward(self, x):
        return self.net(x.flatten(1))

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("val_loss", self.loss(logits, batch[1]))
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def blobs(**options):
    settings = {"num_clients": 5, "num_classes": 4, "dim": 8, "val_fraction": 0.2, "batch_size": 16, "drop_last": True}
    return FederatedBlobs(**{**settings, **options})


@pytest.fixture
def run(tmp_path):
    """Trains one round with two of the clients, and exports; returns what was exported and the trainer."""

    def go(algorithm, client, module=None, fit=True, federation=None, data=None, precision="32-true", **request):
        options = {"logger": False, "enable_progress_bar": False, "default_root_dir": str(tmp_path), "seed": 0}
        federation = Federation(clients_per_round=2, pictures_every_n_rounds=0, **(federation or {}))
        trainer = FederatedTrainer(
            algorithm=algorithm, federation=federation, max_rounds=1, precision=precision, accelerator="cpu", **options
        )
        if fit:
            trainer.fit(copy.deepcopy(module or Net()), data or blobs())
            go.folder, go.cohort = trainer.run_folder, [c for c in range(5) if trained(trainer.run_folder, c)]
        client = go.cohort[0] if client == "trained" else client
        return trainer.export(module or Net(), data or blobs(), client=client, **request)

    return go


def trained(folder, client):
    with (folder / "clients.csv").open() as file:
        return any(int(row["client"]) == client and row["trained"] == "1" for row in csv.DictReader(file))


def test_an_ordinary_checkpoint_for_an_ordinary_trainer(run, tmp_path):
    data = blobs()
    exported = run(FedSpa(density=0.3), "trained", check=True)
    folder = run.folder / "export" / f"client-{run.cohort[0]}"
    assert sorted(path.name for path in folder.iterdir()) == ["model.ckpt", "model.safetensors"]
    assert {path.parent for path in exported.files.values()} == {folder}
    module = Net.load_from_checkpoint(folder / "model.ckpt", weights_only=True)
    assert module.hparams.width == 16
    kept = sum(int((p != 0).sum()) for p in module.net[0].parameters())
    assert kept < 0.5 * sum(p.numel() for p in module.net[0].parameters())
    data.setup("fit")
    tester = L.Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    loader = data.client_val_dataloader(run.cohort[0])
    metrics = tester.test(Net(), loader, ckpt_path=folder / "model.ckpt", verbose=False, weights_only=True)[0]
    assert metrics["val_acc"] == pytest.approx(exported.scores["in memory"]["val_acc"], abs=1e-6)
    assert metrics["val_loss"] == pytest.approx(exported.scores["in memory"]["val_loss"], abs=1e-6)


class Versioned(nn.Linear):
    """A layer that loads nothing without its version."""

    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        assert local_metadata.get("version") == 3
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


class VersionedNet(Net):
    def __init__(self):
        super().__init__()
        self.net[-1] = Versioned(16, 4)


def test_files_keep_the_versions_of_modules(run):
    files = run(FedAvg(), None, VersionedNet(), check=True).files
    module = VersionedNet.load_from_checkpoint(files["ckpt"], weights_only=True)
    module.load_state_dict(load_sparse(files["safetensors"]))
    again = VersionedNet.load_from_checkpoint(run.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert torch.equal(again.net[-1].weight, module.net[-1].weight)


def test_a_full_disk_is_reported_as_such(run, monkeypatch):
    def full(weights, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "export_sparse", full)
    with pytest.raises(DiskFull, match=r"export/global is full .*: the model is not exported; .* or set `out`"):
        run(FedAvg(), None)


def test_the_table_says_what_was_written(run, capsys):
    exported = run(FedAvg(), None, check=True)
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("FedAvg after 1 rounds: global, val set"))
    table = {line[:16].strip(): line[16:].split() for line in lines[start + 3 :] if line}
    assert table["parameters"] == ["244"] * 3
    assert table["val_acc"] == [f"{exported.scores['in memory']['val_acc']:.4f}"] * 3
    assert lines[-1] == f"Folder: {run.folder / 'export' / 'global'}"


@pytest.mark.slow_after_first
@needs_onnx
@pytest.mark.parametrize(
    ("algorithm", "parameters"),
    [(FedSpa(density=0.5), 244), (FedLPS(ratio="fixed"), 124), (SplitMix(bases=2), 124)],
    ids=lambda a: type(a).__name__,
)
def test_onnx_holds_the_cut_model_and_scores_alike(run, algorithm, parameters):
    exported = run(algorithm, "trained", federation={"capacities": [0.5]}, formats=["onnx"], check=True)
    assert list(exported.files) == ["onnx"]
    assert exported.kept["onnx"][0] == parameters
    assert exported.kept["in memory"][0] == 244
    assert any("contains 8 of 16 units" in note for note in exported.notes) == (parameters < 244)
    for name, value in exported.scores["in memory"].items():
        assert exported.scores["onnx"][name] == pytest.approx(value, abs=1e-5)


@needs_onnx
def test_onnx_keeps_units_on_whose_number_forward_depends(run):
    class ByWidth(Net):
        def forward(self, x):
            hidden = self.net[:3](x.flatten(1))
            return self.net[3](hidden / hidden.shape[-1])

    exported = run(FedLPS(ratio="fixed"), "trained", ByWidth(), federation={"capacities": [0.5]}, formats=["onnx"])
    note = "contains 8 of 16 units that are all zeros, since the model without them computes something else on the"
    assert any(note in each for each in exported.notes)
    assert exported.kept["onnx"][0] == 244


@needs_onnx
def test_onnx_of_attention_has_no_fused_operation(tmp_path):
    class Attention(Net):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 4))

        def forward(self, x):
            return self.net(x[:, 0])

    net, inputs = Attention(), torch.randn(3, 1, 1, 8)
    if not RequirementCache("torch>=2.7"):  # whose exporter takes attention for one batch size only
        with pytest.raises(InvalidOption, match=r"`Attention\.forward` cannot be exported to ONNX"):
            onnx_file.write(net, blobs(), tmp_path / "model.onnx")
        return
    onnx_file.write(net, blobs(), tmp_path / "model.onnx")
    assert torch.backends.mha.get_fastpath_enabled()
    found = onnx_file.Forward(tmp_path / "model.onnx", net)(inputs)
    torch.testing.assert_close(found, net(inputs), rtol=0, atol=1e-5)


@needs_onnx
def test_the_check_of_onnx_gives_outputs_as_forward_does(run):
    class Parts(Net):
        """A network for segmentation, for example."""

        def forward(self, x):
            logits = super().forward(x)
            return {"out": logits, "more": (logits.exp(), [logits.sum(1)])}

        def test_step(self, batch, batch_idx):
            parts = self(batch[0])
            (powers, (total,)), logits = parts["more"], parts["out"]
            self.log("test_loss", F.cross_entropy(logits, batch[1]) + (powers.log().sum(1) - total).abs().mean())

        validation_step = test_step

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0])["out"], batch[1])

    exported = run(FedAvg(), 0, Parts(), formats=["onnx"], check=True)
    memory = exported.scores[exporting.MEMORY]
    assert set(memory) == {"test_loss"}
    assert exported.scores["onnx"]["test_loss"] == pytest.approx(memory["test_loss"], abs=1e-5)


@needs_onnx
def test_the_check_of_onnx_takes_inputs_by_name(run):
    class ByName(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(self(x=batch[0]), batch[1]))

    scores = run(FedAvg(), None, ByName(), formats=["onnx"], check=True).scores
    assert scores["onnx"]["val_loss"] == pytest.approx(scores["in memory"]["val_loss"], abs=1e-5)


class ByKeyword(Net):
    """A forward pass that takes whole batches, which the steps pass in another order than the example."""

    def __init__(self):
        super().__init__()
        self.example_input_array = {"x": torch.zeros(1, 1, 1, 8), "y": torch.zeros(1, dtype=torch.long)}

    def forward(self, **batch):
        return super().forward(batch["x"]) + 0 * batch["y"].unsqueeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self(y=y, x=x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


@needs_onnx
def test_onnx_of_a_forward_that_takes_keywords_has_their_names(run):
    halves = {"capacities": [0.5], "execution": "cut"}
    exported = run(HeteroFL(), None, ByKeyword(), formats=["onnx"], check=True, federation=halves)
    assert exported.scores["onnx"]["val_loss"] == pytest.approx(exported.scores["in memory"]["val_loss"], abs=1e-5)
    assert list(onnx_file._input_sizes(exported.files["onnx"])) == ["x", "y"]


@needs_onnx
def test_the_check_of_onnx_needs_the_inputs_that_steps_pass(run):
    class Without(ByKeyword):
        def __init__(self):
            super().__init__()
            del self.example_input_array["y"]

        def forward(self, **batch):
            return Net.forward(self, batch["x"])

    with pytest.raises(ExportMismatch, match="it has the inputs x, and the steps of the module pass 2; set `example_"):
        run(FedAvg(), None, Without(), formats=["onnx"], check=True)


@needs_onnx
def test_onnx_that_no_step_would_call_is_not_said_to_be_checked(run, monkeypatch):
    monkeypatch.setattr(exporting.onnx_file, "write", lambda module, data, path: path.parent.mkdir(parents=True))
    monkeypatch.setattr(exporting.onnx_file.Forward, "__init__", lambda self, *_: setattr(self, "calls", 0))

    class Around(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_acc", (self.net(batch[0].flatten(1)).argmax(1) == batch[1]).float().mean())

    with pytest.raises(ExportMismatch, match="`validation_step` never calls the module's `forward`"):
        run(FedAvg(), 0, Around(), formats=["onnx"], check=True)


def test_a_client_that_never_trained_gets_what_the_method_gives_it(run):
    run(FedLPS(ratio="fixed"), "trained")
    stranger = next(client for client in range(5) if client not in run.cohort)
    exported = run(FedLPS(ratio="fixed"), stranger, fit=False)
    assert exported.notes[0] == (f"Client {stranger} never trained: this is the model that FedLPS gives a new client.")
    assert not run(FedLPS(ratio="fixed"), "trained", fit=False).notes


def test_own_buffers_and_double_precision_come_along(run):
    class Double(Net):
        def forward(self, x):
            return self.net(x.flatten(1).to(self.net[0].weight.dtype))

    exported = run(FedAvg(), "trained", Double(), federation={"buffers": "local"}, precision="64-true", check=True)
    state = load_sparse(exported.files["safetensors"])
    assert state["net.0.weight"].dtype == torch.float64
    common = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(state["net.0.weight"], common["net.0.weight"])
    assert not torch.equal(state["net.1.running_mean"], common["net.1.running_mean"])


def test_hyper_parameters_that_are_no_plain_values_are_named(run):
    exported = run(FedAvg(), None, Net(loss=F.nll_loss))
    assert exported.notes == (
        "The hyper-parameters ['loss'] are not plain values, so they are not in model.ckpt: pass them to "
        "`load_from_checkpoint`.",
    )


def test_a_module_that_holds_more_than_its_state_dict_says_is_found_out(run):
    class Secret(Net):
        def __init__(self):
            super().__init__()
            self.shift = 0.0

        def training_step(self, batch, batch_idx):
            self.shift += 1.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.shift)

        def on_save_checkpoint(self, checkpoint):
            self.shift = 5.0

    with pytest.raises(ExportMismatch, match=r"The ckpt file has a val_loss of 0\.0, the model in memory one of 5\.0"):
        run(FedAvg(), None, Secret(), check=True)


def test_what_a_module_adds_to_its_checkpoint_must_be_plain(run):
    class Adds(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = self.mine

    module = Adds()
    module.mine = [1, "two"]
    exported = run(FedAvg(), None, module)
    assert torch.load(exported.files["ckpt"], weights_only=True)["mine"] == [1, "two"]
    module.mine = print
    with pytest.raises(InvalidOption, match=r"`Adds\.on_save_checkpoint` adds a value of another type"):
        run(FedAvg(), None, module, fit=False)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"client": 5}, InvalidOption, "`client` is 5; expected a number from 0 to 4"),
        ({"client": -1}, InvalidOption, "`client` is -1"),
        ({"client": np.int64(9)}, InvalidOption, "`client` is .*9.*; expected a number from 0 to 4"),
        ({"formats": []}, InvalidOption, r"`formats` is \[\]; expected some of"),
        ({"formats": ["pt"]}, InvalidOption, r"`formats` is \['pt'\]"),
        ({"client": 0}, CheckpointMismatch, "contains no run with a checkpoint"),
        ({"client": 0, "ckpt_path": "missing.ckpt"}, CheckpointMismatch, "There is no checkpoint at missing"),
    ],
)
def test_requests_that_cannot_be_met(run, request_, error, words):
    with pytest.raises(error, match=words):
        run(FedAvg(), fit=False, **{"client": None, **request_})


def test_a_checkpoint_of_another_run_is_refused(run):
    run(FedAvg(), None)
    path = str(run.folder / "checkpoints" / "last.ckpt")
    with pytest.raises(CheckpointMismatch, match="`algorithm` was FedAvg, and is FedSpa now"):
        run(FedSpa(), None, fit=False, ckpt_path=path)


@needs_onnx
def test_onnx_has_fixed_sizes_but_that_of_the_batch(tmp_path):
    path, data = tmp_path / "model.onnx", blobs()
    assert onnx_file.write(Net(), data, path) == (
        "model.onnx takes inputs of the sizes (batch, 1, 1, 8): only that of the batch may vary."
    )
    forward = onnx_file.Forward(path, Net())
    assert forward(torch.zeros(3, 1, 1, 8)).shape == (3, 4)
    with pytest.raises(
        ExportMismatch,
        match=r"input `x` has the sizes \(\w+, 1, 1, 8\), and a batch of the data has \(3, 1, 1, 9\); pad",
    ):
        forward(torch.zeros(3, 1, 1, 9))


@needs_onnx
def test_the_check_of_onnx_gives_the_reason_of_a_failure(tmp_path):
    from onnx import TensorProto, helper, save

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y")]
    nodes = [
        helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    model = helper.make_model(helper.make_graph(nodes, "graph", values[:1], values[1:]), ir_version=8)
    save(model, tmp_path / "model.onnx")
    with pytest.raises(ExportMismatch, match=r"model.onnx was written, but its check fails \(\w+: .*\); remove 'onnx'"):
        onnx_file.Forward(tmp_path / "model.onnx", Net())(torch.zeros(4, 2))


@needs_onnx
def test_the_check_of_onnx_needs_no_kernels_of_onnxruntime(tmp_path, monkeypatch):
    """It has none for convolutions in double precision."""
    (tmp_path / "onnxruntime.py").write_text(
        "class InferenceSession:\n    def __init__(self, *args, **options):\n        raise RuntimeError('no Conv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    onnx_file.write(Net(), blobs(), tmp_path / "model.onnx")
    outputs = onnx_file.Forward(tmp_path / "model.onnx", Net())(torch.ones(3, 1, 1, 8))
    assert outputs.shape == (3, 4)
    assert sys.modules.pop("onnxruntime")  # it was asked first


def test_a_failed_export_to_onnx_gives_the_first_reason(tmp_path, monkeypatch):
    def fail(module, path, inputs, **options):
        try:
            raise ValueError("\x1b[91mthe reason\x1b[0m\n\nand more")
        except ValueError as reason:
            raise RuntimeError("Failed: \x1b[96mThis is step 1/3\x1b[0m") from reason

    monkeypatch.setattr(Net, "to_onnx", fail)
    expected = r"^`Net.forward` cannot be exported to ONNX \(ValueError: the reason\); remove 'onnx' from `formats`\.$"
    with pytest.raises(InvalidOption, match=expected):
        onnx_file.write(Net(), blobs(), tmp_path / "model.onnx")


@needs_onnx
def test_onnx_needs_a_forward(run):
    class Blind(Net):
        forward = L.LightningModule.forward

    with pytest.raises(InvalidOption, match="`Blind` has no `forward`"):
        run(FedAvg(), None, Blind(), fit=False, formats=["onnx"])


def test_onnx_says_what_is_missing(run, monkeypatch):
    monkeypatch.setattr(exporting.onnx_file, "find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"needs onnx and onnxscript: pip install 'lightning-sparsefl\[onnx\]'"):
        run(FedAvg(), None, fit=False, formats=["onnx"])


class Counted(Net):
    """A module with a state that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.seen = {"calls": 3, "mask": torch.tensor([True, False])}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_an_extra_state_of_plain_values_comes_along(run):
    exported = run(FedAvg(), None, Counted(), formats=["ckpt"], check=True)
    module = Counted.load_from_checkpoint(exported.files["ckpt"], weights_only=True)
    assert (module.seen["calls"], module.seen["mask"].tolist()) == (3, [True, False])
    with pytest.raises(InvalidOption, match=r"extra state `_extra_state` .* remove `safetensors` from `formats`"):
        run(FedAvg(), None, Counted(), fit=False, formats=["safetensors"])


def test_an_extra_state_that_cannot_be_read_again_is_refused(run):
    module = Counted()
    module.seen = {"calls": {1, 2}}
    with pytest.raises(InvalidOption, match=r"`get_extra_state` .*`_extra_state\['calls'\]` holds a `set`"):
        run(FedAvg(), None, module)


class Configured(Net):
    """Has its hyper-parameters in one argument."""

    def __init__(self, config):
        super().__init__(config["width"])
        self.save_hyperparameters()


def test_a_module_with_its_hyper_parameters_in_one_argument_can_be_loaded(run):
    exported = run(FedAvg(), None, module=Configured({"width": 12}))
    last = run.folder / "checkpoints" / "last.ckpt"
    for path in (exported.files["ckpt"], last):
        assert Configured.load_from_checkpoint(path, weights_only=True).net[0].out_features == 12


def test_a_module_that_saves_one_dict_can_be_loaded(run):
    class Given(Net):
        def __init__(self, config):
            super(Net, self).__init__()
            self.save_hyperparameters(config)
            self.net, self.loss = nn.Linear(8, 4), F.cross_entropy
            self.scale = config["scale"]

    exported = run(FedAvg(), None, module=Given({"scale": 2}))
    for path in (exported.files["ckpt"], run.folder / "checkpoints" / "last.ckpt"):
        assert Given.load_from_checkpoint(path, weights_only=True).scale == 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"client": "1"}, "`client` is '1', but the data names no clients; expected a number from 0 to 4"),
        ({"client": 1.5}, "`client` is 1.5; expected a whole number or a string or null"),
        ({"client": True}, "`client` is True; expected a whole number or a string or null"),
        ({"formats": "ckpt"}, "`formats` is 'ckpt'; expected a list of strings"),
    ],
)
def test_options_of_another_type_are_refused(asked, words, run):
    with pytest.raises(InvalidOption, match=words):
        run(FedAvg(), **{"client": None, **asked})


def test_the_model_of_the_commit_before_is_beside_that_of_the_last_one(run):
    run(FedAvg(), None)
    checkpoints = run.folder / "checkpoints"
    copied = shutil.copy(checkpoints / "last.ckpt", checkpoints / "copy.ckpt")
    assert run(FedAvg(), None, fit=False, ckpt_path=copied).files["ckpt"].parent == run.folder / "export" / "global"


@needs_onnx
def test_a_check_in_bfloat16_is_refused_before_a_file_is_written(run):
    with pytest.raises(InvalidOption, match=r"`check` is True, and model.onnx would be in bfloat16, which NumPy lacks"):
        run(FedAvg(), None, precision="bf16-true", formats=["onnx"], check=True)
    assert not (run.folder / "export").exists()


def test_a_method_without_a_global_model_exports_those_of_clients(run):
    exported = run(Local(), "trained", check=True)
    assert exported.scores["ckpt"] == exported.scores["in memory"]
    sentence = "`client` is null, and Local trains no global model; expected a number from 0 to 4, or the name of a cl"
    with pytest.raises(InvalidOption, match=sentence):
        run(Local(), None, fit=False)
