"""Messages for mistakes on the command line: the option, its value, what was expected, and the most similar name."""

import sys

import pytest

from helpers.command_line import QUICKSTART
from lightning_sparsefl.cli import short_message
from lightning_sparsefl.cli.config_files import checked_config
from lightning_sparsefl.cli.program import parse
from lightning_sparsefl.errors import InvalidOption

MISTAKES = {
    "option of a class": (
        ["--algorithm.densty=0.3"],
        "`algorithm.densty` is not an option of FedSpa; did you mean `density`?",
    ),
    "option in a class in a class": (
        ["--data.partition.alhpa=3"],
        "`data.partition.alhpa` is not an option of Dirichlet; did you mean `alpha`?",
    ),
    "class": (["--algorithm=FedSpaa"], "`algorithm` is 'FedSpaa', which is not a known class; did you mean `FedSpa`?"),
    "class in a class": (
        ["--data.partition=DirichletPartitio"],
        "`data.partition` is 'DirichletPartitio', which is not a known class; did you mean `Dirichlet`?",
    ),
    "class in a class, or none": (["--data.feature_shift=NoiseShif"], "did you mean `NoiseShift`?"),
    "class in a class, like no other": (
        ["--data.partition=Zebra"],
        "expected an import path or one of ByGroup, Dirichlet, IID, Pathological, QuantitySkew.",
    ),
    "option of the last class": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr=x"],
        "`trainer.callbacks.monitr` is not an option of EarlyStopping; did you mean `monitor`?",
    ),
    "number of the last class": (
        ["--trainer.client_callbacks+=GradualPruning", "--trainer.client_callbacks.start=x"],
        "`trainer.client_callbacks.start` is 'x'; expected a number.",
    ),
    "class of another kind": (
        ["--algorithm=EarlyStopping"],
        "`algorithm` is 'EarlyStopping', which is not a subclass of FederatedAlgorithm; expected an import path or one "
        "of APFL, ",
    ),
    "import path of another kind": (
        ["--model=torch.nn.Linear"],
        "`model` is 'torch.nn.Linear', which is not a subclass of LightningModule; expected an import path or one of ",
    ),
    "class of another kind in a class": (
        ["--data.partition=lightning_sparsefl.FedAvg"],
        "`data.partition` is 'lightning_sparsefl.FedAvg', which is not a subclass of Partition; expected an import "
        "path or one of ByGroup, ",
    ),
    "class of another kind in a list": (
        ['--trainer.callbacks=[{"class_path": "torch.nn.Linear", "init_args": {"bias": true}}]'],
        "`trainer.callbacks` is 'torch.nn.Linear', which is not a subclass of Callback; expected an import path or ",
    ),
    "class in lower case": (["--model=smallcnn"], "did you mean `SmallCNN`?"),
    "callback": (["--trainer.callbacks+=EarlyStoping"], "did you mean `EarlyStopping`?"),
    "start of a logger": (
        ["--trainer.logger=wandb"],
        "`trainer.logger` is 'wandb', which is not a known class; did you mean `WandbLogger`?",
    ),
    "logger like no other": (
        ["--trainer.logger=zebra"],
        "`trainer.logger` is 'zebra', which is not a known class; expected an import path or one of CSVLogger, ",
    ),
    "optimizer": (["--optimizer=SDG"], "`optimizer` is 'SDG', which is not a known class; did you mean `SGD`?"),
    "number of a scheduler": (
        ["--optimizer=SGD", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=x"],
        "`lr_scheduler.gamma` is 'x'; expected a number.",
    ),
    "value that an optimizer refuses": (
        ["--optimizer=SGD", "--optimizer.lr=-1"],
        "`optimizer` is SGD, which cannot be created (ValueError: Invalid learning rate: -1.0).",
    ),
    "value that a scheduler refuses": (
        ["--optimizer=SGD", "--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=1"],
        "`lr_scheduler` is OneCycleLR, which cannot be created (ValueError: You must define either total_steps OR ",
    ),
    "scheduler without an optimizer": (
        ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"],
        "`lr_scheduler` is StepLR, but `optimizer` is not set; expected both, or neither.",
    ),
    "attribute": (
        ["--model=lightning_sparsefl.models.LeNet55"],
        "`model` is 'lightning_sparsefl.models.LeNet55', but lightning_sparsefl.models has no 'LeNet55'; "
        "did you mean `LeNet5`?",
    ),
    "group": (["--federaton.min_clients=1"], "did you mean `--federation.min_clients`?"),
    "whole number": (["--trainer.max_rounds=five"], "`trainer.max_rounds` is 'five'; expected a whole number."),
    "number of a class": (["--algorithm.density=half"], "`algorithm.density` is 'half'; expected a number."),
    "several types": (
        ["--federation.eval_clients=x"],
        "`federation.eval_clients` is 'x'; expected a whole number or 'all'.",
    ),
    "switch": (["--trainer.enable_progress_bar=maybe"], "is 'maybe'; expected true or false."),
    "list": (["--federation.capacities=abc"], "`federation.capacities` is 'abc'; expected a list."),
    "option of other subcommands": (
        ["--client=3"],
        "`--client` is not an option of this subcommand, but of `replay`, `export`.",
    ),
    "help of an option of a class": (
        ["--algorithm.server_optimizer.help=ServerOptimizer"],
        "`--algorithm.server_optimizer.help` is not an option as long as the class of `algorithm` is not known; "
        "expected `--algorithm NAME --algorithm.server_optimizer.help`.",
    ),
    "no such option": (["--zebra=1"], "`--zebra` is not an option."),
}


