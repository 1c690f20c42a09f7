"""A client that fails is left out of the merge and reported."""

from helpers.algorithms import every_variant, rows


@every_variant
def test_a_client_that_fails_is_left_out(algorithm, federation, monkeypatch):
    train = type(algorithm).train

    def fails_for_one(self, message, client):
        if client.id == 1:
            raise ValueError("no luck")
        return train(self, message, client)

    monkeypatch.setattr(type(algorithm), "train", fails_for_one)
    trainer = federation(algorithm, federation={"on_client_error": "skip"})
    table = rows(trainer.run_folder / "clients.csv")
    failed = [row for row in table if row["client"] == "1" and row["failure"]]
    assert failed
    assert all(row["trained"] == "0" and row["failure"] == "ValueError: no luck" for row in failed)
    assert sum(float(row["clients/failed"]) for row in rows(trainer.run_folder / "metrics.csv")) == len(failed)
