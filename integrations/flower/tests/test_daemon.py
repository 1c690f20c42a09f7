"""The daemon's socket, its command, and the ClientApp that Flower starts for each message."""

import os
import socket
import stat
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from lightning_sparsefl.errors import InvalidOption

from lightning_sparsefl_flower import frames
from lightning_sparsefl_flower.client_app import hand_on
from lightning_sparsefl_flower.daemon import serve
from lightning_sparsefl_flower.node_command import main
from lightning_sparsefl_flower.node_records import DiskRecords
from lightning_sparsefl_flower.records import from_records, to_records
from lightning_sparsefl_flower.server import ServerOptions


@pytest.fixture
def path(tmp_path):
    """The socket of a daemon that returns its requests reversed."""
    path = tmp_path / "home" / "node.sock"
    threading.Thread(target=serve, args=(path, lambda request: request[::-1]), daemon=True).start()
    assert frames.ask(path, [b"ready"]) == [b"ready"]  # waits for the daemon
    return path


def test_only_this_user_may_connect(path):
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_daemon_answers_any_number_of_any_bytes(path):
    parts = [b"", os.urandom(3_000_000), b"x"]
    assert frames.ask(path, parts) == parts[::-1]
    assert frames.ask(path, []) == []


def test_a_process_that_breaks_off_does_not_end_the_daemon(path):
    for sent in (b"", b"\xff\xff\xff\xff", struct.pack("<IQ", 1, 2**60), struct.pack("<IQ", 1, 100) + b"half"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(sent)
    assert frames.ask(path, [b"still here"]) == [b"still here"]


def test_a_missing_daemon_is_named(tmp_path):
    with pytest.raises(ConnectionError, match="start `sparsefl-node`"):
        frames.ask(tmp_path / "none.sock", [], patience=0.0)


def test_the_client_app_hands_on_what_the_daemon_says(path):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    message = Message(to_records([b"a", b"b"]), 7, "train")
    message.metadata.__dict__["_message_id"] = "m"
    reply = hand_on(message, SimpleNamespace(node_config={"socket": str(path)}))
    assert from_records(reply.content) == [b"b", b"a"]
    assert reply.metadata.reply_to_message_id == "m"


def test_the_client_app_is_light():
    """It starts for each message, so it must not wait for torch."""
    loaded = "[name for name in ('torch', 'lightning') if name in sys.modules]"
    code = f"import sys, lightning_sparsefl_flower.client_app; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "records",
    [
        RecordDict({}),
        RecordDict({"parts": ArrayRecord({"1": Array("uint8", (1,), "lightning-sparsefl/1", b"x")})}),
        RecordDict({"parts": ArrayRecord({"00000": Array("uint8", (1,), "numpy.ndarray", b"x")})}),
    ],
)
def test_other_records_are_refused(records):
    with pytest.raises(ValueError, match="The message has"):
        from_records(records)


# ---- records on disk


def test_versions_that_a_server_may_ask_for_are_kept(tmp_path):
    records = DiskRecords(tmp_path, history=2)
    records.enter("run")
    for version in range(1, 7):
        records.put(3, {"value": version}, version, keep=(version - 1, 1))
    kept = {version for version in range(1, 9) if records.get(3, version) is not None}
    assert kept == {1, 4, 5, 6}  # pinned, and the last rounds
    assert records.get(3, 5) == {"value": 5}
    records.put(3, {"value": 50}, 5, keep=(4, 1))  # the server went back
    assert {version for version in range(1, 9) if records.get(3, version) is not None} == {1, 4, 5}
    assert records.get(3, 5) == {"value": 50}
    records.enter("another run")
    assert records.get(3, 5) is None


def test_a_version_outlives_rounds_without_the_client(tmp_path):
    records = DiskRecords(tmp_path, history=2)
    records.enter("run")
    records.put(0, {}, 2, keep=(1,))
    records.put(0, {}, 40, keep=(39,))
    assert records.get(0, 2) is not None  # what a checkpoint of round 39 names


# ---- options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clients", "0,6"], "`--clients` names the client 6; expected numbers below 6"),
        (["--clients", "0", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_a_wrong_option_ends_the_command_with_a_sentence(deploy, tmp_path, capsys, arguments, said):
    config = deploy().config
    given = ["--config", str(config), "--home", str(tmp_path / "home"), *arguments]
    try:
        code = main(given)
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("clients", ["", "0,0", "a", "-1", "1;2"])
def test_clients_are_different_numbers(capsys, tmp_path, clients):
    with pytest.raises(SystemExit, match="2"):
        main(["--config", "run.yaml", "--home", str(tmp_path), f"--clients={clients}"])
    assert "expected different numbers from 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": "soon"}, "`timeout` is 'soon'; expected a value of type float"),
        ({"max-examples": 0}, "max-examples"),
        ({"holdout": 1}, "`holdout` is 1; expected a value of type bool"),
        ({"wait": 3}, "`wait` is no option of a run"),
    ],
)
def test_a_wrong_option_of_a_run_is_named(options, said):
    with pytest.raises(InvalidOption, match=said):
        ServerOptions.of({"config": "run.yaml", **options})


def test_options_of_a_run_have_the_names_of_the_app():
    assert ServerOptions.of({"config": "a", "ckpt-path": "last", "timeout": 3}).ckpt_path == "last"
