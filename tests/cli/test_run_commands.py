"""`sparsefl report` and `sparsefl compare`: options, messages, and what they do not import."""

import subprocess
import sys

import pytest

from helpers.run_folders import write_run
from lightning_sparsefl import __version__

BYTES = "a number of bytes above 0, such as 170000, 170kB or 1.5MB"
FLOPS = "a number of FLOPs above 0, such as 2e9, 2G or 1.5TFLOP"


@pytest.fixture
def runs(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "runs" / f"version_{seed}", seed=seed)
    return tmp_path / "runs"


def test_compare_prints_a_row_for_each_group(runs, sparsefl):
    code, out, err = sparsefl("compare", runs, "--target", "0.5")
    assert (code, err) == (0, "")
    assert sum(line.startswith("FedSpa ") for line in out.splitlines()) == 4
    assert "Costs to personal val_acc \u2265 0.5" in out


def test_compare_prints_the_scores_within_budgets(runs, sparsefl):
    code, out, err = sparsefl("compare", runs, "--budget", "6.5 kB", "--flops_budget=1")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    place = lines.index("Last personal val_acc within a budget")
    assert lines[place + 1].split("   ")[-2:] == ["\u2264 6.5 kB up and down", "\u2264 1 FLOP of training"]
    assert lines[place + 3].split()[:2] == ["FedSpa", "2"]
    assert lines[place + 3].split()[-1] == "-"


def test_report_writes_a_folder(tmp_path, sparsefl):
    run = write_run(tmp_path / "run", rounds=0, finished=False)  # which has no figures
    code, out, err = sparsefl("report", run)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Report: report/index.html"
    assert (tmp_path / "report" / "index.html").is_file()
    assert sparsefl("report", "--quiet", run, "--out", tmp_path / "other") == (0, "", "")
    assert sparsefl("--quiet", "report", run, "--out", tmp_path / "third") == (0, "", "")
    assert (tmp_path / "other" / "tables" / "groups.csv").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("compare", "missing"), "`RUN` is 'missing', which does not exist; expected a run folder"),
        (("compare",), "No value for `RUN`; expected one or more run folders"),
        (("report", "runs", "--targt", "1"), "`--targt` is not an option; did you mean `--target`?"),
        (("report", "runs", "--target", "high"), "`--target` is 'high'; expected a number."),
        (("compare", "runs", "--budget", "much"), f"`budget` is 'much'; expected {BYTES}."),
        (("compare", "runs", "--budget", "0"), f"`budget` is '0'; expected {BYTES}."),
        (("report", "runs", "--budget", "2GFLOP"), f"`budget` is '2GFLOP'; expected {BYTES}."),
        (("compare", "runs", "--flops_budget", "-1"), f"`flops_budget` is '-1'; expected {FLOPS}."),
        (("compare", "runs", "--flops_budget", "1e9999"), f"`flops_budget` is '1e9999'; expected {FLOPS}."),
        (("compare", "runs", "--budget"), "Too few values for `--budget`; expected --budget BYTES."),
        (("compare", "runs", "--metric", "acc"), "`metric` is 'acc', which "),
        (
            ("compare", "runs", "--group", "FedAvg"),
            "`group` is 'FedAvg', which is not a group of these runs; expected some of",
        ),
        (("compare", "runs", "--by", "densty"), "`by` is 'densty', which no run has as an option"),
        (
            ("compare", "runs", "other"),
            "The runs are of different data: `data.num_clients` is 12 in runs/version_0, and 9 in",
        ),
        (
            ("report", "runs", "--out", "runs/version_0/metrics.csv"),
            "`out` is 'runs/version_0/metrics.csv', which is a file",
        ),
        (("report", "runs", "--out", "/dev/null/x"), "' cannot be read or written: Not a directory."),
        (("compare", "runs", "--target"), "Too few values for `--target`; expected --target SCORE."),
        (("configs", "--copy", "debug"), "Too few values for `--copy`; expected --copy NAME DEST."),
        (("configs", "--shw", "debug"), "`--shw` is not an option; did you mean `--show`?"),
        (("raport", "runs"), "`raport` is not a subcommand; did you mean `report`?"),
        (
            ("--config", "top.yaml", "compare", "runs"),
            "`sparsefl compare` has no configuration and no environment variables; expected no option before the name",
        ),
        (("--print_config", "configs"), "`sparsefl configs` has no configuration and no environment variables; "),
    ],
)
def test_bad_input_is_one_message(args, message, runs, tmp_path, sparsefl):
    write_run(tmp_path / "other", data={"num_clients": 9})
    (tmp_path / "top.yaml").write_text("fit: {trainer: {max_rounds: 3}}")
    code, out, err = sparsefl(*args)
    lines = err.splitlines()
    assert (code, out) == (2, "")
    assert lines[0].startswith("sparsefl: error: ")
    assert message in lines[0]
    assert "Traceback" not in err


