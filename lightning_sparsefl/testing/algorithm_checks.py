"""Promises of a federated method, checked in runs of a small federation."""

from __future__ import annotations

import copy
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule
from torch.nn.modules.dropout import _DropoutNd

from lightning_sparsefl.federated import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.testing.contents import (
    comparable,
    difference,
    last_contents,
    require_equal,
    rows,
    without_masks,
)
from lightning_sparsefl.testing.pipe import forking, piped
from lightning_sparsefl.testing.promises import Difference, promise, require, require_frozen_value
from lightning_sparsefl.testing.small_federation import SmallFederation
from lightning_sparsefl.types import ClientView, Message, ServerState, Update, Weights
from lightning_sparsefl.wire import Codec, load_sparse

_CLIENT_HOOKS = ("callbacks", "train", "trained", "may_vote", "personalize", "finetune", "survey")
"""Hooks that get a message."""
_SERVER_HOOKS = ("download", "download_for", "aggregate", "observe")
"""Hooks that get the server's state in a run."""
_CHARGES = {
    ("paper", "flops"): "flops/paper_total",
    ("analytic", "flops"): "flops/train_total",
    ("wire", "downlink_bytes"): "comm/downlink_bytes_total",
}
"""Estimates of `profile`, and the keys under which a run logs what it is charged."""
_SEED = 987654321
"""Seed whose digits are not in a message by chance."""
_KILLED, _NOT_KILLED = 64, 65
"""Exit codes of a process whose run was killed, and of one whose run came to its end."""
_LONGEST = 60
"""Number of seconds after which a forked process ends; its run takes about one."""


