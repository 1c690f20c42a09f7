"""Data sets that are read from files as they are published: small files of the same layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import IID, FederatedDomainNet, FederatedReddit, FederatedTinyImageNet, FlipRotate
from lightning_sparsefl.data.reddit import _num_samples
from lightning_sparsefl.errors import DataNotFound, InvalidOption
from lightning_sparsefl.models import LanguageLSTM

WORDS = ["the", "cat", "sat", "on", "a", "mat"]


def write_image(path: Path, colour: int | tuple[int, int, int], size: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(colour, tuple) else "L", (size, size), colour).save(path, quality=100)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Three classes with 4 training and 2 test images, whose green value is 80 times the label."""
    folder = tmp_path / "tiny-imagenet-200"
    names = ["n03", "n01", "n02"]
    folder.mkdir()
    (folder / "wnids.txt").write_text("\n".join(names))
    lines = []
    for name in names:
        label = sorted(names).index(name)
        for i in range(4):
            grey = label == 1 and i == 0
            colour = 80 if grey else (200, 80 * label, 10)
            write_image(folder / "train" / name / "images" / f"{name}_{i}.JPEG", colour)
        for i in range(2):
            write_image(folder / "val" / "images" / f"val_{label}_{i}.JPEG", (200, 80 * label, 10))
            lines.append(f"val_{label}_{i}.JPEG\t{name}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines))
    return tmp_path


def test_tiny_imagenet_is_read_from_its_folders(tiny: Path):
    data = FederatedTinyImageNet(root=str(tiny), num_clients=2, partition=IID())
    images, labels, test_images, test_labels = data.load()
    assert (images.shape, images.dtype) == ((12, 3, 64, 64), torch.uint8)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(test_labels.tolist()) == [0, 0, 1, 1, 2, 2]
    for pixels, label in [*zip(images, labels, strict=True), *zip(test_images, test_labels, strict=True)]:
        assert pixels[1].float().mean() == pytest.approx(80 * int(label), abs=3)
    data.setup()
    assert data.client_sizes == [6, 6]


@pytest.mark.parametrize(
    "gone", ["wnids.txt", "train/n02/images", "val/val_annotations.txt", "val/images/val_1_0.JPEG"]
)
def test_an_incomplete_tiny_imagenet_is_refused(tiny: Path, gone: str):
    (tiny / "tiny-imagenet-200" / gone).rename(tiny / "elsewhere")
    expected = r"found no complete copy .*tiny-imagenet-200.* \(.*\); .*delete this folder .*`--data.download true`"
    with pytest.raises(DataNotFound, match=expected):
        FederatedTinyImageNet(root=str(tiny), num_clients=2).setup()
    if not gone.startswith("val"):  # a download checks the training part
        with pytest.raises(DataNotFound, match=expected):
            FederatedTinyImageNet(root=str(tiny), num_clients=2, download=True).prepare_data()


@pytest.mark.parametrize("damage", ["junk", "cut", "small"])
def test_a_damaged_image_of_tiny_imagenet_is_named(tiny: Path, damage: str):
    path = tiny / "tiny-imagenet-200" / "train" / "n02" / "images" / "n02_1.JPEG"
    if damage == "small":
        write_image(path, (1, 2, 3), size=32)
    else:
        path.write_bytes(b"junk" if damage == "junk" else path.read_bytes()[:-100])
    with pytest.raises(
        DataNotFound, match=rf"\({path} is no image of 64x64 pixels\); .*delete this folder and download"
    ):
        FederatedTinyImageNet(root=str(tiny), num_clients=2).setup()


def test_tiny_imagenet_is_downloaded_from_stanford(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(url, root, md5):
        asked.append((url, root, md5))
        write_image(Path(root) / "tiny-imagenet-200" / "train" / "n01" / "images" / "0.JPEG", 0)
        (Path(root) / "tiny-imagenet-200" / "wnids.txt").write_text("n01")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", download)
    FederatedTinyImageNet(root=str(tmp_path)).prepare_data()
    assert asked == []
    for _ in range(2):  # the second time, it is there
        FederatedTinyImageNet(root=str(tmp_path), download=True).prepare_data()
    assert asked == [
        ("http://cs231n.stanford.edu/tiny-imagenet-200.zip", str(tmp_path), "90528d7ca1a48142e341f4ef8d21d0de")
    ]


@pytest.fixture
def domains(tmp_path: Path) -> Path:
    """Two domains with three classes, of which the lists name 6 and 4 training images each, and 2 test images."""
    for shade, (domain, count) in enumerate([("clipart", 6), ("sketch", 4)]):
        for part, number in (("train", count), ("test", 2)):
            lines = []
            for label, name in enumerate(("bird", "apple", "zebra")):
                for i in range(number):
                    path = f"{domain}/{name}/{part}_{i}.{'png' if domain == 'sketch' else 'jpg'}"
                    write_image(tmp_path / "DomainNet" / path, (100 * shade, 90 * label, 0), size=20 + i)
                    lines.append(f"{path} {label + 40}")
            (tmp_path / "DomainNet" / f"{domain}_{part}.txt").write_text("\n".join(lines))
    return tmp_path


def small_domains(root: Path, **options):
    options = {"domains": ("clipart", "sketch"), "classes": ("bird", "zebra"), "size": 16, "num_clients": 4, **options}
    return FederatedDomainNet(root=str(root), **options)


@pytest.mark.parametrize(("equal", "sizes"), [(True, [4, 4, 4, 4]), (False, [6, 6, 4, 4])])
def test_clients_of_domainnet_have_images_of_one_domain(domains: Path, equal: bool, sizes: list[int]):
    data = small_domains(domains, equal_domains=equal, augment=False)
    data.prepare_data()
    data.setup()
    assert data.client_sizes == sizes
    assert (data.num_classes, data.sample_shape) == (2, (3, 16, 16))
    for client in range(4):
        for loader in (data.client_train_dataloader(client), data.client_test_dataloader(client)):
            batches = list(loader)
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            assert images[:, 0].mean().item() == pytest.approx((client // 2) * 100 / 255, abs=0.02)
            green = images[:, 1].mean((1, 2)) * 255
            assert torch.allclose(green, 180.0 * labels, atol=4)  # zebra is the third class there, the second here
    assert len(data.client_test_dataloader(0).dataset) == 4


def test_equal_domains_keep_all_classes(domains: Path):
    """The published lists are sorted by class, so that a prefix of a list lacks the last classes."""
    data = small_domains(domains)
    _, labels, *_ = data.load()
    assert labels.bincount().tolist() == [8, 8]


def test_each_domain_is_split_by_draws_of_its_own(domains: Path):
    """Lists of equal lengths would else be cut at the same places, with the same shares of classes."""
    data = small_domains(domains)
    _, labels, *_ = data.load()
    clipart, sketch = data.assign(labels, seed=0)[::2]
    assert len(clipart) == len(sketch) == 4
    assert not sketch.equal(clipart + 8)


@pytest.mark.parametrize("left", [0, 10, 60])
def test_a_damaged_image_of_a_domain_is_named(left: int, domains: Path):
    image = domains / "DomainNet" / "sketch" / "bird" / "train_1.png"
    image.write_bytes(image.read_bytes()[:left])
    with pytest.raises(DataNotFound, match=rf"found {image}, which is no image that can be read; replace it"):
        small_domains(domains, equal_domains=False).setup()


def test_missing_domains_and_odd_options_are_refused(domains: Path):
    with pytest.raises(DataNotFound, match=r"found no .*infograph_train.txt; download .* http://ai.bu.edu/M3SDA"):
        small_domains(domains, domains=("clipart", "infograph")).prepare_data()
    (domains / "DomainNet" / "sketch" / "bird" / "train_1.png").unlink()
    with pytest.raises(DataNotFound, match=r"found no .*train_1.png"):
        small_domains(domains, equal_domains=False).setup()
    for number in (5, 4.0):
        with pytest.raises(
            InvalidOption, match=rf"`data.num_clients` is {number}; expected a multiple of .*domains, 2"
        ):
            small_domains(domains, num_clients=number)
    with pytest.raises(InvalidOption, match=r"`data.classes` is \['bird', 'bird'\]; expected .*, each at most once"):
        small_domains(domains, classes=("bird", "bird"))
    with pytest.raises(InvalidOption, match=r"`data.domains` is \['photo'\]; expected some of clipart"):
        small_domains(domains, domains=("photo",))
    with pytest.raises(InvalidOption, match=r"`data.classes` is \['lion', 'tiger'\]; expected classes that occur in"):
        small_domains(domains, classes=("lion", "tiger")).setup()


@pytest.mark.parametrize(
    ("classes", "lacking"), [(("bird", "zebra "), "'zebra ' (nearest: 'zebra')"), (("lion", "bird"), "'lion'")]
)
def test_a_class_without_training_images_is_named(domains: Path, classes: tuple[str, str], lacking: str):
    expected = f"names that occur in the training lists in {domains / 'DomainNet'}, which lack {lacking}."
    with pytest.raises(InvalidOption, match=re.escape(f"`data.classes` is {list(classes)}; expected {expected}")):
        small_domains(domains, classes=classes).prepare_data()


def test_a_class_that_only_one_domain_has_is_kept(domains: Path):
    path = domains / "DomainNet" / "sketch_train.txt"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "zebra" not in line))
    assert small_domains(domains, equal_domains=False).load()[1].bincount().tolist() == [10, 6]


def test_more_clients_than_images_of_a_domain_are_refused(domains: Path):
    with pytest.raises(InvalidOption, match=r"`data.num_clients` is 40; expected at most 16, which gives each client"):
        small_domains(domains, num_clients=40).setup()
    small_domains(domains, num_clients=16).setup()


def test_a_list_cannot_name_a_file_elsewhere(domains: Path, tmp_path: Path):
    write_image(tmp_path / "bird" / "secret.jpg", (1, 2, 3))
    (domains / "DomainNet" / "clipart_train.txt").write_text("clipart/../../bird/secret.jpg 0\n")
    with pytest.raises(DataNotFound, match=r"DomainNet/clipart/bird/secret.jpg"):
        small_domains(domains).setup()


def test_rotations_and_flips_keep_images_whole():
    torch.manual_seed(0)
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 1:4, 4] = 255
    still = FlipRotate(degrees=0.0)(image.expand(64, 1, 9, 9))
    assert torch.equal(still, image.expand(64, 1, 9, 9))  # the pixel is on the axis
    turned = FlipRotate(degrees=90.0)(image.expand(400, 1, 9, 9))[:, 0].float() / 255
    places = torch.arange(-4.0, 5.0)
    ink = turned.sum((1, 2))
    x, y = (turned.sum(1) * places).sum(1) / ink, (turned.sum(2) * places).sum(1) / ink
    assert ink.min() >= 2  # the nearest pixels of a line of three
    assert torch.allclose((x**2 + y**2).sqrt(), torch.tensor(2.0), atol=0.7)
    assert x.min() < -1.8
    assert x.max() > 1.8
    assert y.max() < 0.5


def comment(words: list[str], length: int = 5) -> tuple[list[list[str]], dict]:
    """One comment in LEAF's layout: begin and end marked, cut into sequences, padded."""
    inputs, targets = ["<BOS>", *words, "<EOS>"], [*words, "<EOS>", "<PAD>"]
    counts = [1.0] * len(inputs)
    while len(inputs) % length:
        inputs, targets, counts = [*inputs, "<PAD>"], [*targets, "<PAD>"], [*counts, 0.0]
    cut = [slice(i, i + length) for i in range(0, len(inputs), length)]
    labels = {"subreddit": "a", "created_utc": 0, "score": 1}
    labels |= {"target_tokens": [targets[s] for s in cut], "count_tokens": [counts[s] for s in cut]}
    return [inputs[s] for s in cut], labels


@pytest.fixture
def reddit(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 2)):
        folder = tmp_path / "reddit" / part
        folder.mkdir(parents=True)
        for file in range(2):
            users = {}
            for user in range(4):
                own = [comment([WORDS[k % (2 + user)] for k in range(rng.integers(1, 9))]) for _ in range(count)]
                users[f"{file}-{user}"] = {"x": [x for x, _ in own], "y": [y for _, y in own]}
            if file == 1 and part == "test":
                users["1-3"] = {"x": [], "y": []}
            content = {"users": list(users), "num_samples": [count] * 4, "user_data": users}
            (folder / f"{file}_{part}.json").write_text(json.dumps(content))
    return tmp_path