def said(err):
    (line,) = [line for line in err.splitlines() if line.startswith("sparsefl: error: ")]
    return line.removeprefix("sparsefl: error: ")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_the_nearest_name(mistake, sparsefl):
    args, expected = MISTAKES[mistake]
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *args)
    assert code == 2
    assert expected in said(err)
    assert "<class" not in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--trainer.max_roundz=3"], "`sparsefl fit --help` lists the options."),
        (["--algorithm=FedSpaa"], "`sparsefl fit --algorithm.help` lists the classes."),
        (["--algorithm=torch.nn.Linar"], "`sparsefl fit --algorithm.help` lists the classes."),
        (["--algorithm=nowhere.FedSpa"], "`sparsefl fit --algorithm.help` lists the classes."),
        (["--algorithm.zebra=3"], "`sparsefl fit --algorithm.help FedSpa` lists the options of FedSpa."),
        (
            ["--data.partition.zebra=3"],
            "`sparsefl fit --data.help FederatedDigits --data.partition.help Dirichlet` lists the options of "
            "Dirichlet.",
        ),
    ],
)
def test_the_tip_is_a_command_that_lists_the_options(args, expected, sparsefl):
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *args)
    assert code == 2
    assert err.splitlines()[-1] == f"tip: {expected}"
    command = expected.split("`")[1].split()
    assert sparsefl(*command[1:])[0] == 0


def test_the_options_of_a_class_with_those_that_it_passes_on(sparsefl, tmp_path):
    config = tmp_path / "more.yaml"
    dataset = "{class_path: torchvision.datasets.FakeData, init_args: {size: 10}}"
    config.write_text(f"data: {{class_path: FederatedDataset, init_args: {{train: {dataset}, zebra: 3}}}}")
    code, _, err = sparsefl("fit", "--config", QUICKSTART, "--config", config)
    assert code == 2
    names = said(err).removesuffix(".").partition("; expected one of ")[2].split(", ")
    assert {"train", "num_clients", "batch_size", "memory_map"} <= set(names)
    assert "options" not in names


