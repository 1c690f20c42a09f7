"""Methods and options that are refused at the start, and the table of them in docs/security.md."""

import re
from pathlib import Path

import pytest
from lightning_sparsefl import FedAvg, FedSpa, algorithms
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import Federation, Privacy, TrimmedMean
from lightning_sparsefl.federated.sampling.refl import REFL

from lightning_sparsefl_flower.secure_sum.obstacles import method_obstacle, require_summable
from lightning_sparsefl_flower.secure_sum.policy import Policy

SECURITY = Path(__file__).parents[4] / "docs" / "security.md"
EXPORTED = sorted(algorithms.__all__)


def options(**changed):
    return Federation(clients_per_round=4, **changed)


def test_the_table_lists_what_the_code_says():
    text = SECURITY.read_text().split("<!-- secure sums: methods -->")[1]
    listed = {name for row in re.findall(r"^\| [^|]+ \| ([^|]*) \|$", text, re.MULTILINE) for name in row.split(", ")}
    refused = {name for name in EXPORTED if method_obstacle(getattr(algorithms, name)())}
    assert listed - {"methods", "---"} == refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reducer": TrimmedMean()}, "federation.reducer. is TrimmedMean"),
        ({"clip_update": 1.0}, "federation.clip_update. lets the server check the norm"),
        (
            {"clip_update": 1.0, "privacy": Privacy(noise_multiplier=1.0, delta=1e-5)},
            "federation.privacy. needs the server to check the norm",
        ),
        ({"sampler": REFL()}, "federation.sampler. is REFL.* merges late ones"),
        ({"devices": Devices()}, "federation.devices. simulates times"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_options_that_need_single_updates_are_refused(changed, message):
    with pytest.raises(InvalidOption, match=rf"secure_sum. hides single updates, but .{message}"):
        require_summable(FedAvg(), options(**changed), Policy())


def test_small_cohorts_are_refused():
    with pytest.raises(InvalidOption, match=r"clients_per_round. is 4; expected at least 5"):
        require_summable(FedAvg(), options(), Policy(min_clients=5))


def test_a_variant_without_uploads_of_its_own_is_accepted():
    require_summable(FedSpa(search="static"), options(), Policy())


@pytest.mark.parametrize("text", ["", "0.5", "0.5,3", "a,3,2", "0.5,3,2,1", "0.4,3,2", "0.5,1,1", "0.5,3,4"])
def test_a_wrong_policy_is_refused_by_name(text):
    with pytest.raises(InvalidOption, match=r"secure[-_]sum.* is "):
        Policy.read(text)
