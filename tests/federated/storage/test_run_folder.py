from lightning_sparsefl.federated.storage.run_folder import RunFolder, Table, last_run, new_version


def test_new_columns_leave_old_rows_empty(tmp_path):
    table = Table(tmp_path / "t.csv")
    table.append([{"round": 0, "a": 1}])
    table.append([{"round": 1, "a": 2, "b": 3}])
    assert table.read() == [{"round": "0", "a": "1", "b": ""}, {"round": "1", "a": "2", "b": "3"}]


def test_cut_back_drops_what_was_not_committed_and_appending_goes_on(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for number in range(4):
        folder.metrics.append([{"round": number, "x": number}])
    again = RunFolder(tmp_path / "run")
    again.cut_back(2)
    again.metrics.append([{"round": 2, "x": 20}])
    assert [(row["round"], row["x"]) for row in again.metrics.read()] == [("0", "0"), ("1", "1"), ("2", "20")]


def test_cut_back_drops_a_torn_row(tmp_path):
    """A part of round 12 is no round 1."""
    table = Table(tmp_path / "t.csv")
    table.append([{"round": number, "x": number} for number in (0, 1, 2)])
    table.path.write_text(table.path.read_text() + "1")
    table.cut_back(2)
    assert [row["round"] for row in table.read()] == ["0", "1"]
    table.cut_back(0)
    assert not table.path.exists()


def test_what_a_killed_process_half_wrote_is_deleted(tmp_path):
    folder = RunFolder(tmp_path)
    for path in (folder.path / ".metrics.csv.7.tmp", folder.checkpoints / "clients" / ".round-000001.pt.7.tmp"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    folder.cut_back(1)
    assert not list(tmp_path.rglob(".*.tmp"))


def test_versions_count_up_and_the_last_run_is_the_newest(tmp_path):
    for version in (0, 9, 10):
        checkpoints = tmp_path / "FedAvg" / f"version_{version}" / "checkpoints"
        checkpoints.mkdir(parents=True)
        if version != 10:
            (checkpoints / "last.ckpt").touch()
    assert new_version(tmp_path / "FedAvg").name == "version_11"
    assert new_version(tmp_path / "FedAvg").name == "version_12"
    assert last_run(tmp_path, "FedAvg").name == "version_9"
    assert last_run(tmp_path, "FedSpa") is None