def test_an_environment_variable_does_not_start_them(sparsefl, monkeypatch):
    monkeypatch.setenv("SPARSEFL_SUBCOMMAND", "compare")
    code, out, err = sparsefl()
    assert (code, out) == (2, "")
    assert "`sparsefl compare` has no configuration and no environment variables" in err


@pytest.mark.slow_after_first("command")
@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize("name", ["SPARSEFL_COMPARE__METRIC", "SPARSEFL_TRAINER__MAX_ROUNDS"])
def test_a_variable_that_names_no_option(name, command, runs, sparsefl, monkeypatch):
    monkeypatch.setenv("SPARSEFL_FIT__TRAINER__MAX_ROUNDS", "3")
    assert sparsefl(command, runs)[0] == 0
    monkeypatch.setenv(name, "3")
    code, out, err = sparsefl(command, runs)
    assert (code, out) == (2, "")
    assert f"error: The environment variable {name} names no option; only those of fit, validate, test, " in err


def test_different_data_can_be_allowed(runs, tmp_path, sparsefl):
    write_run(tmp_path / "other", data={"num_clients": 9})
    code, out, _ = sparsefl("compare", "runs", "other", "--different_data")
    assert code == 0
    assert "FedSpa (num_clients=9) " in out


def test_the_program_lists_the_commands(sparsefl):
    code, out, _ = sparsefl("--help")
    assert code == 0
    assert all(f"\n    {name} " in out for name in ("report", "compare"))


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["report", "--help"], 0, "--different_data"),
        (["compare", "--help"], 0, "usage: sparsefl compare "),
        (["configs", "--help"], 0, "usage: sparsefl configs [PATTERN]"),
        (["configs", "quick"], 0, "quickstart  "),
        (["--version"], 0, f"sparsefl {__version__}\n"),
        (["--help"], 0, "usage: sparsefl SUBCOMMAND [options]\n"),
        (["-h", "fit"], 0, "\n    export "),
        (["-c", "quickstart", "--help"], 0, "usage: sparsefl SUBCOMMAND [options]\n"),
        ([], 2, "No subcommand is given; expected one of fit, "),
        (["exprt", "--client=1"], 2, "`exprt` is not a subcommand; did you mean `export`?"),
    ],
)
def test_some_commands_do_not_wait_for_torch(args, code, expected):
    program = (
        "import sys\nfrom lightning_sparsefl.cli import main\n"
        f"try:\n    main({args})\n"
        f"except SystemExit as stop:\n    assert (stop.code or 0) == {code}\n"
        "print('modules', *sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    printed, _, modules = done.stderr.rpartition("modules ")
    assert expected in done.stdout + printed
    loaded = {name.partition(".")[0] for name in modules.split()}
    assert "lightning_sparsefl" in loaded
    assert not loaded & {"torch", "lightning", "matplotlib", "jsonargparse", "sklearn", "torchmetrics"}
