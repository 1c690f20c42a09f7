"""A deployment on one machine: a SuperLink, SuperNodes and daemons as processes, with TLS and node authentication."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_sparsefl_flower.credentials import write_node_key, write_tls

APP = Path(__file__).resolve().parents[1]
"""Folder of the Flower app."""
_CONNECTION = "trial"
_PATIENCE = 300.0
"""Seconds to wait for a process to get ready."""
_LOOK = 0.5
_FAREWELL = 10.0
"""Seconds that a process has to end."""
_ACCEPTED = 20.0
"""Seconds after which a SuperNode that runs has been accepted."""


class DidNotStart(RuntimeError):
    """A process of the deployment has ended, or is not ready in time."""


class Localhost:
    """Processes of a deployment, all of which end with it.

    Args:
        folder: Empty folder for keys, logs, records and run folders; its path must be short, since that of a Unix
            socket has about 100 characters at most.
        config: YAML of the run.
        homes: Clients of each node.
        secure_sum: Policy of secure sums, of nodes and server; empty = updates are sent one by one.
    """

    def __init__(self, folder: Path, config: Path, homes: Sequence[Sequence[int]], secure_sum: str = "") -> None:
        self.folder, self.config, self.homes, self.secure_sum = folder, config, homes, secure_sum
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port, self._runtime_ports = _free_port(), [_free_port() for _ in homes]
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(APP), os.environ.get("PYTHONPATH", "")])),
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def __enter__(self) -> Localhost:
        try:
            self._write_keys()
            self.start_link()
            for place in range(len(self.homes)):
                self._flwr("supernode", "register", str(self._key(place)) + ".pub", _CONNECTION)
            for place in range(len(self.homes)):
                self.start_daemon(place)
                self.start_node(place)
            for place in range(len(self.homes)):
                self._wait(f"daemon-{place}", self.socket(place).exists)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in list(self.processes):
            self.end(name)

    # ---- processes

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        keys = self.folder / "keys"
        self._start(
            "superlink",
            [
                *("flower-superlink", "--host", "127.0.0.1", "--port", str(self._port), "--enable-supernode-auth"),
                *("--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem")),
                *("--ssl-keyfile", str(keys / "server.key"), "--disable-runtime-dependency-installation"),
            ],
        )
        self._wait("superlink", lambda: _listens(self._port))

    def start_node(self, place: int) -> None:
        """Start a SuperNode.

        Args:
            place: Number of the node.
        """
        self._start(
            f"supernode-{place}",
            [
                *("flower-supernode", "--superlink", f"127.0.0.1:{self._port}"),
                *("--root-certificates", str(self.folder / "keys" / "ca.crt")),
                *("--auth-supernode-private-key", str(self._key(place)), "--port", str(self._runtime_ports[place])),
                *("--node-config", f'socket="{self.socket(place)}"'),
            ],
        )

    def restart_node(self, place: int) -> None:
        """Start a SuperNode that was killed; the SuperLink refuses it until it has missed the old one's heartbeats.

        Args:
            place: Number of the node.
        """
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            self.start_node(place)
            try:
                self.processes[f"supernode-{place}"].wait(_ACCEPTED)
            except subprocess.TimeoutExpired:
                return
            self.end(f"supernode-{place}")
        raise DidNotStart(f"supernode-{place} is refused: {self.log(f'supernode-{place}')[-500:]}")

    def start_daemon(self, place: int, config: Path | None = None) -> None:
        """Start a node's daemon.

        Args:
            place: Number of the node.
            config: YAML of the daemon. Default: that of the run.
        """
        self.socket(place).unlink(missing_ok=True)
        clients = ",".join(map(str, self.homes[place]))
        self._start(
            f"daemon-{place}",
            [
                *(sys.executable, "-m", "lightning_sparsefl_flower.node_command", "--config"),
                *(str(config or self.config), "--clients", clients, "--home", str(self.home(place))),
                *(self._signed_sums(place) if self.secure_sum else ()),
            ],
        )

    def _signed_sums(self, place: int) -> list[str]:
        """Return a daemon's options of secure sums, and write the list of all nodes' keys."""
        signers = self.folder / "keys" / "signers"
        keys = [self._key(node).with_name(f"{self._key(node).name}.pub").read_text() for node in range(len(self.homes))]
        lines = [f"{','.join(map(str, own))} {key}\n" for own, key in zip(self.homes, keys, strict=True)]
        signers.write_text("".join(lines))
        return ["--secure-sum", self.secure_sum, "--key", str(self._key(place)), "--signers", str(signers)]

    def home(self, place: int) -> Path:
        """Return the folder of a node's daemon."""
        return self.folder / f"node-{place}"

    def socket(self, place: int) -> Path:
        """Return the path of a daemon's socket."""
        return self.home(place) / "node.sock"

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a process and its children; with SIGTERM, patiently at first.

        Args:
            name: Name of the process.
            number: Signal to send.
        """
        process = self.processes.pop(name, None)
        if process is None:
            return
        below = descendants(process.pid)  # a SuperLink starts its ServerApps in groups of their own
        for signalled in (number, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signalled)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_FAREWELL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, command: Sequence[str]) -> None:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,  # so that its children end with it
            )

    def _wait(self, name: str, ready: Any) -> None:
        until = time.monotonic() + _PATIENCE
        while not ready():
            code = self.processes[name].poll()
            if code is not None or time.monotonic() > until:
                said = self.log(name).strip().splitlines()[-8:]
                how = "is not ready" if code is None else f"has ended with the exit code {code}"
                raise DidNotStart(f"{name} {how}: " + "\n".join(said))
            time.sleep(_LOOK)

    # ---- runs

    def run(self, **options: Any) -> dict[str, Any]:
        """Submit a run, and wait for its end.

        Args:
            **options: Options of the run.

        Returns:
            What Flower says about the run: `status` and `status-details`, among others.
        """
        self.submit(**options)
        return self.wait_for_run()

    def submit(self, **options: Any) -> None:
        """Submit a run, and follow its log until it ends.

        Args:
            **options: Options of the run.
        """
        given = {"config": str(self.config), "root": str(self.folder / "deployed"), "secure_sum": self.secure_sum}
        given |= options
        text = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in given.items())
        self._start("run", ["flwr", "run", str(APP), _CONNECTION, "--stream", "--run-config", text])

    def wait_for_run(self) -> dict[str, Any]:
        """Wait until the submitted run has ended; see :meth:`run`."""
        self.processes["run"].wait()
        self.end("run")
        number = re.findall(r"Successfully started run (\d+)", self.log("run"))
        if not number:
            raise DidNotStart(f"`flwr run` failed: {self.log('run')[-500:]}")
        listed = self._flwr("list", _CONNECTION, "--run-id", number[-1], "--format", "json")
        (run,) = json.loads(listed)["runs"]
        return dict(run)

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            ["flwr", *arguments], env=self._environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DidNotStart(f"`flwr {' '.join(arguments[:2])}` failed: {(done.stdout + done.stderr)[-500:]}")
        return done.stdout

    # ---- keys

    def _write_keys(self) -> None:
        keys, flwr = self.folder / "keys", self.folder / "flwr"
        for each in (keys, flwr):
            each.mkdir(mode=0o700)
        write_tls(keys)
        for place in range(len(self.homes)):
            write_node_key(self._key(place))
        lines = ["[superlink]", f'default = "{_CONNECTION}"', "", f"[superlink.{_CONNECTION}]"]
        lines += [f'address = "127.0.0.1:{self._port}"', f'root-certificates = "{keys / "ca.crt"}"', ""]
        (flwr / "config.toml").write_text("\n".join(lines))

    def _key(self, place: int) -> Path:
        return self.folder / "keys" / f"node-{place}"


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started.

    Args:
        pid: Identifier of the process.
    """
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, level = [], [pid]
    while level := [child for child, parent in parents.items() if parent in level]:
        found += level
    return found


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        trial.settimeout(_LOOK)
        return trial.connect_ex(("127.0.0.1", port)) == 0