def small_reddit(root: Path, **options) -> FederatedReddit:
    return FederatedReddit(root=str(root), **{"num_classes": 9, "length": 5, "num_clients": 4, **options})


def test_reddit_clients_are_users(reddit: Path):
    data = small_reddit(reddit)
    data.prepare_data()
    data.setup()
    vocabulary = data._vocabulary(data._read("train").values())
    assert vocabulary["<PAD>"] == 0
    assert sorted(vocabulary.values()) == [0, *range(2, 9)]
    assert vocabulary["<BOS>"] < vocabulary["on"]  # the more frequent ones come first
    words = {number: word for word, number in vocabulary.items()} | {1: "?", -100: "-"}
    seen = set()
    for client in range(4):
        for loader in (data.client_train_dataloader(client), data.client_test_dataloader(client)):
            for tokens, targets in loader:
                for line, aims in zip(tokens.tolist(), targets.tolist(), strict=True):
                    counted = [(words[a], words[b]) for a, b in zip(line, aims, strict=True) if b != -100]
                    assert counted  # a sequence without a target would make the loss of its batch undefined
                    following = [words[a] for a in line[1:]]
                    assert all(b == c for (_, b), c in zip(counted, following, strict=False))
                    seen |= {b for _, b in counted}
    assert "<PAD>" not in seen
    assert "<EOS>" in seen
    assert int(data.client_label_counts(0)[0]) == 0
    assert int(data.client_label_counts(0).sum()) > 0