def test_a_file_that_does_not_exist(sparsefl):
    code, _, err = sparsefl("fit", "--config", QUICKSTART.replace("quick", "quik"))
    assert code == 2
    assert said(err).endswith(f"quikstart.yaml', which does not exist; did you mean `{QUICKSTART}`?")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("trainer: [", r"`--config` is '.*bad\.yaml', which is not YAML, as line 1, column 11 shows: .*; repair it\."),
        ("hello", r"`--config` is '.*bad\.yaml', which has a str; expected options by name"),
        ("[1, 2]", r"`--config` is '.*bad\.yaml', which has a list; expected options by name"),
        (
            "trainer:\n  max_rounds: 3\n  max_epochs: 1\n  max_rounds: 4",
            r"`--config` is '.*bad\.yaml', which has `max_rounds` twice in one mapping, again in line 4; remove one",
        ),
        (
            "trainer:\n  on: 3",
            r"`--config` is '.*bad\.yaml', which has the key `on` in line 2; expected the name of an option",
        ),
        (
            "trainer: &own {max_rounds: *own}",
            r"`--config` is '.*bad\.yaml', which refers to itself by an anchor; expected",
        ),
        (
            "algorithm:\n  class_path: [FedSpa]",
            r"which has a wrong `class_path` in line 2; expected the name of a class\.",
        ),
        ("algorithm: {class_path: 3}", r"which has a wrong `class_path` in line 1; expected the name of a class\."),
        (
            "algorithm: {class_path: FedSpa, init_args: [1]}",
            r"which has a wrong `init_args` in line 1; expected options by name\.",
        ),
        ("trainer: {}\n1: 2", r"which has the key `1` in line 2; expected the name of an option, in quotes if YAML"),
        ("null: 2", r"which has the key `null` in line 1; expected the name"),
        ("model:\n  class_path: MLP\n  init_args: {1: 2}", r"which has the key `1` in line 3; expected the name"),
        ("trainer:\n  callbacks:\n  - init_args: {1: 2}", r"which has the key `1` in line 3; expected the name"),
        ("# nothing yet", r"`--config` is '.*bad\.yaml', which is empty; expected options by name"),
    ],
)
def test_a_file_without_options_is_named(content, expected, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(InvalidOption, match=expected):
        parse(["--config", str(tmp_path / "bad.yaml")])


def test_the_value_of_an_option_may_have_any_keys(tmp_path):
    (tmp_path / "bins.yaml").write_text("model: {class_path: MLP, init_args: {hidden: {1: 2}}}")
    assert checked_config(str(tmp_path / "bins.yaml")) == str(tmp_path / "bins.yaml")


@pytest.mark.parametrize("printed", [[], ["--print_config"]], ids=["run", "printed"])
@pytest.mark.parametrize("content", ["trainer: 3", "trainer: null", "federation: null"])
def test_one_value_for_all_options_of_a_group(content, printed, config_with):
    group = content.partition(":")[0]
    with pytest.raises(InvalidOption, match=f"^`{group}` is (3|None); expected options by name, such as `{group}"):
        parse([*config_with(content), *printed])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SPARSEFL_FIT__TRAINER__MAX_ROUND", "did you mean SPARSEFL_FIT__TRAINER__MAX_ROUNDS?"),
        ("SPARSEFL_TRAINER__MAX_ROUNDS", "did you mean SPARSEFL_FIT__TRAINER__MAX_ROUNDS?"),
        ("SPARSEFL_FIT__QUIET", "expected one as SPARSEFL_FIT__TRAINER__MAX_ROUNDS."),
        (
            "SPARSEFL_FIT__ALGORITHM__DENSITY",
            "options of a class are set with it, as in "
            "SPARSEFL_FIT__ALGORITHM='{class_path: NAME, init_args: {OPTION: VALUE}}'.",
        ),
    ],
)
def test_a_variable_that_names_no_option(name, hint, monkeypatch):
    monkeypatch.setenv(name, "3")
    with pytest.raises(InvalidOption) as error:
        parse(["--config", QUICKSTART, "--print_config"])
    assert str(error.value) == f"The environment variable {name} names no option; {hint}"


def test_a_variable_of_another_program(monkeypatch):
    monkeypatch.setenv("SPARSEFL_PORT", "tcp://10.0.0.1:80")  # as Kubernetes sets it for a service
    monkeypatch.setenv("SPARSEFL_CONFG", "quickstart")
    with pytest.warns(UserWarning, match="SPARSEFL_CONFG is not read; did you mean SPARSEFL_CONFIG") as warned:
        parse(["--config", QUICKSTART])
    assert not any("SPARSEFL_PORT" in str(warning.message) for warning in warned)


@pytest.fixture
def config_with(tmp_path):
    """The options for a file with some content, after those of a small run."""

    def options(content):
        (tmp_path / "more.yaml").write_text(content)
        return ["--config", QUICKSTART, "--config", str(tmp_path / "more.yaml")]

    return options


def test_a_folder_or_nothing_is_no_file(tmp_path):
    with pytest.raises(InvalidOption, match=f"`--config` is '{tmp_path}', which is a folder; expected a YAML file"):
        parse(["--config", str(tmp_path)])
    with pytest.raises(InvalidOption, match="`--config` is ''; expected a YAML file"):
        parse(["--config", ""])


