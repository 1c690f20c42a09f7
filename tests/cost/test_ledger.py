from __future__ import annotations

import json
import random
from dataclasses import fields

import pytest

from lightning_sparsefl.cost import Charge, Ledger
from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption

KEYS = {
    "comm/uplink_bytes",
    "comm/downlink_bytes",
    "comm/mask_bytes",
    "comm/paper_bytes",
    "flops/train",
    "flops/paper",
}


def charge(round_, client, scale=1):
    return Charge(
        round=round_,
        client=client,
        downlink_bytes=1 * scale,
        uplink_bytes=2 * scale,
        mask_bytes=3 * scale,
        paper_bytes_down=4.0 * scale,
        paper_bytes_up=5.0 * scale,
        flops_train=6.5 * scale,
        flops_paper=7.0 * scale,
    )


def test_the_keys_of_the_log():
    ledger = Ledger()
    ledger.add(charge(0, 0))
    ledger.add(charge(0, 1, 10))
    ledger.add(charge(1, 0, 100))
    assert ledger.round_totals(1) == {
        "comm/uplink_bytes": 200,
        "comm/downlink_bytes": 100,
        "comm/mask_bytes": 300,
        "comm/paper_bytes": 900.0,
        "flops/train": 650.0,
        "flops/paper": 700.0,
    }
    assert ledger.totals == {
        "comm/uplink_bytes_total": 222,
        "comm/downlink_bytes_total": 111,
        "comm/mask_bytes_total": 333,
        "comm/paper_bytes_total": 999.0,
        "flops/train_total": 721.5,
        "flops/paper_total": 777.0,
    }


def test_an_empty_ledger_and_a_round_without_clients_are_zero():
    ledger = Ledger()
    assert ledger.round_totals(0) == dict.fromkeys(KEYS, 0)
    assert ledger.totals == {f"{key}_total": 0 for key in KEYS}
    ledger.add(charge(2, 0))
    assert ledger.round_totals(3) == dict.fromkeys(KEYS, 0)
    assert ledger.rows(3) == ()


def test_sums_do_not_depend_on_the_order_of_the_clients():
    pick = random.Random(0)
    charges = [Charge(round=0, client=k, flops_train=pick.random() * 10 ** pick.randrange(18)) for k in range(50)]
    seen = set()
    for _ in range(20):
        pick.shuffle(charges)
        ledger = Ledger()
        for row in charges:
            ledger.add(row)
        seen.add((ledger.round_totals(0)["flops/train"], ledger.totals["flops/train_total"]))
        assert [row.client for row in ledger.rows(0)] == list(range(50))
    assert len(seen) == 1


def test_a_whole_number_among_fractions_is_summed_in_any_order():
    ledger = Ledger()
    for client, amount in enumerate((1e16, 1, 1)):
        ledger.add(Charge(round=0, client=client, flops_train=amount))
    assert ledger.round_totals(0)["flops/train"] == 1e16 + 2


def test_only_the_rows_of_the_current_round_are_kept():
    ledger = Ledger()
    for round_, client in ((0, 0), (0, 1), (1, 2)):
        ledger.add(charge(round_, client))
    assert [row["client"] for row in ledger.state_dict()["rows"]] == [2]


def test_bytes_stay_exact():
    ledger = Ledger()
    for round_ in range(3):
        ledger.add(Charge(round=round_, client=0, uplink_bytes=2**60 + 1))
    assert ledger.totals["comm/uplink_bytes_total"] == 3 * (2**60 + 1)


def test_a_closed_round_stays_closed():
    ledger = Ledger()
    ledger.add(charge(4, 0))
    with pytest.raises(InvalidOption, match=r"`Charge\(round=3\)`: expected 4 or later"):
        ledger.add(charge(3, 0))
    with pytest.raises(InvalidOption, match="`round=3`: expected 4 or later"):
        ledger.round_totals(3)


def test_a_run_that_stops_goes_on_with_the_same_sums():
    straight, first = Ledger(), Ledger()
    rows = [charge(round_, client, 1 + round_) for round_ in range(4) for client in range(3)]
    for row in rows:
        straight.add(row)
    for row in rows[:7]:
        first.add(row)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = Ledger()
    resumed.load_state_dict(state)
    assert resumed.totals == first.totals
    assert resumed.rows(2) == first.rows(2)
    for row in rows[7:]:
        resumed.add(row)
    assert resumed.totals == straight.totals
    assert resumed.round_totals(3) == straight.round_totals(3)


def test_the_state_is_a_copy():
    ledger = Ledger()
    ledger.add(charge(0, 0))
    state = ledger.state_dict()
    ledger.add(charge(1, 0))
    assert state["closed"]["comm/uplink_bytes"] == 0
    assert len(state["rows"]) == 1


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"closed": {}, "rows": []},
        {"closed": dict.fromkeys(KEYS, 0), "rows": [{"round": 0}]},
        {"closed": dict.fromkeys(KEYS, 0), "rows": None},
        {"closed": [], "rows": []},
        {"closed": dict.fromkeys(KEYS, "0"), "rows": []},
        {"closed": {**dict.fromkeys(KEYS, 0), "flops/train": "0"}, "rows": []},
        {"closed": dict.fromkeys(KEYS, 0), "rows": [{field.name: [] for field in fields(Charge)}]},
    ],
)
def test_a_foreign_state_is_refused(state):
    ledger = Ledger()
    with pytest.raises(CheckpointMismatch, match="The ledger's"):
        ledger.load_state_dict(state)
    assert ledger.totals["flops/train_total"] == 0
