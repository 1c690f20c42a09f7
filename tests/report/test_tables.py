from io import StringIO

import pytest
from rich.console import Console

from lightning_sparsefl.report import print_table, quantity, score, summary_rows

SUMMARY = {
    "algorithm": "FedSpa",
    "rounds": 40,
    "flops/paper_total": 2e12,
    "global/val_loss": 0.5,
    "global/val_acc": 0.75,
    "personal/val_acc": 0.875,
    "personal/val_acc_std": 0.0625,
    "personal/val_acc_worst10": 0.5,
    "finetuned/val_acc": 0.9375,
    "comm/downlink_bytes_total": 1500,
    "comm/uplink_bytes_total": 12,
    "density/all": 0.5,
}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (0.25, "0.25 B"),
        (12, "12 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1e6, "1 MB"),
        (1e21, "1 ZB"),
        (1234.5, "1.234 kB"),
        (-2.5e9, "-2.5 GB"),
        (-1000, "-1 kB"),
        (999.96, "1 kB"),
        (999_999, "1 MB"),
        (5e24, "5000 ZB"),
        (float("inf"), "inf B"),
        (float("nan"), "nan B"),
    ],
)
def test_quantities(value, text):
    assert quantity(value, "B") == text


def test_scores():
    assert [score(value) for value in (1, 0.99996, -0.5, float("nan"))] == ["1.0000", "1.0000", "-0.5000", "nan"]
    assert [score(value) for value in (0.0, -2e-5, 1e7, float("inf"))] == ["0.0000", "-2.000e-05", "1.000e+07", "inf"]


def test_the_final_table_has_one_order():
    assert summary_rows(SUMMARY) == [
        ("global val_acc", "0.7500"),
        ("global val_loss", "0.5000"),
        ("personal val_acc", "0.8750"),
        ("  std over clients", "0.0625"),
        ("  worst tenth", "0.5000"),
        ("finetuned val_acc", "0.9375"),
        ("bytes up", "12 B"),
        ("bytes down", "1.5 kB"),
        ("training FLOPs, by formula", "2 TFLOP"),
        ("density of the masks", "0.5000"),
    ]


def test_the_participation_gap_is_named():
    rows = summary_rows({"unseen/val_acc": 0.75, "unseen/val_acc_gap": 0.125})
    assert rows == [("unseen val_acc", "0.7500"), ("  participants minus unseen", "0.1250")]


def test_a_metric_that_is_named_like_a_statistic_is_shown_as_a_metric():
    scores = {"global/acc": 0.75, "global/acc_std": 0.5, "personal/x_std": 0.25, "personal/x_std_std": 0.125}
    assert summary_rows(scores) == [
        ("global acc", "0.7500"),
        ("global acc_std", "0.5000"),
        ("personal x_std", "0.2500"),
        ("  std over clients", "0.1250"),
    ]


def test_epsilon_stands_with_its_delta():
    assert summary_rows({"privacy/epsilon": 1.25, "privacy/delta": 1e-5}) == [("epsilon at delta 1e-05", "1.25")]


def test_no_scores_no_rows():
    assert summary_rows({}) == []


def test_a_method_without_masks_has_no_row_for_their_bytes():
    costs = {"comm/uplink_bytes_total": 5, "flops/train_total": 0}
    assert summary_rows({**costs, "comm/mask_bytes_total": 0}) == summary_rows(costs)
    assert ("  of both, masks", "3 B") in summary_rows({**costs, "comm/mask_bytes_total": 3})
    assert ("training FLOPs", "0 FLOP") in summary_rows(costs)


def test_unknown_flops_are_not_shown_as_zero():
    assert summary_rows({"comm/uplink_bytes_total": 5})[-1] == ("training FLOPs", "not counted")


def printed(columns, rows, width=80):
    file = StringIO()
    print_table("A title", columns, rows, Console(file=file, width=width))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_table_without_heads_is_title_and_rows():
    lines = printed(("", ""), [("global val_acc", "0.75"), ("  worst", "0.5")])
    assert lines == ["", "A title", "global val_acc   0.75", "  worst           0.5"]


def test_heads_stand_over_their_columns():
    lines = printed(("", "hardware", "paper"), [("bytes up", 1, 22)])
    assert [line.split() for line in lines[2:]] == [
        ["hardware", "paper"],
        ["\u2500" * len(lines[3])],
        ["bytes", "up", "1", "22"],
    ]
    assert lines[2].index("paper") + len("paper") == len(lines[4])


def test_brackets_are_text():
    assert printed(("",), [("layers[0]",), ("[bold]x",)])[2:] == ["layers[0]", "[bold]x"]


def test_eighty_columns_hold_the_final_table():
    assert max(map(len, printed(("", ""), summary_rows(SUMMARY)))) <= 80


def test_in_a_pipe_no_line_is_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "layer." * 20 + "weight"
    print_table("t" * 100, ("tensor", "elements"), [(name, "1,000")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "t" * 100
    assert lines[-1] == f"{name}      1,000"


def test_on_a_narrow_terminal_long_names_are_folded():
    name = "layer." * 10 + "weight"
    lines = printed(("", ""), [(name, "1,000")], width=40)
    assert max(map(len, lines)) <= 40
    assert "".join(line[:32].strip() for line in lines[2:]).replace("1,000", "").strip() == name
