"""What a node or a server sends that is not what was asked: refused by name, logged, and nothing merged."""

import json
import random

import pytest
import torch
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.encoding import encode_answer, order_header
from lightning_sparsefl.federated.exchange.orders import Answer
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec

from helpers.deployment import Deployment, configuration
from lightning_sparsefl_flower.comparison import compare
from lightning_sparsefl_flower.daemon import Daemon
from lightning_sparsefl_flower.hello import Hello, WrongHello
from lightning_sparsefl_flower.replies import Refused, answered, opened

ONE_ROUND = {"trainer": {"max_rounds": 1}, "federation": {"on_client_error": "skip", "clients_per_round": 6}}


@pytest.fixture
def deployment(deploy):
    return deploy(**ONE_ROUND)


# ---- what a node says of itself


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("hidden:\n    - 16", "hidden:\n    - 17", "its model schema is"),
        ("batch_size: 16", "batch_size: 8", "its data format is"),
        ("num_train: 240", "num_train: 200", None),  # sizes are the node's own
        ("max_epochs: 1", "max_epochs: 2", "its option trainer/max_epochs is '2', and the server's is '1'"),
        ("seed_everything: 42", "seed_everything: 43", "its first weights is"),
    ],
)
def test_a_node_with_another_configuration_is_refused(deployment, tmp_path, old, new, named):
    text = deployment.config.read_text()
    assert old in text
    (tmp_path / "other.yaml").write_text(text.replace(old, new))
    deployment.daemons[1] = deployment.daemon(1, tmp_path / "other.yaml")
    if named is None:
        assert deployment.fit().is_dir()
        return
    with pytest.raises(InvalidOption, match=f"No node has the clients 1, 4 .*{named}"):
        deployment.fit(timeout=0.3)


@pytest.mark.parametrize("name", ["version of torch", "version of lightning-sparsefl", "local engine"])
def test_a_node_with_another_version_is_refused(deployment, name):
    daemon = deployment.daemons[2]
    facts = {**daemon.hello.facts, name: "0.0"}
    deployment.daemons[2] = Daemon(daemon.node, daemon.records, daemon.hello.sizes, facts)
    with pytest.raises(InvalidOption, match=f"its {name} is '0.0', and the server's is"):
        deployment.fit(timeout=0.3)


