"""Help texts: short, without internal classes, and with the classes to choose from."""

import argparse
import re
import sys

import pytest

import lightning_sparsefl.algorithms
import lightning_sparsefl.callbacks
from lightning_sparsefl import FedAvg
from lightning_sparsefl.cli import SparseFLCLI
from lightning_sparsefl.cli.plain_parser import program_parser
from lightning_sparsefl.cli.program import parse


@pytest.fixture(scope="module", params=["fit", "replay"])
def subcommand(request):
    return request.param


def test_the_help_of_a_subcommand_names_no_internals(subcommand, sparsefl):
    Odd = type("Odd", (FedAvg,), {"__module__": "<run_path>"})  # as of a script that was run by its path
    code, out, err = sparsefl(subcommand, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: sparsefl {subcommand} [--config FILE] [options]\n")
    for internal in (
        "<class",
        "ARG:",
        "ENV:",
        "SUPPRESS",
        "CheckDeadline",
        "OutputHook",
        "SaveConfig",
        "LearningRateFinder",
    ):
        assert internal not in out
    assert "known subclasses" not in out
    assert Odd.__name__ not in out.split()
    assert "ExponentialRoundLR" in out
    words = out.split()
    for name in ("--trainer.max_rounds", "--federation.capacities", "--ckpt_path", "--quiet"):
        assert name in words
    for name in (
        *lightning_sparsefl.callbacks.__all__,
        *lightning_sparsefl.algorithms.__all__,
        "ModelCheckpoint,",
        "SGD,",
    ):
        assert any(word.startswith(name.rstrip(",")) for word in words), name
    assert f"SPARSEFL_{subcommand.upper()}__TRAINER__MAX_ROUNDS" in out


def test_the_variable_of_a_class_in_the_help_sets_its_options(sparsefl, monkeypatch):
    out = " ".join(sparsefl("fit", "--help")[1].split())
    name, value = re.search(r"set with the class: (\w+)='(.*?)'\. A variable", out).groups()
    monkeypatch.setenv(name, value)
    run = parse(["--model=MLP", "--data=FederatedDigits", "--data.partition=IID", "--trainer.logger=false"])
    assert run.trainer.options.algorithm.density == 0.3  # a file takes precedence over the environment


def test_the_help_of_a_group_lists_its_classes(sparsefl):
    code, out, _ = sparsefl("fit", "--algorithm.help")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert names == sorted(lightning_sparsefl.algorithms.__all__)
    assert re.search(r"\n  FedProx +FedAvg with a proximal term in the loss of the clients\.\n", out)
    assert "  LeNet5 " in sparsefl("fit", "--model.help")[1]
    assert "  FederatedDigits " in sparsefl("fit", "--data.help")[1]


def test_the_help_of_a_class_lists_its_options(sparsefl):
    code, out, _ = sparsefl("fit", "--algorithm.help", "FedProx")
    assert code == 0
    assert "usage" not in out
    assert "--algorithm.mu MU" in out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of classes of NumPy that jsonargparse looks at
def test_the_help_of_data_lists_no_library_class_by_class(sparsefl):
    code, out, err = sparsefl("fit", "--data.help=FederatedDataset")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "ConcatDataset, Subset, " in text
    assert ", those of torchvision" in text
    assert "DataPipe" not in text
    assert "CIFAR100" not in text
    assert re.search(r"Callable\[\[Any\], Any\], null\], default: null\) --data.test_labels.help", text)


def test_the_help_of_the_program(sparsefl):
    code, out, _ = sparsefl("--help")
    assert code == 0
    assert "sparse and personalised federated learning" in out.replace("\n", " ")
    assert all(f"\n    {name} " in out for name in ("fit", "validate", "test", "profile", "replay", "export"))


def test_the_help_of_the_program_has_all_that_the_parser_has(monkeypatch):
    parsers = []
    monkeypatch.setattr(SparseFLCLI, "parse_arguments", lambda _, parser, args: parsers.append(parser) or sys.exit())
    with pytest.raises(SystemExit):
        parse([])
    parsers.append(program_parser())
    options, subcommands = zip(*map(described, parsers), strict=True)
    assert options[0] == options[1]
    assert subcommands[0] == subcommands[1]


def described(parser):
    """The options of a parser, and its subcommands with their help."""
    options = {option for action in parser._actions for option in action.option_strings}
    (subcommands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return options, {action.dest: action.help for action in subcommands._choices_actions}