def test_reddit_draws_users_with_both_splits_by_the_seed(reddit: Path):
    users = {f"{file}-{user}": 5 for file in range(2) for user in range(4)}
    drawn = {tuple(small_reddit(reddit, seed=seed)._choose(users)) for seed in range(5)}
    assert len(drawn) > 1
    in_another_order = dict(reversed(users.items()))
    assert small_reddit(reddit, seed=3)._choose(users) == small_reddit(reddit, seed=3)._choose(in_another_order)
    assert small_reddit(reddit, num_clients=7).load()  # one user has no test sequences
    with pytest.raises(InvalidOption, match=r"`data.num_clients` is 8, but 7 users in .*; lower it"):
        small_reddit(reddit, num_clients=8).setup()
    with pytest.raises(InvalidOption, match=r"`data.length` is 10; expected 5, the number of tokens"):
        small_reddit(reddit, length=10).setup()


def test_the_largest_reddit_users(reddit: Path):
    """By training sequences that have a target; names decide among equal numbers."""
    file = reddit / "reddit" / "train" / "1_train.json"
    content = json.loads(file.read_text())
    for user, copies in {"1-0": 2, "1-2": 4, "1-3": 9}.items():  # the last one has no test sequences
        own = content["user_data"][user]
        content["user_data"][user] = {name: values * copies for name, values in own.items()}
    file.write_text(json.dumps(content))
    data = small_reddit(reddit, num_clients=2, users="largest", seed=5)
    data.setup()
    sizes = {user: _num_samples(own) for user, own in data._read("train").items()}
    assert sorted(sizes, key=sizes.get)[-3:] == ["1-0", "1-2", "1-3"]
    assert [data.num_examples(client) for client in range(2)] == [sizes["1-0"], sizes["1-2"]]
    equal = {f"u{number}": 3 for number in range(9, 0, -1)}
    assert small_reddit(reddit, users="largest", num_clients=4)._choose(equal) == ["u1", "u2", "u3", "u4"]
    with pytest.raises(InvalidOption, match=r"`data.users` is 'all'; expected 'random' or 'largest'"):
        small_reddit(reddit, users="all")