def test_a_node_that_was_restarted_with_another_configuration_is_refused(deploy, caplog):
    deployment = deploy(trainer={"max_rounds": 2}, federation=ONE_ROUND["federation"])
    other = deployment.config.with_name("other.yaml")
    other.write_text(deployment.config.read_text().replace("max_epochs: 1", "max_epochs: 2"))
    answer = deployment.daemons[0].answer

    def once(request):
        if request[0] == b"orders":
            deployment.daemons[0] = deployment.daemon(0, other)
        return answer(request)

    deployment.daemons[0].answer = once
    table = rows(deployment.fit() / "metrics.csv")
    assert [float(row["clients/failed"]) for row in table] == [0, 2]
    assert "its node refused the order: this node has other facts than at its hello" in caplog.text


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"sizes": {"9": 10}, "facts": {}}, "claims the client '9'; expected a number below 6"),
        ({"sizes": {"-1": 10}, "facts": {}}, "claims the client '-1'"),
        ({"sizes": {"9" * 5000: 10}, "facts": {}}, "claims the client '99999999999999999999'"),
        ({"sizes": {"\u0663": 10}, "facts": {}}, "claims the client"),
        ({"sizes": {"03": 10}, "facts": {}}, "claims the client '03'"),
        ({"sizes": {"1": 10}, "facts": {"\ud800": "x"}}, "its hello is not one"),
        ({"sizes": {"1": 10**9}, "facts": {}}, "client 1 states 1000000000 training samples; expected at most 1000"),
        ({"sizes": {"1": -1}, "facts": {}}, "client 1 states -1 training samples"),
        ({"sizes": {"1": True}, "facts": {}}, "its hello is not one"),
        ({"sizes": {"1": 1.5}, "facts": {}}, "its hello is not one"),
        ({"sizes": [], "facts": {}}, "its hello is not one"),
        ({"sizes": {}, "facts": {"torch": 2}}, "its hello is not one"),
        ({"sizes": {}}, "its hello is not one"),
        (b"{", "its hello is not one"),
        (b"[" * 100_000, "its hello is not one"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_wrong_hello_is_refused(content, named):
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(WrongHello, match=named):
        Hello.decode(payload, num_clients=6, most_examples=1000)


@pytest.mark.parametrize("content", [{"sizes": {"9" * 5000: 1}, "facts": {}}, {"sizes": {}, "facts": {"\ud800": "x"}}])
def test_a_hello_that_cannot_be_read_does_not_end_the_run(deployment, content, capsys):
    stranger = deployment.grid.add(lambda request: [json.dumps(content).encode()])
    assert deployment.fit().is_dir()
    assert f"Node {stranger} is refused: it" in capsys.readouterr().out


def test_facts_that_only_one_side_has_are_refused():
    with pytest.raises(WrongHello, match="its torch is 'nothing', and the server's is '2'"):
        Hello({}, {}).require_facts({"torch": "2"})
    with pytest.raises(WrongHello, match="its more is '1', and the server's is 'nothing'"):
        Hello({}, {"more": "1"}).require_facts({})


# ---- a client belongs to a key


def test_a_client_is_bound_to_the_key_that_first_claims_it(deployment, tmp_path, capsys):
    thief = deployment.grid.add(deployment.daemons[0].answer, key=b"another key")
    assert thief > max(deployment.numbers)
    deployment.fit()
    bound = json.loads((tmp_path / "runs" / "nodes.json").read_text())
    assert sorted(bound) == list("012345")
    assert bound["0"] == bound["3"] != bound["1"]
    assert f"Node {thief} is refused: its key" in capsys.readouterr().out
    for number in deployment.numbers:  # the same nodes under other keys, in a later run
        deployment.grid.nodes[number] = (b"new key", deployment.grid.nodes[number][1])
    with pytest.raises(InvalidOption, match="belongs to another"):
        deployment.fit(timeout=0.3)


def test_a_registry_says_who_may_have_which_client(deployment, tmp_path):
    deployment.fit()
    registry = tmp_path / "registry.json"
    bound = json.loads((tmp_path / "runs" / "nodes.json").read_text())
    registry.write_text(json.dumps(bound))
    assert deployment.fit(registry=str(registry)).is_dir()
    registry.write_text(json.dumps({client: key for client, key in bound.items() if client != "4"}))
    with pytest.raises(InvalidOption, match="No node has the clients 4 after"):
        deployment.fit(registry=str(registry), timeout=0.3)
    assert "4" not in json.loads(registry.read_text())  # nothing is bound in a registry


@pytest.mark.parametrize("content", [None, "[", "[]", '{"a": "b"}', '{"1": 2}'])
def test_a_wrong_registry_is_refused(deployment, tmp_path, content):
    registry = tmp_path / "registry.json"
    if content is not None:
        registry.write_text(content)
    with pytest.raises(InvalidOption, match="registry"):
        deployment.fit(registry=str(registry), timeout=0.3)


# ---- what a server sends


def order_of(deployment):
    """An encoded order of training for client 0 or 3, as the server sent it."""
    deployment.fit()
    kind, _, request = next(r for r in deployment.grid.requests if r[0] == "train" and r[1] == deployment.numbers[0])
    assert kind == "train"
    return request


def with_header(order, **changed):
    header, body = order_header(order)
    text = json.dumps({**header, **changed}).encode()
    return len(text).to_bytes(4, "little") + text + body


def test_a_node_refuses_orders_that_are_none_of_its_own(deployment):
    kind, agreed, order, *_ = order_of(deployment)
    daemon = deployment.daemons[0]
    for wrong, named in {
        with_header(order, client=1): "client 1 is not on this node",
        with_header(order, client=5): "client 5 is not on this node",
        with_header(order, client=-1): "the `client` -1; expected a whole number",
        with_header(order, task="steal"): "the `task` 'steal'",
        with_header(order, round="../.."): "the `round`",
        with_header(order, keep=3): "the `keep` 3; expected a list",
        with_header(order, run="\ud800"): "the `run`",
        with_header(order, more=1): "The order has the names",
        order[:-7]: "The payload ends at byte",
        b"": "The payload of 0 bytes",
    }.items():
        (reply,) = daemon.answer([kind, agreed, wrong])
        with pytest.raises(Refused, match=named):
            opened(reply)
    (reply,) = daemon.answer([kind, b"another agreement", order])
    with pytest.raises(Refused, match="this node has other facts"):
        opened(reply)
    for request in ([], [b"shutdown"], [kind]):
        (reply,) = daemon.answer(request)
        with pytest.raises(Refused, match="unknown kind"):
            opened(reply)


def test_a_run_names_no_folder(deployment, tmp_path):
    kind, agreed, order, *_ = order_of(deployment)
    before = set(tmp_path.parent.rglob("*.pt"))
    deployment.daemons[0].answer([kind, agreed, with_header(order, run="../../../elsewhere")])
    made = set(tmp_path.parent.rglob("*.pt")) - before
    assert all(path.is_relative_to(tmp_path / "node-0" / "records") for path in made)


def test_no_bytes_end_the_daemon(deployment):
    kind, agreed, order, *_ = order_of(deployment)
    rng, daemon = random.Random(0), deployment.daemons[0]
    header_end = 4 + int.from_bytes(order[:4], "little")
    for _ in range(60):
        changed = bytearray(order)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(header_end + 60)] = rng.randrange(256)
        replies = daemon.answer([kind, agreed, bytes(changed[: rng.randint(0, len(changed))])])
        assert len(replies) == 1
        assert replies[0][:1] in (b"A", b"R")


