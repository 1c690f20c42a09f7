"""The language model."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.cost import count_layers, forward_flops
from lightning_sparsefl.data import IID, FederatedDataset
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import ExitLanguageLSTM, LanguageLSTM
from lightning_sparsefl.sparse.layer_groups import head_of


@pytest.mark.parametrize("tied", [True, False])
def test_flops_by_hand(tied):
    model = LanguageLSTM(50, embedding=6, hidden=4, length=3, tied=tied)
    layers = count_layers(model, model.example_input_array)
    embedding, decoder = 2 * 6, 2 * 6 * 50 + 50
    first, second = 4 * 4 * (2 * (6 + 4) + 2), 4 * 6 * (2 * (4 + 6) + 2)
    assert forward_flops(layers) == 3 * (embedding + first + second + decoder)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("tied", [True, False])
def test_learns_to_count(tied):
    torch.manual_seed(0)
    model = LanguageLSTM(7, embedding=8, hidden=8, length=5, tied=tied, lr=2.0)
    optimizer = model.configure_optimizers()
    for _ in range(400):
        tokens = (torch.randint(7, (16, 1)) + torch.arange(6)) % 7
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = (torch.arange(7)[:, None] + torch.arange(6)) % 7
    assert (model(tokens[:, :-1]).argmax(1) == tokens[:, 1:]).float().mean() > 0.95


@pytest.mark.parametrize("tied", [True, False])
def test_its_head_is_the_decoder(tied):
    weights = dict(LanguageLSTM(50, embedding=6, hidden=4, tied=tied).named_parameters())
    assert head_of(weights) == ("net.decoder.weight", "net.decoder.bias")


def test_bad_widths_are_refused():
    with pytest.raises(InvalidOption, match=r"`model.hidden` is 0; expected a whole number >= 1"):
        LanguageLSTM(hidden=0)
    for model in (LanguageLSTM, ExitLanguageLSTM):
        with pytest.raises(InvalidOption, match=r"`model.num_classes` is -1; expected a whole number >= 2"):
            model(num_classes=-1)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_without_targets_leaves_the_scores_alone(tmp_path):
    torch.manual_seed(0)
    model = LanguageLSTM(7, embedding=8, hidden=8, length=5)
    tokens = torch.randint(7, (6, 5))
    targets = tokens.roll(-1, 1)
    targets[2:4] = -100
    trainer = L.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", default_root_dir=tmp_path)
    scored = [
        trainer.test(model, DataLoader(TensorDataset(tokens[rows], targets[rows]), batch_size=2), verbose=False)[0]
        for rows in (torch.arange(6), torch.tensor([0, 1, 4, 5]))
    ]
    assert scored[0] == pytest.approx(scored[1])


@pytest.mark.parametrize("kind", [LanguageLSTM, ExitLanguageLSTM])
@pytest.mark.parametrize("engine", ["fast", "trainer"])
def test_a_training_batch_without_targets_has_no_loss(kind, engine, tmp_path):
    torch.manual_seed(0)
    tokens = torch.randint(7, (24, 5))
    targets = tokens.roll(-1, 1)
    targets[::2] = -100
    pairs = TensorDataset(tokens, targets)
    data = FederatedDataset(pairs, pairs, num_clients=3, batch_size=1, num_classes=7, partition=IID())
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=3, local_engine=engine),
        accelerator="cpu",
        max_rounds=1,
        default_root_dir=str(tmp_path),
        logger=False,
        enable_progress_bar=False,
    )
    model = kind(7, embedding=8, hidden=8, length=5)
    trainer.fit(model, data)
    assert all(weight.isfinite().all() for weight in model.state_dict().values() if weight.is_floating_point())
