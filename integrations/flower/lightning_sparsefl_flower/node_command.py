"""The command `sparsefl-node`, which a node's operator starts once beside its SuperNode."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning.fabric import Fabric
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_sparsefl.errors import InvalidOption, SparseFLError
from lightning_sparsefl.federated.commands.inputs import check_data, check_module, make_layers
from lightning_sparsefl.federated.commands.node_side import NodeSide
from lightning_sparsefl.federated.distributed.launcher import launch
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.torch_settings import deterministic_algorithms, intra_op_threads
from lightning_sparsefl.federated.storage.folder_lock import FolderLock

from lightning_sparsefl_flower.configuration import Configured, read
from lightning_sparsefl_flower.daemon import Daemon, serve
from lightning_sparsefl_flower.facts import facts_of
from lightning_sparsefl_flower.node_records import DiskRecords
from lightning_sparsefl_flower.secure_sum.key_files import read_signer, read_signers
from lightning_sparsefl_flower.secure_sum.node import SecureNode
from lightning_sparsefl_flower.secure_sum.obstacles import require_summable
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.signing import UNSIGNED, Signing

_EXIT_USAGE, _EXIT_INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments; None for those of the command line.

    Returns:
        Exit code: 2 after an error message, 130 after Ctrl-C.
    """
    asked = _parser().parse_args(arguments)
    sys.path.append(str(Path.cwd()))  # for modules of the user, as `sparsefl` does
    try:
        configured = read(asked.config, ["--trainer.default_root_dir", str(asked.home)])
        signing = _signing(asked.secure_sum, asked.key, asked.signers, asked.clients)
        work = partial(_work, configured, asked.clients, asked.home, asked.secure_sum, signing)
        launch(configured.trainer.fabric, work)
    except (SparseFLError, OSError) as error:
        print(f"sparsefl-node: error: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparsefl-node",
        description="Hold the data and the records of a node's clients, and train them when the server asks.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML file of the run, the same as the server's.")
    parser.add_argument("--clients", required=True, type=_numbers, help="Numbers of this node's clients, such as 0,3.")
    parser.add_argument(
        "--secure-sum",
        type=_policy,
        metavar="T,N,C",
        help="Give updates to secure sums only, with the threshold T, at least N clients in a sum, and at least C "
        "votes on a coordinate, such as 0.67,3,2; the same as the server's.",
    )
    parser.add_argument(
        "--key",
        type=Path,
        help="Private key of this node in OpenSSH's format, with which it signs in secure sums; needs --signers.",
    )
    parser.add_argument(
        "--signers",
        type=Path,
        help="File with a line for each node: the numbers of its clients, such as 0,3, and its public key. Secure sums "
        "of other clients, or with other keys, are refused; needs --key.",
    )
    parser.add_argument(
        "--home",
        required=True,
        type=Path,
        help="Folder of the records and of the socket `node.sock`, which only this user may connect to.",
    )
    return parser


def _policy(text: str) -> Policy:
    try:
        return Policy.read(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r}; expected different numbers from 0 separated by commas")
    return tuple(int(part) for part in parts)


def _signing(policy: Policy | None, key: Path | None, signers: Path | None, clients: Sequence[int]) -> Signing:
    """Return with which keys the node signs and checks; none of them without the options.

    Raises:
        InvalidOption: If an option is missing, a file cannot be read, or the list has not this node's key.
    """
    if key is None and signers is None:
        return UNSIGNED
    if policy is None or key is None or signers is None:
        raise InvalidOption("`--key` and `--signers` are given together, and with `--secure-sum`.")
    signer, verifier = read_signer(key), read_signers(signers)
    for client in clients:
        if not verifier.verifies(client, b"", signer.sign(b"")):
            raise InvalidOption(f"{signers} (`--signers`) does not list {key} (`--key`) for client {client}.")
    return Signing(signer, verifier)


def _work(
    configured: Configured, clients: Sequence[int], home: Path, secure: Policy | None, signing: Signing, fabric: Fabric
) -> None:
    """Set the node up, and answer until the process is ended."""
    home.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(home)
    lock.acquire()  # two daemons would write the same records
    try:
        options = configured.trainer.options
        with intra_op_threads(options.num_threads), deterministic_algorithms(options.deterministic), isolate_rng():
            serve(home / "node.sock", make_daemon(configured, clients, home, fabric, secure, signing).answer)
    finally:
        lock.release()


def make_daemon(
    configured: Configured,
    clients: Sequence[int],
    home: Path,
    fabric: Fabric,
    secure: Policy | None = None,
    signing: Signing = UNSIGNED,
) -> Daemon:
    """Set up the daemon of a node.

    Args:
        configured: Objects of the configuration.
        clients: Numbers of the node's clients.
        home: Folder of the records.
        fabric: Fabric of the process, launched.
        secure: What the node demands of secure sums; None = updates are sent one by one.
        signing: With which keys the node signs and checks in secure sums.

    Raises:
        InvalidOption: If the data has no such clients.
    """
    options, data = configured.trainer.options, configured.data
    missing = [client for client in clients if client >= data.num_clients]
    if missing:
        raise InvalidOption(
            f"`--clients` names the client {missing[0]}; expected numbers below {data.num_clients}, "
            "`data.num_clients` of the configuration."
        )
    check_data(data, options.federation)
    make_layers(configured.module, options.seed)
    check_module(configured.module)
    side = NodeSide(options, Ranks(fabric), configured.module, data, client=clients[0])
    records = DiskRecords(home / "records", 2 * options.federation.checkpoint_every_n_rounds)
    sizes = {client: int(data.num_examples(client)) for client in clients}
    node, facts = side.make_node(records, keep_masks=True), facts_of(side, data, secure)
    if secure is None:
        return Daemon(node, records, sizes, facts)
    require_summable(side.algorithm, side.federation, secure)
    reducer = side.federation.reducer or side.algorithm.reducer()
    return Daemon(node, records, sizes, facts, SecureNode(side.layout, side.codec, reducer, secure, signing))


if __name__ == "__main__":
    sys.exit(main())
