"""Several ranks give the bytes of one; other ways of starting them: test_ranks.py."""

from helpers.algorithms import every_variant, rows


@every_variant
def test_several_ranks_give_the_bytes_of_one(algorithm, federation, last):
    one = federation(algorithm, folder="one")
    for devices, placement, store in ((2, "static", "ram"), (3, "dynamic", "disk")):
        options = {"placement": placement, "store": store}
        run = federation(algorithm, devices=devices, folder=placement, federation=options)
        assert last(run) == last(one)
        assert run.summary == one.summary
        for table in ("metrics.csv", "clients.csv"):
            assert rows(run.run_folder / table) == rows(one.run_folder / table)
