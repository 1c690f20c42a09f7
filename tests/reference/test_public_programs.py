"""The package against results of the authors' public programs; see `public_programs.py` for how those were made."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sparsefl import FedDIP
from lightning_sparsefl.algorithms import _pucbv as pucbv
from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.sparse import freeze
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.prune import prune
from lightning_sparsefl.sparse.regrow import regrow
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.sparse.scores import gradient, magnitude

_spec = importlib.util.spec_from_file_location("public_programs", Path(__file__).with_name("public_programs.py"))
public = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(public)
RESULTS = json.loads(public.RESULTS.read_text())

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = public.pruned_net()

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=public.LR, weight_decay=public.DECAY)


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return len(public.batches())

    def __getitem__(self, index):
        return public.batches()[index]


def fit(module, callbacks, folder):
    trainer = L.Trainer(
        max_epochs=public.EPOCHS,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))


def test_a_client_round_of_feddip(tmp_path):
    """The dense weights after two epochs of error feedback under the penalty; its height is the program's."""
    expected, module = RESULTS["feddip"], Module()
    masks = {f"net.{name}": mask for name, mask in public.weight_masks().items()}
    feedback = ErrorFeedback(masks=masks)
    fit(module, [GroupPenalty(expected["penalty"], stairs=None, layers=list(masks)), feedback], tmp_path)
    initial = public.pruned_net().state_dict()
    for name, numbers in expected["trained"].items():
        held, aside = module.state_dict()[f"net.{name}"].clone(), feedback.pruned.get(f"net.{name}", 0)
        assert torch.allclose((held + aside).flatten(), torch.tensor(numbers), rtol=0, atol=2e-6), name
        assert not torch.allclose(initial[name].flatten(), torch.tensor(numbers), atol=1e-3), name


def test_the_mask_of_feddip_s_server():
    """`recover=False`: the old mask is applied first, so the new one lies within it."""
    old, weights = public.weight_masks(), dict(public.Net().named_parameters())
    masks = FedDIP(recover=False)._reconfigured({n: w.detach() for n, w in weights.items()}, old, public.KEPT_SHARE)
    assert {name: public.bits(mask) for name, mask in masks.items()} == RESULTS["feddip"]["mask"]
    recovered = FedDIP()._reconfigured({n: w.detach() for n, w in weights.items()}, old, public.KEPT_SHARE)
    assert any(not torch.equal(recovered[name], mask) for name, mask in masks.items())


@pytest.mark.parametrize("program", ["feddip", "dispfl"])
def test_the_counts_of_erk(program):
    models = public.erk_models()[["feddip", "dispfl"].index(program)]
    assert set(models) == set(RESULTS[program]["erk"])
    for name, shapes in models.items():
        assert kept_counts(shapes, erk(shapes, public.ERK_DENSITY)) == RESULTS[program]["erk"][name]


@pytest.mark.parametrize("number", public.SEARCHES)
def test_a_search_of_dispfl(number):
    """Its T is our T - 1."""
    weights, gradients, masks = public.search_inputs()
    kept = prune(magnitude(weights), masks, cosine(0.5, number, public.SEARCH_ROUNDS + 1))
    grown = regrow(gradient(gradients), kept, {name: int(mask.sum()) for name, mask in masks.items()})
    expected = RESULTS["dispfl"]["search"][str(number)]
    assert {name: public.bits(mask) for name, mask in kept.items()} == expected["fired"]
    assert {name: public.bits(mask) for name, mask in grown.items()} == expected["grown"]


def test_the_utility_of_fedlps():
    for accuracy, expected in RESULTS["fedlps"]["utility"].items():
        assert pucbv.utility(float(accuracy)) == pytest.approx(expected, rel=1e-14)


def test_the_objective_of_perfedmask():
    """Bias and slack of its best start; the solver here finds a plan that is at least as good."""
    expected, total = RESULTS["perfedmask"], sum(public.GROUPS)
    budgets = [int(capacity * total) for capacity in public.CAPACITIES]
    plan = torch.tensor(expected["plan"], dtype=torch.bool)
    assert not plan.all()
    assert freeze.objective(plan, public.GROUPS, budgets) == pytest.approx(expected["objective"], rel=1e-12)
    ours = freeze.optimized(public.GROUPS, budgets, torch.Generator().manual_seed(0))
    assert freeze.objective(ours, public.GROUPS, budgets) <= expected["objective"] * (1 + 1e-12)
