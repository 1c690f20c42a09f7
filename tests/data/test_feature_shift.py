"""Feature shift: the change of a client's inputs, which is a part of its data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_sparsefl.data import BrightnessShift, Examples, FederatedDataModule, NoiseShift, RotationShift
from lightning_sparsefl.errors import InvalidOption

SHIFTS = [NoiseShift(0.3), RotationShift(), BrightnessShift(0.5, 1.2)]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Images(FederatedDataModule):
    """Images of 4x4 pixels, float or uint8, that are numbered in their first pixel's neighbourhood."""

    num_classes, sample_shape, num_train = 2, (1, 4, 4), 40
    dtype = torch.float32

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        images = (torch.rand(60, 1, 4, 4, generator=rng()) * 200).to(self.dtype)
        labels = torch.arange(60) % 2
        return images[:40], labels[:40], images[40:], labels[40:]


def inputs(loader) -> Tensor:
    return torch.cat([batch[0] for batch in loader])


def test_noise_grows_with_the_level():
    still = torch.zeros(1000, 8)
    assert NoiseShift(0.3)(still, 0.0, rng()).equal(still)
    assert float(NoiseShift(0.3)(still, 0.5, rng()).std()) == pytest.approx(0.15, rel=0.05)


def test_quarter_turns_are_exact():
    images = torch.rand(3, 2, 6, 6, generator=rng())
    for quarter in range(4):
        assert RotationShift(360)(images, quarter / 4, rng()).equal(images.rot90(quarter, (2, 3)))


def test_rotation_keeps_the_proportions_of_a_rectangle():
    image = torch.zeros(1, 1, 5, 9)
    image[0, 0, 2, 2:7] = 1  # a line of five pixels, which stands upright after a quarter of a turn
    turned = RotationShift(360)(image, 0.25, rng())[0, 0]
    assert turned.sum() == 5
    assert turned[:, 4].tolist() == [1] * 5


def test_brightness_multiplies():
    shift = BrightnessShift(0.5, 1.5)
    assert shift(torch.full((1, 2), 2.0), 0.5, rng()).tolist() == [[2.0, 2.0]]
    assert shift(torch.tensor([[10, 250]], dtype=torch.uint8), 0.9, rng()).tolist() == [[14, 255]]


@pytest.mark.parametrize("shift", SHIFTS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_client_has_the_same_inputs_in_each_round(shift, dtype):
    class Stored(Images):
        pass

    Stored.dtype = dtype
    first, second = (
        Stored(num_clients=4, feature_shift=shift, val_fraction=0.2, test_per_client=6, seed=1) for _ in range(2)
    )
    plain = Stored(num_clients=4, val_fraction=0.2, test_per_client=6, seed=1)
    for client in range(4):
        for split in ("val", "test"):
            own = [inputs(getattr(data, f"client_{split}_dataloader")(client)) for data in (first, first, second)]
            assert own[0].equal(own[1])
            assert own[0].equal(own[2])
            assert own[0].dtype == dtype
            unshifted = inputs(getattr(plain, f"client_{split}_dataloader")(client))
            assert own[0].equal(unshifted) == (client == 0 and not isinstance(shift, BrightnessShift))
        assert Examples.are_read_by(first.client_train_dataloader(client))


def test_training_and_test_examples_have_noise_of_their_own():
    noise = []
    for split in ("train", "test"):
        shifted, plain = (
            Images(num_clients=2, test_per_client=20, val_fraction=0.0, seed=0, feature_shift=shift)
            for shift in (NoiseShift(0.5), None)
        )
        shifted, plain = (getattr(data, f"client_{split}_dataloader")(1).dataset.inputs for data in (shifted, plain))
        noise.append((shifted - plain)[:5])
    assert noise[0].std() > 0.1
    assert not torch.allclose(*noise, atol=0.01)


def test_pooled_training_data_is_that_of_the_clients():
    data = Images(num_clients=4, feature_shift=NoiseShift(0.5), seed=0)
    own = torch.cat([inputs(data.client_train_dataloader(client)) for client in range(4)])
    assert sorted(own.flatten().tolist()) == sorted(inputs(data.train_dataloader()).flatten().tolist())


def test_the_whole_test_set_has_the_shifts_of_all_clients():
    plain = inputs(Images(num_clients=4, seed=0).test_dataloader())
    shifted = inputs(Images(num_clients=4, feature_shift=BrightnessShift(1.0, 2.0), seed=0).test_dataloader())
    expected = torch.cat([plain[client::4] * (1 + client / 4) for client in range(4)])
    assert shifted.equal(expected)


def test_refuses_inputs_that_cannot_be_shifted():
    with pytest.raises(InvalidOption, match=r"is NoiseShift\(std=1\), but the inputs are torch.int64; expected uint8"):
        NoiseShift(1)(torch.zeros(2, 3, dtype=torch.int64), 0.5, rng())
    with pytest.raises(InvalidOption, match=r"an input has the shape \(3,\); expected images of \(channels"):
        RotationShift()(torch.zeros(2, 3), 0.5, rng())


@pytest.mark.parametrize(
    "make",
    [lambda: NoiseShift(0), lambda: RotationShift(0), lambda: RotationShift(720), lambda: BrightnessShift(1.0, 1.0)],
)
def test_refuses_options_out_of_range(make):
    with pytest.raises(InvalidOption, match=r"`data\.feature_shift\.\w+` is .*; expected a"):
        make()
