"""Units that are chosen by trained scores: against the same training written out with explicit gates."""

from __future__ import annotations

import copy
import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import LearnedImportance, ProximalTerm, StaticMask
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.importance import gate_gradients
from lightning_sparsefl.sparse.units import find_groups

HIDDEN = {"net.0": 9, "net.2": 6}
"""Units of the `net` of these tests, whose layers are Linear(4, 9), Linear(9, 6), Linear(6, 3)."""


def loader():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


class ByHand:
    """The dense weights, the scores and the masks, step by step; gates stand on the units' outputs."""

    def __init__(self, net, density, lr, strength, reduction):
        self.net, self.lr, self.strength, self.reduction = net, lr, strength, reduction
        self.w = [(net[i].weight.detach().clone(), net[i].bias.detach().clone()) for i in (0, 2, 4)]
        self.counts = [max(math.floor(density * size + 0.5), 1) for size in HIDDEN.values()]
        self.q = [torch.sigmoid(a / a.mean()) for a in self.sums()]

    def sums(self, weights=None):
        return [w.abs().sum(1) for w, _ in (weights or self.w)[:2]]

    def choose(self, ranking=None):
        self.kept = []
        for scores, count in zip(ranking or self.q, self.counts, strict=True):
            ranked = sorted(range(len(scores)), key=lambda j: (-float(scores[j]), j))
            self.kept.append(torch.tensor([j in ranked[:count] for j in range(len(scores))]))

    def masks(self, kept):
        ones = [torch.ones(4, dtype=torch.bool), *kept, torch.ones(3, dtype=torch.bool)]
        return [(ones[i + 1][:, None] & ones[i][None, :], ones[i + 1]) for i in range(3)]

    def slopes(self, batch, kept):
        """Of the loss, for the weights in use and for gates of value 1 on the hidden units' outputs."""
        weights = [
            tuple((value * mask).detach().requires_grad_() for value, mask in zip(layer, masks, strict=True))
            for layer, masks in zip(self.w, self.masks(kept), strict=True)
        ]
        gates, x = [torch.ones(size, dtype=torch.float64, requires_grad=True) for size in HIDDEN.values()], batch[0]
        for (weight, bias), gate in zip(weights, [*gates, None], strict=True):
            x = F.linear(x, weight, bias)
            x = x if gate is None else F.relu(x) * gate
        found = torch.autograd.grad(F.cross_entropy(x, batch[1]), [*sum(weights, ()), *gates])
        return [found[0:2], found[2:4], found[4:6]], found[6:]

    def probe(self, batch):
        _, gates = self.slopes(batch, [torch.ones(size, dtype=torch.bool) for size in HIDDEN.values()])
        self.q = [q - self.lr * gate for q, gate in zip(self.q, gates, strict=True)]

    def step(self, batch, rate, decay, train_scores=True, anchor=None, mu=0.0):
        slopes, gates = self.slopes(batch, self.kept)
        slopes = [list(pair) for pair in slopes]
        if anchor is not None:
            slopes = [
                [s + mu * (v - a) for s, v, a in zip(*xs, strict=True)]
                for xs in zip(slopes, self.w, anchor, strict=True)
            ]
        if train_scores:
            leaves = [(w.clone().requires_grad_(), b) for w, b in self.w]
            own = [q.clone().requires_grad_() for q in self.q]
            terms = [
                ((q - torch.sigmoid(a / a.mean())) ** 2).sum() / (len(q) if self.reduction == "mean" else 1)
                for q, a in zip(own, self.sums(leaves), strict=True)
            ]
            total = self.strength * sum(terms)
            found = torch.autograd.grad(total, [*own, leaves[0][0], leaves[1][0]])
            self.q = [q - self.lr * (g + r) for q, g, r in zip(self.q, gates, found[:2], strict=True)]
            slopes[0][0], slopes[1][0] = slopes[0][0] + found[2], slopes[1][0] + found[3]
        self.w = [
            tuple(v - rate * (s + decay * v) * m for v, s, m in zip(values, pair, masks, strict=True))
            for values, pair, masks in zip(self.w, slopes, self.masks(self.kept), strict=True)
        ]