def fresh(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Return a method as a new process makes it, from its options: nothing else survives.

    Args:
        algorithm: Method, which may have been run.
    """
    copied: FederatedAlgorithm = copy.deepcopy(dataclasses.replace(algorithm))  # type: ignore[type-var]
    return copied


@promise
def is_a_frozen_value(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that a method is a frozen dataclass of hyper-parameters, which can be pickled.

    All state of a run is in the server's state and in what is kept about clients, or a run could not be resumed.
    """
    require_frozen_value(algorithm)


@promise
def is_reproducible(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that two runs with one seed end with the same bytes.

    What a method draws comes from ``client.rng`` or :mod:`lightning_sparsefl.seeds`, and nothing from the clock,
    from ``hash()`` or from torch's global generator.
    """
    one, two = (federation(fresh(algorithm), rounds=2, folder=f"run {number}") for number in (1, 2))
    _require_same_run(one, two, "between two runs with one seed")


@promise
def learns(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that a federation learns: personal accuracy on easy data rises by at least 0.2 in five rounds."""
    require_learning(algorithm, federation)


def require_learning(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Raise :class:`Difference` unless personal accuracy rises by at least 0.2 in five rounds.

    Args:
        algorithm: Method to run.
        federation: Federation to run it in.
    """
    untrained = federation(algorithm, verb="validate", folder="untrained").summary["personal/val_acc"]
    trained = federation(algorithm, rounds=5, num_train=600, folder="trained").summary["personal/val_acc"]
    start = min(untrained, 0.4)  # of 4 classes; a method may train before the first round
    require(trained > start + 0.2, f"`personal/val_acc` is {untrained:.3f} before and {trained:.3f} after five rounds")


@promise
def leaves_messages_unchanged(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that client hooks do not change the message that they get, nor the client's memory.

    Within a process the message's tensors are the server's own, so that a change in place would reach other clients.
    Those of the memory are of the client's record, which a client that fails in a round keeps as it was.
    """
    with watched(type(algorithm), _CLIENT_HOOKS, _of_a_client):
        federation(algorithm, rounds=2)


def _of_a_client(message: Message, *arguments: Any, **options: Any) -> Mapping[str, Any]:
    """Return what a client hook gets and must leave as it is, by name."""
    memories = [each.memory for each in (*arguments, *options.values()) if isinstance(each, Client)]
    return {"message": vars(message), "memory": memories}


@promise
def leaves_the_servers_state_unchanged(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that server hooks do not change the state that they get, nor what the server keeps about the client.

    Its tensors are those of messages, and of a checkpoint that may be written at that time.
    """
    with watched(type(algorithm), _SERVER_HOOKS, _of_the_server):
        federation(algorithm, rounds=2)


def _of_the_server(state: ServerState, *arguments: Any, **options: Any) -> Mapping[str, Any]:
    """Return what a server hook gets and must leave as it is, by name."""
    kept = [each.shared for each in (*arguments, *options.values()) if isinstance(each, ClientView)]
    return {"state": vars(state), "view.shared": kept}


@contextmanager
def watched(kind: type, hooks: Sequence[str], contents: Callable[..., Mapping[str, Any]]) -> Iterator[None]:
    """Let hooks raise :class:`Difference` if they change what they get.

    Args:
        kind: Class that has the hooks.
        hooks: Names of the hooks.
        contents: Function of a hook's arguments that returns the values to compare, by name.
    """

    def replaced(hook: str) -> Any:
        original = getattr(kind, hook)

        def compared(self: Any, *arguments: Any, **options: Any) -> Any:
            before = comparable(contents(*arguments, **options))
            answer = original(self, *arguments, **options)
            found = difference(before, comparable(contents(*arguments, **options)))
            if found:
                raise Difference(f"{found}, before and after `{hook}`")
            return answer

        return compared

    with mock.patch.multiple(kind, **{hook: replaced(hook) for hook in hooks}):
        yield


@promise
def is_the_same_on_several_ranks(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that two and three ranks end with the bytes of one, wherever clients are trained and records are kept.

    Server hooks run on every rank with equal input, and clients are trained on any rank: no hook may look at the rank.
    """
    require_equal_ranks(algorithm, federation)


def require_equal_ranks(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Raise :class:`Difference` unless runs on two and three ranks end as the one on a single rank.

    Args:
        algorithm: Method to run.
        federation: Federation to run it in.
    """
    one = federation(algorithm, folder="one")
    for devices, placement, store in ((2, "static", "ram"), (3, "dynamic", "disk")):
        options = {"placement": placement, "store": store}
        several = federation(algorithm, devices=devices, folder=placement, federation=options)
        _require_same_run(one, several, f"between 1 and {devices} ranks")


@promise
def is_the_same_in_both_engines(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that a real Trainer for each client gives the bytes of the fast client loop."""
    runs = (federation(algorithm, rounds=2, folder=e, federation={"local_engine": e}) for e in ("fast", "trainer"))
    one, two = (last_contents(run.run_folder) for run in runs)
    require_equal(one, two, "checkpoint", "between the fast engine and a Trainer")


@promise
def is_the_same_in_stacks(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that clients that train as a stack end where they end one after another, up to rounding in float64.

    In a stack, `train` of one client waits in `client.fit` until those of the others have come there: what it needs
    after the fit belongs into a variable of its own, and not into one that all clients share. Random numbers that it
    draws come from ``client.rng``, since the generators of torch, NumPy and Python are shared as well. Dropout is left
    out, since a stack draws other random numbers.
    """
    one, other = (_in_double(algorithm, federation, engine) for engine in ("fast", "stacked"))
    require_equal(one, other, "", "between clients one after another and stacks of them")


def _in_double(algorithm: FederatedAlgorithm, federation: SmallFederation, engine: str) -> dict[str, Any]:
    """Return what a run in double precision leaves, in a form that is equal up to rounding."""
    torch.manual_seed(0)
    module, options = _without_dropout(federation.module_for(algorithm)), {"local_engine": engine, "stack_size": 4}
    run = federation(
        algorithm, folder=engine, module=module, precision="64-true", federation=options, rounds=2, quiet=True
    )
    content = last_contents(run.run_folder, near=True)
    del content["sparsefl"]["identity"]["training"]["stack size"]
    tables = {name: comparable(rows(run.run_folder / name), near=True) for name in ("metrics.csv", "clients.csv")}
    return {"checkpoint": content, **tables}


def _without_dropout(module: LightningModule) -> LightningModule:
    for child in module.modules():
        if isinstance(child, _DropoutNd):
            child.p = 0.0
    return module


@promise
def is_the_same_when_encoded(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that messages that are encoded give the weights and the sizes of messages that are counted."""
    require_equal_when_encoded(algorithm, federation)


def require_equal_when_encoded(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Raise :class:`Difference` unless messages that are encoded give the bytes of messages that are counted.

    Args:
        algorithm: Method to run.
        federation: Federation to run it in.
    """
    counted = last_contents(federation(algorithm, folder="count").run_folder)
    with _lengths() as lengths:
        encoded = last_contents(federation(algorithm, folder="encode", federation={"wire": "encode"}).run_folder)
    for kind, pairs in lengths.items():
        require(bool(pairs), f"no {kind} was encoded")
        for length, size in pairs:
            require(length == size, f"a {kind} has {length} bytes, and {size} were counted")
    require_equal(without_masks(counted), without_masks(encoded), "checkpoint", "between `wire: count` and `encode`")


@promise
def is_the_same_through_a_pipe(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that a run whose clients are in another process, behind a pipe, ends with the bytes of an ordinary one.

    Client hooks may use the message and the client with its memory, and nothing of the server or of the run's seed.
    """
    alone = {"wire": "encode", "local_engine": "fast"}  # stacks have no place in a pipe
    options: dict[str, Any] = {"federation": alone, "seed": _SEED}
    with piped() as remotes:
        through = federation(algorithm, folder="pipe", **options)
        kept = remotes[-1].ask("records")
        payloads = remotes[-1].bytes
    ordinary = federation(algorithm, folder="ordinary", **options)
    theirs, ours = last_contents(through.run_folder), last_contents(ordinary.run_folder)
    require(theirs["records"].pop("nodes") == {}, "the server's process has records of the clients")
    when = "between an ordinary run and one through a pipe"
    require_equal(ours["records"].pop("nodes"), comparable(kept), "memory", when)
    require_equal(ours, theirs, "checkpoint", when)
    _require_same_tables(ordinary, through, when)
    require(not any(str(_SEED).encode() in payload for _, payload in payloads), "the run's seed travels to clients")


@contextmanager
def _lengths() -> Iterator[Mapping[str, list[tuple[int, int]]]]:
    """Collect, for messages and updates, the length of each that is encoded and the size that is counted."""
    lengths: dict[str, list[tuple[int, int]]] = {"message": [], "update": []}

    def spied(kind: str) -> Any:
        encode = getattr(Codec, f"encode_{kind}")

        def spy(self: Codec, *args: Any) -> Any:
            payload = encode(self, *args)
            lengths[kind].append((len(payload), getattr(self, f"{kind}_size")(*args).total))
            return payload

        return spy

    with mock.patch.multiple(Codec, encode_message=spied("message"), encode_update=spied("update")):
        yield lengths


@promise
def is_the_same_after_a_resume(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that a run that is killed and resumed ends with the bytes of the one that was not.

    Whatever a method remembers is in the server's state, in ``shared`` or in ``memory``, and not in a variable of a
    class or module, which ends with the process. It does not depend on the values that the resumed run's module begins
    with.
    """
    require_resumable(algorithm, federation)


def require_resumable(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Raise :class:`Difference` unless a run that is killed and resumed ends as the one that was not.

    Args:
        algorithm: Method to run.
        federation: Federation to run it in.
    """
    straight = federation(fresh(algorithm), rounds=4, folder="straight")
    calls: list[int] = []
    train = type(algorithm).train

    @functools.wraps(train)  # with its module, by which `local_engine: auto` knows a user's own hook
    def dies_in_the_third_round(self: FederatedAlgorithm, message: Message, client: Any) -> Any:
        calls.append(client.id)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return train(self, message, client)

    def is_killed(folder: str) -> bool:
        with mock.patch.object(type(algorithm), "train", dies_in_the_third_round):
            try:
                federation(fresh(algorithm), rounds=4, folder=folder)
            except KeyboardInterrupt:
                return True
        return False

    folder = "resumed"
    killed = _in_another_process(functools.partial(is_killed, folder)) if federation.accelerator == "cpu" else None
    if killed is None:  # here, where an error has its traceback, and the threads of a method are alive
        folder = "resumed here"
        killed = is_killed(folder)
    require(killed, "`train` was not called for each of the four clients of a round")
    module = _with_other_weights(federation.module_for(algorithm))
    resumed = federation(fresh(algorithm), rounds=4, folder=folder, ckpt_path="last", module=module)
    require(resumed.run_folder.name == "version_0", "the run was not resumed in its own folder")
    _require_same_run(straight, resumed, "between a run and the same one killed and resumed")


def _in_another_process(call: Callable[[], bool]) -> bool | None:
    """Return the result of a call in a forked process, with which its variables end.

    Args:
        call: Function without arguments.

    Returns:
        The result, or None if no process can be forked or it fails, as one does that waits for threads of this one.
    """
    if not hasattr(os, "fork") or multiprocessing.current_process().daemon:
        return None

    def target() -> None:
        signal.alarm(_LONGEST)  # also where this process is killed
        sys.exit(_KILLED if call() else _NOT_KILLED)

    process = multiprocessing.get_context("fork").Process(target=target, daemon=True)
    with forking():
        process.start()
    process.join()
    return {_KILLED: True, _NOT_KILLED: False}.get(process.exitcode or 0)


def _with_other_weights(module: LightningModule) -> LightningModule:
    """Return a module as a process makes it that does not seed it as the process before did."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9).add_(0.01)
    return module


@promise
def leaves_failed_clients_out(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that a client that fails is left out of the merge and reported, and the run goes on."""
    train = type(algorithm).train

    @functools.wraps(train)
    def fails_for_one(self: FederatedAlgorithm, message: Message, client: Any) -> Any:
        if client.id == 1:
            raise ValueError("no luck")
        return train(self, message, client)

    with mock.patch.object(type(algorithm), "train", fails_for_one):
        folder = federation(algorithm, federation={"on_client_error": "skip"}).run_folder
    failed = [row for row in rows(folder / "clients.csv") if row["client"] == "1" and row["failure"]]
    require(bool(failed), "no failure is in clients.csv")
    for row in failed:
        said = (row["trained"], row["failure"])
        require(said == ("0", "ValueError: no luck"), f"clients.csv has `trained, failure` = {said}")
    count = sum(float(row["clients/failed"]) for row in rows(folder / "metrics.csv"))
    require(count == len(failed), f"metrics.csv counts {count:g} failures, and clients.csv has {len(failed)}")


@promise
def exports_what_it_scored(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that an exported model loads into the user's module and scores as in the run."""
    trainer = federation(algorithm, rounds=2)
    scored = {row["client"]: row for row in rows(trainer.run_folder / "clients.csv") if row["round"] == "1"}
    for client in (None, 1) if algorithm.has_global_model else (1,):
        arguments = {"client": client, "check": True}
        exported = federation(algorithm, rounds=2, verb="export", ckpt_path="last", arguments=arguments).summary
        expected = trainer.summary["global/val_acc"] if client is None else float(scored["1"]["personal/val_acc"])
        for name in ("in memory", "ckpt", "safetensors"):
            got = exported.scores[name].get("val_acc")
            require(got == expected, f"`{name}` scores {got}, and the run had {expected}")
        _require_loadable(algorithm, federation, exported)


@promise
def scores_what_clients_trained(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that `trained` returns every parameter that changes in local training.

    Initial weights take the place of missing ones, such as those of a head that the client keeps in its memory, so that
    the scores ``personal_after`` would be those of another model.
    """
    fit, trained, module = Client.fit, type(algorithm).trained, federation.module_for(algorithm)
    changed, returned = set[str](), list[frozenset[str]]()

    def compared(self: Client, weights: Weights, *arguments: Any, **options: Any) -> Any:
        result = fit(self, weights, *arguments, **options)
        before = {**self.initial, **weights}
        changed.update(name for name, weight in before.items() if not torch.equal(weight, result.weights[name]))
        return result

    def recorded(self: FederatedAlgorithm, message: Message, update: Update) -> Any:
        weights = trained(self, message, update)
        returned.append(frozenset(weights))
        return weights

    with mock.patch.object(Client, "fit", compared), mock.patch.object(type(algorithm), "trained", recorded):
        federation(algorithm, rounds=1, module=module, federation={"eval_after_training": True})
    parameters = {name for name, _ in module.named_parameters()}
    missing = sorted((changed & parameters) - frozenset.intersection(*returned))
    require(not missing, f"`trained` leaves out {', '.join(map(repr, missing[:3]))}")


@promise
def profiles_its_costs(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that `profile`, which trains nothing, estimates FLOPs and bytes down within a factor of four.

    Both charge what `costs` says, so that a method that trains a client several times in a round has to override it.
    Masks that follow what is learned make a run cheaper than its estimate, and so do clients of different sizes here.
    Uploads are not compared: noise stands for what is learned, and its bytes may differ by more.
    """
    module = federation.module_for(algorithm)
    before = comparable(module.state_dict())
    estimate = federation(algorithm, verb="profile", module=module, quiet=True).summary.content["run"]
    require_equal(before, comparable(module.state_dict()), "weights", "before and after `profile`")
    with _fits(type(algorithm)) as trained:
        charged = federation(algorithm).summary
    known = type(algorithm).costs is not FederatedAlgorithm.costs
    most = max(len(fits) for _, _, fits in trained)
    require(known or most <= 1, f"`train` fits {most} times, and `costs` charges one fit; override it")
    for (column, name), key in _CHARGES.items():
        got, expected = estimate[column].get(name), charged.get(key)
        require((got is None) == (expected is None), f"`{key}` is known only to one of `profile` and the run")
        fits = not expected or (got is not None and expected / 4 <= got <= 4 * expected)
        require(fits, f"`profile` estimates {got:g} for `{key}`, and the run is charged {expected:g}")


@promise
def trains_with_its_masks_and_callbacks(algorithm: FederatedAlgorithm, federation: SmallFederation) -> None:
    """Check that `train` passes the message's masks, and callbacks if there are some, to `client.fit`.

    A client trains with what it is passed alone: without masks it trains dense, and is charged the FLOPs of the masks
    of the message. A method that overrides `costs` may leave them out, and pass others.
    """
    with _fits(type(algorithm)) as trained:
        federation(algorithm, rounds=2)
    charged_by_masks = type(algorithm).costs is FederatedAlgorithm.costs
    for message, _, fits in trained:
        for held, _ in fits:
            dense = ", ".join(map(repr, sorted(message.masks.keys() - held)[:3])) if charged_by_masks else ""
            require(not dense, f"`train` fits without the message's mask of {dense}; pass it, or override `costs`")
            own = ", ".join(map(repr, sorted(held - message.masks.keys())[:3])) if charged_by_masks else ""
            require(not own, f"`train` fits under a mask of {own} that is not in `Message.masks`; override `costs`")
    declared = sorted({kind.__name__ for _, callbacks, _ in trained for kind in callbacks})
    passes = any(used for *_, fits in trained for _, used in fits)
    require(passes or not declared, f"`train` passes no {', '.join(declared)} of `callbacks` to `client.fit`")


_Fit = tuple[frozenset[str], Sequence[Callback]]
"""Names of the masks and callbacks of one call of `client.fit`."""


@contextmanager
def _fits(kind: type[FederatedAlgorithm]) -> Iterator[list[tuple[Message, set[type], list[_Fit]]]]:
    """Collect, for each call of `train` within the context, its message, classes of `callbacks`, and fits."""
    found: list[tuple[Message, set[type], list[_Fit]]] = []
    train = kind.train

    def noted(self: FederatedAlgorithm, message: Message, client: Client) -> Update:
        fits: list[_Fit] = []
        original = client.fit

        @functools.wraps(original)
        def fit(weights: Weights, masks: Any = None, trainable: Any = None, callbacks: Any = (), **options: Any) -> Any:
            fits.append((frozenset(masks or {}), tuple(callbacks)))
            return original(weights, masks, trainable, callbacks, **options)

        with mock.patch.object(client, "fit", fit):
            update = train(self, message, client)
        found.append((message, {type(each) for each in self.callbacks(message, client)}, fits))
        return update

    with mock.patch.object(kind, "train", noted):
        yield found


def _require_loadable(algorithm: FederatedAlgorithm, federation: SmallFederation, exported: Any) -> None:
    state = torch.load(exported.files["ckpt"], weights_only=True)["state_dict"]
    module = federation.module_for(algorithm)
    changed = state.keys() != module.state_dict().keys()
    noted = any("call `algorithm.adapt(module)`" in note for note in exported.notes)
    require(changed == noted, f"the checkpoint {'has' if changed else 'lacks'} other names than the module")
    if changed:
        algorithm.adapt(module)
    module.load_state_dict(state, strict=True)
    sparse, weights = load_sparse(exported.files["safetensors"]), module.state_dict()
    ours, theirs = comparable(weights), comparable({name: sparse[name] for name in weights})
    require_equal(ours, theirs, "weights", "between .ckpt and .safetensors")


def _require_same_run(one: Any, two: Any, when: str) -> None:
    """Raise :class:`Difference` unless two runs left equal checkpoints, summaries and tables."""
    require_equal(last_contents(one.run_folder), last_contents(two.run_folder), "checkpoint", when)
    _require_same_tables(one, two, when)


def _require_same_tables(one: Any, two: Any, when: str) -> None:
    require_equal(comparable(dict(one.summary)), comparable(dict(two.summary)), "summary", when)
    for table in ("metrics.csv", "clients.csv"):
        require_equal(rows(one.run_folder / table), rows(two.run_folder / table), table, when)