def test_an_error_that_nobody_expects_is_a_refusal(deployment, monkeypatch):
    kind, agreed, order, *_ = order_of(deployment)
    daemon = deployment.daemons[0]
    monkeypatch.setattr(daemon.records, "enter", lambda run: 1 / 0)
    (reply,) = daemon.answer([kind, agreed, order])
    assert reply == b"RZeroDivisionError: division by zero"


# ---- what a node answers


def replaced(deployment, change):
    """Let the first node's answers to orders of training pass through a function, with the order's header."""
    answer = deployment.daemons[0].answer

    def changed(request):
        replies = answer(request)
        if request[0] != b"orders":
            return replies
        headers = [order_header(order)[0] for order in request[2:]]
        if headers[0]["task"] != "train":
            return replies
        return [change(header, reply) for header, reply in zip(headers, replies, strict=True)]

    deployment.daemons[0].answer = changed


def header_changed(**changed):
    def change(_, reply):
        end = 4 + int.from_bytes(reply[1:5], "little")
        text = json.dumps({**json.loads(reply[5 : 1 + end]), **changed}).encode()
        return b"A" + len(text).to_bytes(4, "little") + text + reply[1 + end :]

    return change


def update_changed(deployment, **changed):
    node = deployment.daemons[0].node
    message = Message(weights=node.initial)

    def change(header, _):
        values = {"weights": dict(node.initial), "weight": header["facts"]["num_examples"], **changed}
        update = Update(**values)
        codec = Codec(node.initial)
        asked = {name: header[name] for name in ("run", "client", "round", "task")}
        size = codec.update_size(update, message)
        answer = Answer(**asked, num_examples=header["facts"]["num_examples"], update=update, up=size)
        return answered(encode_answer(answer, codec, message))

    return change


def with_half_a_character(deployment):
    change = update_changed(deployment, metrics={"xyz": 0.0})
    return lambda header, reply: change(header, reply).replace(b"xyz", "\ud800".encode(errors="surrogatepass"))


def filled(deployment, value):
    return {name: torch.full_like(tensor, value) for name, tensor in deployment.daemons[0].node.initial.items()}