RATE, DECAY = 0.3, 0.05


class Net(L.LightningModule):
    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3)).double()

    def forward(self, x):
        return self.net(x.double())

    def training_step(self, batch):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, weight_decay=DECAY)


@pytest.fixture
def train(tmp_path):
    def run(module, callbacks, epochs=3, batches=None, **options):
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(module, batches or loader())
        return trainer

    return run


def by_hand(net, callback, epochs=3):
    twin = ByHand(net, callback.density, callback.lr, callback.strength, callback.reduction)
    batches = [(x.double(), y) for x, y in loader()]
    learned = callback.pattern == "learned"
    if learned and callback.probe:
        twin.probe(batches[0])
    for t, batch in enumerate(batches * epochs):
        if t == 0 or callback.refresh == "step":
            twin.choose(RANKINGS[callback.pattern](twin))
        twin.step(batch, RATE, DECAY, learned)
    return twin


RANKINGS = {
    "learned": lambda twin: twin.q,
    "magnitude": lambda twin: twin.sums(),
    "ordered": lambda twin: [-torch.arange(float(size)) for size in HIDDEN.values()],
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probe": False, "lr": 0.5},
        {"refresh": "round", "density": 0.3},
        {"strength": 0.0, "lr": 2.0},
        {"reduction": "mean", "strength": 3.0, "density": 0.7},
        {"density": 0.01},
        {"density": 1.0},
        {"pattern": "magnitude"},
        {"pattern": "magnitude", "refresh": "round"},
        {"pattern": "ordered", "density": 0.3},
    ],
    ids=repr,
)
def test_training_as_with_explicit_gates(options, train):
    module, callback = Net(), LearnedImportance(**options)
    twin = by_hand(copy.deepcopy(module.net), callback)
    train(module, [callback])
    for (_, kept), expected in zip(callback.kept.items(), twin.kept, strict=True):
        assert kept.tolist() == expected.tolist()
    if callback.pattern == "learned":
        for scores, expected in zip(callback.scores.values(), twin.q, strict=True):
            assert torch.allclose(scores, expected, rtol=0, atol=1e-12)
    dense = callback.state_dict()["aside"]
    for layer, values, masks in zip((0, 2, 4), twin.w, twin.masks(twin.kept), strict=True):
        for kind, value, mask in zip(("weight", "bias"), values, masks, strict=True):
            name = f"net.{layer}.{kind}"
            held = module.get_parameter(name).detach()
            assert torch.allclose(held, value * mask, rtol=0, atol=1e-12), name
            if name in dense:
                assert torch.allclose(dense[name], value * ~mask, rtol=0, atol=1e-12), name


def test_scores_choose_other_units_than_magnitudes_and_change_them_in_training(train):
    module, callback = Net(), LearnedImportance(lr=2.0, strength=0.1)
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_):
            seen.append(tuple(callback.kept["net.0"].tolist()))

    train(module, [callback, Watch()])
    assert len(set(seen)) > 1
    assert all(sum(units) == 5 for units in seen)  # floor(.5 * 9 + .5)


def test_values_of_dropped_units_stay_and_come_back(train):
    module, callback = Net(), LearnedImportance(pattern="ordered", refresh="round")
    before = copy.deepcopy(module.net)
    train(module, [callback])
    dropped = ~callback.kept["net.0"]
    assert not module.net[0].weight[dropped].any()
    assert torch.equal(callback.state_dict()["aside"]["net.0.weight"][dropped], before[0].weight[dropped])
    callback.pattern, callback.turn = "rolling", 4
    train(module, [callback], epochs=1)
    back = callback.kept["net.0"] & dropped
    assert back.any()
    assert module.net[0].weight[back].all()