def test_an_option_in_a_file(sparsefl, tmp_path):
    config = tmp_path / "more.yaml"
    config.write_text("trainer:\n  max_roundz: 3\n")
    code, _, err = sparsefl("fit", "--config", config, "--config", QUICKSTART)
    assert code == 2
    assert said(err) == "`trainer.max_roundz` is not an option; did you mean `trainer.max_rounds`?"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["fit", "--algorithm.help", "FedSpaa"],
            "`--algorithm.help` is 'FedSpaa', which is not a known class; did you mean `FedSpa`?",
        ),
        (
            ["fit", "--data.help", "Zebra"],
            "`--data.help` is 'Zebra', which is not a known class; `--data.help` lists the classes.",
        ),
        (["fit", "--trainer.max_rounds"], "No value for `--trainer.max_rounds`; expected --trainer.max_rounds VALUE."),
        (["fit", "-c"], "No value for `--config`; expected --config VALUE."),
        (
            ["fit", "-c", "{federation: {privacy: {1: 2}}}"],
            "`federation.privacy` has the key 1; expected the name of an option, in quotes if YAML takes it for "
            "another value.",
        ),
        (
            ["fit", "--trainer", "none.yaml"],
            "`trainer` is 'none.yaml'; expected options by name, or a YAML file that has them.",
        ),
        (
            ["fit", "--model", "none.yaml"],
            "`model` is 'none.yaml', which does not exist; expected a file or the name of a class.",
        ),
        (
            ["--config", QUICKSTART, "fit"],
            "`data.init_args.partition.init_args.alpha` is set before the subcommand, by an option or a `--config` "
            "there; expected options of `fit` after its name.",
        ),
    ],
)
def test_a_value_that_is_missing_unknown_or_at_another_place(args, expected, sparsefl):
    code, _, err = sparsefl(*args)
    assert code == 2
    assert said(err) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            "--federation.server_optimizer=Adamm",
            "`federation.server_optimizer` is 'Adamm'; did you mean `--federation.server_optimizer.rule adam`?",
        ),
        (
            "--federation.server_optimizer=SGD",
            "`federation.server_optimizer` is 'SGD'; expected the options of ServerOptimizer: "
            "`federation.server_optimizer.rule`, `federation.server_optimizer.lr`, ",
        ),
        (
            "--federation.privacy=3",
            "`federation.privacy` is '3'; expected the options of Privacy: `federation.privacy.noise_multiplier`, ",
        ),
    ],
)
def test_one_value_in_the_place_of_several_options(args, expected, sparsefl):
    code, _, err = sparsefl("fit", "--config", QUICKSTART, args)
    assert code == 2
    assert said(err).startswith(expected)


BESIDE = {
    "algorithm: {class_path: FedSpa, density: 0.2, search: dst}": (
        "`algorithm` is FedSpa with `density`, `search` besides `class_path`; expected options of a class below "
        "`init_args`."
    ),
    "data: {class_path: FederatedDigits, init_args: {partition: {class_path: Dirichlet, alpha: 1}}}": (
        "`data.partition` is Dirichlet with `alpha` besides `class_path`; expected options of a class below "
        "`init_args`."
    ),
    "trainer: {callbacks: [{class_path: EarlyStopping, monitor: x}]}": (
        "`trainer.callbacks` is EarlyStopping with `monitor` besides `class_path`; expected options of a class below "
        "`init_args`."
    ),
}


@pytest.mark.parametrize("content", BESIDE)
def test_options_beside_the_class_path(content, sparsefl, tmp_path):
    config = tmp_path / "more.yaml"
    config.write_text(content)
    code, _, err = sparsefl("fit", "--config", QUICKSTART, "--config", config)
    assert code == 2
    assert said(err) == BESIDE[content]


def test_options_beside_the_class_path_of_an_object():
    message = (
        "Parser key \"algorithm\":\n  Errors:\n    - Problem with given class_path 'lightning_sparsefl.FedSpa':\n"
        "        Option 'class_path' is not accepted\n  Given value: Namespace(class_path='FedSpa', density=0.5)"
    )
    expected = "`algorithm` has options besides `class_path`; expected them below `init_args`."
    assert short_message(message) == expected


def test_a_module_that_is_not_in_the_folder(sparsefl, tmp_path):
    (tmp_path / "my_models.py").touch()
    code, _, err = sparsefl("fit", "--config", QUICKSTART, "--model=my_model.Net")
    assert code == 2
    assert f"no module 'my_model' among the installed packages or in the current folder, {tmp_path}" in err
    assert "did you mean `my_models`?" in err