WRONG = {
    "another run": (lambda d: header_changed(run="f" * 32), "the run 'ffff"),
    "another round": (lambda d: header_changed(round=7), "the round 7, where the order has 0"),
    "another client": (lambda d: header_changed(client=1), "its answer has the client 1"),
    "another task": (lambda d: header_changed(task="score"), "its answer has the task 'score'"),
    "another version": (lambda d: header_changed(version=9), "the version 9; expected 1"),
    "a wrong size": (lambda d: header_changed(up={"total": 1, "masks": 0}), "states an update of the size"),
    "scores that are no numbers": (lambda d: header_changed(scores={"test": {"acc": "1"}}), "the `scores` "),
    "a weight above its samples": (lambda d: update_changed(d, weight=2**62), "has the weight 4611686018427387904"),
    "weights that are not finite": (lambda d: update_changed(d, weights=filled(d, torch.nan)), "not finite"),
    "huge weights": (lambda d: update_changed(d, weights=filled(d, 1e30)), "holds values up to"),
    "too many metrics": (lambda d: update_changed(d, metrics={str(i): 0.0 for i in range(300)}), "300 metrics"),
    "a metric that is no text": (with_half_a_character, "of the payload is not valid UTF-8"),
    "large shared state": (lambda d: update_changed(d, shared={"x": torch.zeros(10**6)}), "`shared` takes more than"),
    "a large extra tree": (lambda d: update_changed(d, extra={"x": {"y": torch.zeros(10**6)}}), "`extra` takes more"),
    "another kind": (lambda d: update_changed(d, kind="difference"), "its `kind` is 'difference', and that of most"),
    "no bytes": (lambda d: lambda header, reply: b"", "its node refused the order: no reason given"),
    "half an answer": (lambda d: lambda header, reply: reply[: len(reply) // 2], "no answer that can be read"),
    "another model": (lambda d: lambda header, reply: reply.replace(b"SFL\x01", b"SFL\x02"), "no answer that can be"),
}


@pytest.fixture(scope="module")
def without_the_first_node(tmp_path_factory):
    """The run folder of a run in which the first node refuses all orders of training."""
    folder = tmp_path_factory.mktemp("refusing")
    deployment = Deployment(configuration(folder / "run.yaml", {"class_path": "FedAvg"}, **ONE_ROUND), folder)
    replaced(deployment, lambda header, reply: b"R")
    return deployment.fit()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_refused_by_name_and_nothing_is_merged(deployment, caplog, without_the_first_node, wrong):
    make, named = WRONG[wrong]
    replaced(deployment, make(deployment))
    there = deployment.fit()
    assert "Client 0 is left out of round 0" in caplog.text
    assert named in caplog.text
    differing = {part for part, where in compare(without_the_first_node, there).items() if where}
    assert differing <= {"clients.csv"}  # which has the reason


def test_an_answer_without_the_scores_that_were_asked_for_is_refused_by_name(deploy, caplog):
    federation = {**ONE_ROUND["federation"], "eval_after_training": True}
    deployment = deploy(trainer=ONE_ROUND["trainer"], federation=federation)
    replaced(deployment, header_changed(scores={}))
    table = rows(deployment.fit() / "metrics.csv")
    assert "Client 0 is left out of round 0: its answer has no scores of ['test'], where the order" in caplog.text
    assert [row["clients/failed"] for row in table] == ["2"]


@pytest.mark.parametrize("carried", ["extra", "shared"])
def test_an_answer_that_noise_would_not_hide_is_refused_by_name(deploy, tmp_path, caplog, carried):
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "key_file": str(tmp_path / "key")}
    federation = {**ONE_ROUND["federation"], "clip_update": 1.0, "privacy": privacy}
    deployment = deploy(trainer=ONE_ROUND["trainer"], federation=federation)
    still = {"kind": "difference", "weights": filled(deployment, 0.0)}
    replaced(deployment, update_changed(deployment, **still, **{carried: {"x": {"y": torch.ones(2)}}}))
    deployment.fit()
    assert f"Client 0 is left out of round 0: An update has `{carried}`, to which `federation.pri" in caplog.text


def test_replies_of_another_number_are_refused(deployment, caplog):
    answer = deployment.daemons[0].answer
    deployment.daemons[0].answer = lambda request: answer(request) + ([b"A"] if request[0] == b"orders" else [])
    deployment.fit()
    assert "Client 3 is left out of round 0: its node sent 3 replies to 2 orders" in caplog.text