def test_a_word_that_is_not_counted_is_no_target(reddit: Path):
    file = reddit / "reddit" / "train" / "0_train.json"
    content = json.loads(file.read_text())
    sequences, labels = comment(["the", "cat"])
    labels["count_tokens"][0][1] = 0.0
    content["user_data"]["0-0"] = {"x": [sequences], "y": [labels]}
    file.write_text(json.dumps(content))
    data = small_reddit(reddit, users="largest", num_clients=7)
    data.setup()
    single = next(client for client in range(7) if data.num_examples(client) == 1)
    ((_, targets),) = data.client_train_dataloader(single)
    assert (targets != -100).tolist() == [[True, False, True, False, False]]


@pytest.mark.parametrize("part", ["train", "test"])
def test_reddit_users_without_a_target_are_no_clients(reddit: Path, part: str):
    """The end of a comment alone in a sequence has padding as its target, although it is counted."""
    file = reddit / "reddit" / part / f"0_{part}.json"
    content = json.loads(file.read_text())
    tokens = ["<EOS>", *["<PAD>"] * 4]
    labels = {"target_tokens": [["<PAD>"] * 5], "count_tokens": [[1.0, 0.0, 0.0, 0.0, 0.0]]}
    content["user_data"]["0-0"] = {"x": [[tokens]], "y": [labels]}
    file.write_text(json.dumps(content))
    data = small_reddit(reddit, num_clients=6)
    data.setup()
    assert min(data.num_examples(client) for client in range(6)) > 0
    with pytest.raises(
        InvalidOption, match=r"`data.num_clients` is 7, but 6 users in .* sequences with a target; lower"
    ):
        small_reddit(reddit, num_clients=7).setup()


