import gc
import weakref
from itertools import pairwise

import pytest
import torch

from lightning_sparsefl.report import pictures
from lightning_sparsefl.report.masks import mask_figure

pytestmark = pytest.mark.pictures


def overlaps(count, seed=0):
    table = torch.rand(count, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (table + table.T) / 2


def test_overlap_figure_leaves_the_diagonal_out():
    expected = overlaps(4)
    figure = pictures.overlap_figure((2, 3, 5, 7), expected, round=9)
    axes = figure.axes[0]
    image = axes.images[0].get_array()
    assert image.shape == (4, 4)
    for row in range(4):
        for column in range(4):
            if row == column:
                assert image.mask[row, column]
            else:
                assert image[row, column] == expected[row, column]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "3", "5", "7"]
    assert axes.get_title(loc="left") == "Mask overlap of clients, round 9"


def test_colours_span_what_is_found():
    table = overlaps(4)
    low, high = pictures.overlap_figure(range(4), table, 0).axes[0].images[0].get_clim()
    found = table[~torch.eye(4, dtype=torch.bool)]
    assert 0 <= float(found.min()) - low < 0.05
    assert 0 <= high - float(found.max()) < 0.05


@pytest.mark.parametrize(("value", "limits"), [(1.0, (0.95, 1.0)), (0.0, (0.0, 0.05))])
def test_equal_overlaps_still_have_colours(value, limits):
    table = torch.full((3, 3), value, dtype=torch.float64)
    assert pictures.overlap_figure(range(3), table, 0).axes[0].images[0].get_clim() == pytest.approx(limits)


def test_the_title_says_how_many_clients_are_drawn():
    axes = pictures.overlap_figure(range(4), overlaps(4), 3, of=70).axes[0]
    assert axes.get_title(loc="left").endswith("round 3: 4 of 70")


def test_density_bars_have_the_densities():
    densities = {"net.conv.weight": 0.25, "net.block.fc.weight": 1.0, "net.out.weight": 0.0123}
    axes = pictures.density_figure(densities, round=7).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.25, 1.0, 0.0123]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["conv", "block.fc", "out"]
    assert [text.get_text() for text in axes.texts] == ["0.25", "1.00", "0.012"]
    assert axes.get_title(loc="left") == "Density per layer, round 7"
    bottom, top = axes.get_ylim()
    assert bottom > top, "the first layer stands on top"


@pytest.mark.parametrize("count", [1, 16, 17, 72, 73, 161])
def test_many_layers_stay_apart(count):
    densities = {f"layer{k}.weight": k / count for k in range(count)}
    figure = pictures.density_figure(densities, 0)
    image = pictures.pixels(figure)
    axes = figure.axes[0]
    assert len(axes.patches) == count
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(below.y1 <= above.y0 for above, below in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    assert image.shape[1] <= 3000


def test_one_layer_keeps_its_name():
    axes = pictures.density_figure({"net.fc.weight": 0.5}, 0).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["net.fc.weight"]


def dots(axes):
    return [tuple(xy) for part in axes.collections for xy in part.get_offsets().tolist()]


def test_clients_stand_worst_first():
    axes = pictures.clients_figure({4: 0.75, 5: 0.25, 6: 1.0}, "val_acc", round=2).axes[0]
    assert dots(axes) == [(0, 0.25), (1, 0.75), (2, 1.0)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["5", "4", "6"]
    assert list(axes.lines[0].get_ydata()) == [pytest.approx(2 / 3)] * 2
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["mean 0.667", "worst tenth 0.250"]
    assert axes.get_ylim()[1] <= 1.01
    assert not any(drawn.get_clip_on() for drawn in axes.collections)  # a dot at 1 is drawn as a whole


def test_of_a_loss_the_greatest_is_the_worst():
    scores = {k: float(k) for k in range(30)}
    axes = pictures.clients_figure(scores, "val_loss", 0, rising=False).axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[0, 29.0], [1, 28.0], [2, 27.0]]
    assert len(dots(axes)) == 30
    assert axes.get_xlabel() == "30 clients, worst first"


def test_masks_say_what_is_black_and_leave_no_column_empty():
    two = {"net.0.weight": torch.eye(4) > 0, "net.2.weight": torch.ones(3, 2, dtype=torch.bool)}
    figure = mask_figure(two, 5)
    assert figure.get_suptitle() == "Kept weights (black), epoch 5"
    assert [axes.get_title() for axes in figure.axes] == ["0", "2"]
    assert torch.equal(torch.from_numpy(figure.axes[0].images[0].get_array().data), torch.eye(4))
    many = {f"net.{place}.weight": torch.rand(4, 4) for place in range(34)}
    figure = mask_figure(many, 5, "round")
    assert figure.get_suptitle() == "Weights kept by all clients (black), round 5 (2 more layers)"
    assert len(figure.axes) == 32
    figure.draw_without_rendering()
    box = figure._suptitle.get_window_extent()
    assert box.x0 > 0
    assert box.x1 < figure.bbox.width


def test_pixels_are_an_image_and_global_state_is_left_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    image = pictures.pixels(pictures.density_figure({"a": 0.5, "b": 1.0}, 0))
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3
    assert image.shape[2] == 880
    assert 0 <= int(image.min()) < 80
    assert int(image.max()) == 255
    assert dict(mpl.rcParams) == before


def test_figures_are_freed():
    figure = pictures.density_figure({"a": 0.5}, 0)
    pictures.pixels(figure)
    gone = weakref.ref(figure)
    del figure
    gc.collect()
    assert gone() is None
