"""A run that is stopped and resumed equals the one that was not."""

import pytest

from helpers.algorithms import every_variant, rows


@every_variant
def test_stop_and_resume_equals_the_straight_run(algorithm, federation, last, monkeypatch):
    straight = federation(algorithm, rounds=4, folder="straight")
    calls = []
    train = type(algorithm).train

    def dies_in_the_third_round(self, message, client):
        calls.append(client.id)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return train(self, message, client)

    with monkeypatch.context() as patch:
        patch.setattr(type(algorithm), "train", dies_in_the_third_round)
        with pytest.raises(KeyboardInterrupt):
            federation(algorithm, rounds=4, folder="resumed")
    resumed = federation(algorithm, rounds=4, folder="resumed", ckpt_path="last")
    assert resumed.run_folder.name == "version_0"
    assert last(resumed) == last(straight)
    assert resumed.summary == straight.summary
    for table in ("metrics.csv", "clients.csv"):
        assert rows(resumed.run_folder / table) == rows(straight.run_folder / table)