def test_rolling_and_random_turn(train):
    kept = {}
    for pattern in ("rolling", "random"):
        for turn in (0, 7):
            callback = LearnedImportance(0.3, pattern=pattern, turn=turn)
            train(Net(), [callback], epochs=1)
            kept[pattern, turn] = callback.kept["net.0"].tolist()
            assert sum(kept[pattern, turn]) == 3
    assert kept["rolling", 0] == [True] * 3 + [False] * 6
    assert kept["rolling", 7] == [True, *[False] * 6, True, True]
    assert kept["random", 0] != kept["random", 7]


def test_the_gate_s_gradient_is_that_of_a_gate_after_norm_and_activation_summed_over_readers():
    """Convolutions, batch norm, a residual stream, flattening and an LSTM."""
    torch.manual_seed(0)
    net = Everything().double()
    groups = find_groups(net, torch.randn(2, 3, 4, 4).double())
    assert [(group.name, group.size) for group in groups] == [("stem", 4), ("inner", 5), ("fc", 6), ("lstm.l0", 3)]
    net.train()
    x, y = torch.randn(7, 3, 4, 4).double(), torch.arange(7) % 2
    gates = {group.name: torch.ones(group.size).double().requires_grad_() for group in groups}
    expected = torch.autograd.grad(F.cross_entropy(net(x, gates), y), list(gates.values()))
    F.cross_entropy(net(x), y).backward()
    parameters = dict(net.named_parameters())
    found = gate_gradients(groups, parameters, {name: p.grad for name, p in parameters.items()})
    for name, slope in zip(gates, expected, strict=True):
        assert torch.allclose(found[name], slope, rtol=0, atol=1e-12), name
        assert slope.abs().max() > 1e-4


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.norm1 = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.outer, self.norm2 = nn.Conv2d(5, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(64, 6)
        self.lstm, self.head = nn.LSTM(6, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x, gates=None):
        """With gates, each stands where its unit's output is read."""
        gate = gates or {"stem": torch.ones(4), "inner": torch.ones(5), "fc": torch.ones(6), "lstm.l0": torch.ones(3)}
        a, b = gate["stem"][:, None, None], gate["inner"][:, None, None]
        h = F.relu(self.norm0(self.stem(x)))
        h = F.relu(h * a + self.norm2(self.outer(F.relu(self.norm1(self.inner(h * a))) * b)) * a)
        # the stream is read twice: `inner` sees a gate on the first value, `fc` one on the sum
        h = self.fc(h.flatten(1)).tanh()[:, None].expand(-1, 3, -1) * gate["fc"]
        if gates is None:
            return self.head(self.lstm(h)[0][:, -1])
        state, cell = torch.zeros(1, len(x), 3).to(x), torch.zeros(1, len(x), 3).to(x)
        for step in h.unbind(1):  # every step reads the gated state of the one before
            _, (state, cell) = self.lstm(step[:, None], (state * gate["lstm.l0"], cell))
        return self.head(state[0] * gate["lstm.l0"])


def test_a_probe_leaves_no_trace(train):
    class Noted(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.note = [].append

        def training_step(self, batch):
            self.note(1)
            x = F.dropout(self.norm(batch[0]), 0.5)
            loss = F.cross_entropy(self.net(x.double()), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

    runs = []
    for probe in (False, True):
        torch.manual_seed(3)
        module = Noted()
        trainer = train(module, [LearnedImportance(density=1.0, strength=0.0, probe=probe)], epochs=1)
        runs.append((len(module.note.__self__), {**module.state_dict()}, trainer.callback_metrics["loss"]))
    (calls, weights, loss), (more, others, other) = runs
    assert (calls, more) == (6, 7)  # five steps, one to find the units, one to probe
    assert loss == other
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_probe_passes_back_through_a_norm_behind_a_layer(train):
    module = Net()
    module.net.insert(3, nn.BatchNorm1d(6).double())
    callback = LearnedImportance(density=0.5, strength=0.0, lr=1.0)
    train(module, [callback], epochs=1)
    assert callback.kept["net.0"].sum() == 5


def test_two_samples_find_the_units_and_all_where_a_step_wants_all(train):
    class Rows(Net):
        def __init__(self, whole):
            super().__init__()
            self.whole, self.note = whole, [].append

        def training_step(self, batch):
            self.note(len(batch[0]))
            return super().training_step([batch[0].view(4, 4), batch[1]] if self.whole else batch)

    few, whole = Rows(False), Rows(True)
    found = [LearnedImportance(probe=False), LearnedImportance(probe=False)]
    for module, callback in zip((few, whole), found, strict=True):
        train(module, [callback], epochs=1)
    assert few.note.__self__ == [2, *[4] * 5]
    assert whole.note.__self__ == [2, 4, *[4] * 5]
    assert {name: mask.shape for name, mask in found[0].masks.items()} == {
        name: mask.shape for name, mask in found[1].masks.items()
    }
    assert all(torch.equal(units, found[1].kept[name]) for name, units in found[0].kept.items())


def test_what_another_callback_adds_to_the_gradient_moves_weights_but_no_scores(train):
    module, callback = Net(), LearnedImportance(probe=False, lr=0.5)
    start = [(module.net[i].weight.detach().clone(), module.net[i].bias.detach().clone()) for i in (0, 2, 4)]
    twin = ByHand(copy.deepcopy(module.net), 0.5, 0.5, 1.0, "sum")
    for x, y in loader():
        twin.choose()
        twin.step((x.double(), y), RATE, DECAY, anchor=start, mu=0.5)
    train(module, [ProximalTerm(0.5), callback], epochs=1)
    weight, mask = twin.w[0][0], twin.masks(twin.kept)[0][0]
    assert torch.allclose(module.net[0].weight, weight * mask, rtol=0, atol=1e-12)
    assert torch.allclose(callback.scores["net.2"], twin.q[1], rtol=0, atol=1e-12)


def test_layers_choose_whose_units_are_dropped(train):
    callback = LearnedImportance(layers="!net.0.*")
    train(Net(), [callback], epochs=1)
    assert list(callback.kept) == ["net.2"]
    assert set(callback.masks) == {"net.2.weight", "net.2.bias", "net.4.weight"}


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0},
        {"pattern": "best"},
        {"lr": -1},
        {"strength": -1},
        {"reduction": "max"},
        {"refresh": "epoch"},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(InvalidOption, match=next(iter(options))):
        LearnedImportance(**options)


def test_what_cannot_work_is_said(train):
    with pytest.raises(InvalidOption, match="leaves no units"):
        train(Net(), [LearnedImportance(layers="net.4.*")])
    with pytest.raises(IncompatibleMasks, match=r"`net\.0` are of shape \(3,\), expected 9"):
        train(Net(), [LearnedImportance(scores={"net.0": torch.ones(3), "net.2": torch.ones(6)})])
    with pytest.raises(InvalidOption, match="both claim"):
        train(Net(), [LearnedImportance(), StaticMask()])
    with pytest.raises(InvalidOption, match=r"both claim `net\.4\.weight`"):
        train(Net(), [LearnedImportance(layers="net.2.*"), StaticMask(layers="net.4.*")])

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch):
            return None

    with pytest.raises(InvalidOption, match="optimizes manually"):
        train(Manual(), [LearnedImportance()])


def test_a_layer_that_is_used_twice_is_named_as_a_reason_for_no_units(net, fit):
    module, layer = net(), nn.Linear(4, 4)
    module.net = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(InvalidOption, match=r"no units in `Net`; .*, and whose weights are neither tied to others"):
        fit(module, [LearnedImportance()])