@pytest.mark.parametrize(
    "content",
    [
        '{"user_data": {"0-0',
        "[]",
        "{}",
        '{"user_data": []}',
        '{"user_data": {"a": []}}',
        '{"user_data": {"a": {"x": [["the"]], "y": []}}}',
        '{"user_data": {"a": {"x": [], "y": [{"target_tokens": [["the"]]}]}}}',
        '{"user_data": {"a": {"x": [], "y": [{"target_tokens": [[1]], "count_tokens": [[1]]}]}}}',
        "\xff",
    ],
)
def test_a_damaged_or_foreign_file_of_reddit_is_named(reddit: Path, content: str):
    path = reddit / "reddit" / "test" / "0_test.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DataNotFound, match=rf"found {path} damaged or not in LEAF's format; replace it"):
        small_reddit(reddit).setup()


@pytest.mark.parametrize("num_clients", [0, -2, 4.0])
def test_reddit_needs_a_number_of_clients(num_clients):
    with pytest.raises(InvalidOption, match=rf"`data.num_clients` is {num_clients}; expected a whole number >= 1\."):
        FederatedReddit(num_clients=num_clients)


def test_missing_reddit_says_where_it_comes_from(tmp_path: Path):
    with pytest.raises(DataNotFound, match=r"download the preprocessed data that https://github.com/TalwalkarLab/leaf"):
        FederatedReddit(root=str(tmp_path)).prepare_data()


def test_a_language_model_learns_on_reddit(reddit: Path, tmp_path: Path):
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        max_rounds=10,
        max_epochs=3,
        gradient_clip_val=5.0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
        federation=Federation(clients_per_round=4),
    )
    model = LanguageLSTM(9, embedding=8, hidden=8, length=5, lr=2.0, unknown=1)
    summary = trainer.fit(model, small_reddit(reddit, batch_size=5, eval_split="test"))
    assert summary["global/test_acc"] > 0.3


def test_only_counted_positions_make_the_accuracy():
    model = LanguageLSTM(4, embedding=4, hidden=4, length=3, unknown=1)
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 1, 3], [3, 3, 0]]), 4).float().transpose(1, 2)
    targets = torch.tensor([[2, 1, -100], [2, 3, -100]])
    assert float(model.train_acc(logits, targets)) == 0.5  # 2 of 4: the unknown word never counts as correct
    model.val_acc.update(model.predict(logits), targets)
    assert float(model.val_acc.compute()) == 0.5
    assert float(LanguageLSTM(4, embedding=4, hidden=4, length=3).train_acc(logits, targets)) == 0.75