@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_module_that_is_beside_the_configuration(command, sparsefl, tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (tmp_path / "my_nets.py").touch()
    (folder / "config.yaml").write_text("model: my_net.Net\n")
    given = ["--config", folder / "config.yaml"] if command == "fit" else ["--ckpt_path", folder]
    here = f"no module 'my_net' among the installed packages or in the current folder, {tmp_path}"
    assert f"{here}; did you mean `my_nets`?" in said(sparsefl(command, *given)[2])
    (folder / "my_net.py").touch()
    expected = f"{here}; `my_net.py` is beside the configuration: run the command in {folder}, or add that folder to"
    assert expected in said(sparsefl(command, *given)[2])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)."),
        ("raise RuntimeError('no data here')", "RuntimeError: no data here."),
        ("assert False", "AssertionError."),
    ],
)
@pytest.mark.parametrize("option", ["model", "algorithm", "trainer.callbacks", "data.partition"])
def test_a_module_that_cannot_be_imported(option, source, reason, sparsefl, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    (tmp_path / "broken.py").write_text(source)
    code, _, err = sparsefl("fit", "--config", QUICKSTART, f"--{option}=broken.Mine")
    assert code == 2
    assert said(err) == f"`{option}` is 'broken.Mine', which cannot be imported: {reason}"


@pytest.mark.parametrize("option", ["trainer.logger", "trainer.logger+", "data.partition"])
def test_a_class_with_abstract_methods(option, sparsefl):
    kind = "lightning_sparsefl.data.Partition" if option == "data.partition" else "lightning.pytorch.loggers.Logger"
    code, _, err = sparsefl("fit", "--config", QUICKSTART, f"--{option}={kind}")
    assert code == 2
    expected = f"`{option.removesuffix('+')}` is '{kind}', which has abstract methods; expected a subclass that has"
    assert said(err) == f"{expected} them all."


def test_a_list_in_the_place_of_a_class(sparsefl, config_with):
    code, _, err = sparsefl("fit", *config_with("algorithm: [FedAvg]"))
    assert code == 2
    expected = "`algorithm` is ['FedAvg']; expected the name of a class, or its `class_path` and `init_args`."
    assert said(err) == expected


SUBCOMMANDS = "fit, validate, test, profile, replay, export, configs, report, compare"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            (),
            f"No subcommand is given; expected one of {SUBCOMMANDS}.",
        ),
        (
            ("zebra",),
            f"`zebra` is not a subcommand; expected one of {SUBCOMMANDS}.",
        ),
        (("exprt",), "`exprt` is not a subcommand; did you mean `export`?"),
        (
            ("fit", "--algorithm=FedAvg", "--model=MLP", "--data=FederatedDigits", "--data.partition=Dirichlet"),
            "No value for `data.partition.alpha`; expected --data.partition.alpha VALUE.",
        ),
        (
            ("fit", "--algorithm=FedAvg", "--data.partition.zebra=1"),
            "`--data.partition.zebra` is not an option.",
        ),
        (("fit",), "No value for `algorithm`, `data`, `model`; expected options, a file in `--config`"),
    ],
)
def test_subcommands_are_listed(args, expected, sparsefl):
    code, _, err = sparsefl(*args)
    assert code == 2
    assert expected in said(err)


@pytest.mark.parametrize(
    "problem",
    [
        "Problem with given class_path 'lightning.pytorch.loggers.WandbLogger':\n      Requirement",
        "lightning.pytorch.loggers.wandb.WandbLogger cannot be created (ModuleNotFoundError: Requirement",
    ],
)
def test_a_missing_library_is_named_with_its_installation(problem):
    message = (
        "Does not validate against any of the Union subtypes\nErrors:\n"
        f"  - {problem} 'wandb>=0.12.10' not met. HINT: Try running `pip install -U 'wandb>=0.12.10'`\n"
        "  - Expected a <class 'list'>\nGiven value: Namespace()"
    )
    expected = (
        "WandbLogger needs the package wandb>=0.12.10, which is not installed; run `pip install 'wandb>=0.12.10'`."
    )
    assert short_message(message) == expected


def test_an_argument_that_only_python_has_is_answered_by_the_option_in_its_place(sparsefl, tmp_path):
    (tmp_path / "run_dir.yaml").write_text("trainer: {run_dir: mine}\n")
    for given in (["--trainer.run_dir=mine"], ["--config", "run_dir.yaml"]):
        code, _, err = sparsefl("fit", "--config", QUICKSTART, *given)
        assert code == 2
        assert "is not an option, but an argument in Python; expected `trainer.default_root_dir`" in err
