"""The command line: help at once, one sentence for a mistake, and exit codes that scripts can rely on."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import ravnest
from ravnest import JobError
from ravnest.cli import main as cli
from ravnest.cli import train
from ravnest.cli.join import byte_rate, host_and_port, memory_bytes
from ravnest.jobfile import JobFileFailed

HEAVY = ("torch", "numpy", "grpc", "google.protobuf", "rich", "tensorboard", "safetensors", "sklearn")


def raising(error: BaseException) -> "type[NoReturn] | object":
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    monkeypatch.setattr(train, "run", raising(error))
    return cli.main(["train", "job.py"])


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["join", "--help"], ["plan", "--help"], ["doctor", "--help"], ["--version"]],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from ravnest.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert all(command in told for command in cli.COMMANDS)


def test_python_dash_m_is_the_same_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "ravnest", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"ravnest {ravnest.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "job.py"], "there is no command 'trian': did you mean train?"),
        (["frobnicate"], "there is no command 'frobnicate': the commands are train, serve, join"),
        ([], "COMMAND"),
        (["train"], "JOB"),
        (["train", "job.py", "--providers", "0"], "'0' is not a whole number of at least 1"),
        (["train", "job.py", "--providers", "two"], "'two' is not a whole number"),
        (["train", "job.py", "--clusters", "0"], "'0' is not a whole number of at least 1"),
        (["join"], "INVITE"),
        (["join", "ravnest://x", "--memory", "much"], "'much' is not a size: write it as 8GB"),
        (["join", "ravnest://x", "--listen", "7000"], "'7000' is not an address"),
        (["join", "ravnest://x", "--cache", "none"], "'none' is not a size"),
        (["join", "ravnest://x", "--upload-limit", "2MB"], "'2MB' is not a rate: write it as 2MB/s"),
        (["join", "ravnest://x", "--upload-limit", "0Mbit/s"], "'0Mbit/s' is not a rate"),
        (["join", "ravnest://x", "--download-limit", "9KB/s"], "'9KB/s' is too little to take part with"),
        (["join", "ravnest://x", "--monthly-cap", "200GB/s"], "'200GB/s' is not a size"),
        (["join", "ravnest://x", "--weights", "/no/such"], "there is no folder '/no/such'"),
        (["serve", "job.py", "--upload", "0"], "'0' is not a rate: write it as 2MB/s"),
        (["serve", "job.py", "--download", "fast"], "'fast' is not a rate"),
        (["join", "ravnest://x", "--pretend-slower", "0.5"], "'0.5' is not a factor: give a number"),
        (["join", "ravnest://x", "--pretend-slower", "nan"], "'nan' is not a factor"),
        (["join", "ravnest://x", "--pretend-slower", "inf"], "'inf' is not a factor"),
        (["join", "ravnest://x", "--pretend-slower", "much"], "'much' is not a factor"),
        (["join", "ravnest://x", "--pretend-seconds", "0.1"], "'0.1' is not a pair of durations"),
        (["join", "ravnest://x", "--pretend-seconds", "0.1,0"], "give the seconds of a forward and a backward"),
        (["join", "ravnest://x", "--pretend-seconds", "1,inf"], "'1,inf' is not a pair of durations"),
        (["join", "x", "--pretend-seconds", "1,1", "--pretend-slower", "2"], "not allowed with argument"),
        (["serve", "job.py", "--listen", "0.0.0.0:7700", "--advertise", "here"], "'here' is not an address"),
        (["serve", "job.py", "--listen", "0.0.0.0:7700", "--providers", "0"], "'0' is not a whole number"),
        (["invite", "run", "--new", "--hours", "-1"], "'-1' is not a number of hours"),
        (["invite", "run", "--new", "--hours", "nan"], "'nan' is not a number of hours"),
        (["invite", "run", "--new", "--revoke", "x"], "not allowed with argument"),
        (["kick", "run"], "NODE"),
        (["doctor", "--memory", "much"], "'much' is not a size: write it as 8GB"),
        (["doctor", "--listen", "7000"], "'7000' is not an address"),
        (["docter"], "there is no command 'docter': did you mean doctor?"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_a_new_run_is_served_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "job.py"]) == 2
    assert re.fullmatch(r"ravnest: error: no address .* --listen .*\n", capsys.readouterr().err)


def test_a_users_mistake_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, JobError("epochs is 0: give a whole number of at least 1")) == 2
    assert capsys.readouterr().err == "ravnest: error: epochs is 0: give a whole number of at least 1\n"


def test_a_failed_job_file_shows_the_users_traceback_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = JobFileFailed("job.py failed with KeyError: 'a'", "Traceback of the user\nKeyError: 'a'\n")
    assert run_with(monkeypatch, error) == 2
    expected = "Traceback of the user\nKeyError: 'a'\nravnest: error: job.py failed with KeyError: 'a'\n"
    assert capsys.readouterr().err == expected


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130


def test_a_bug_of_ours_is_called_one_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, ValueError("unforeseen")) == 1
    told = capsys.readouterr().err
    assert "ValueError: unforeseen" in told
    assert "this is a bug in Ravnest" in told


def test_train_hands_its_arguments_on() -> None:
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    given = ["train", "job.py:small", "--providers", "4", "--resume", "--set", "epochs=3", "--set", "seed=1"]
    args = parser.parse_args([*given, "--no-display", "--run", "runs/a"])
    assert (args.job, args.providers, args.resume, args.no_display) == ("job.py:small", 4, True, True)
    assert (args.overrides, str(args.directory)) == (["epochs=3", "seed=1"], "runs/a")
    assert args.run is train.run
    plain = parser.parse_args(["train", "job.py"])
    assert (plain.overrides, plain.providers, plain.clusters) == ([], 2, 1)
    assert parser.parse_args(["train", "job.py", "--clusters", "2"]).clusters == 2


@pytest.mark.parametrize(
    "given",
    [
        ["train", "job.py", "--providers", "2", "--clusters", "3"],
        ["serve", "job.py", "--listen", "127.0.0.1:0", "--providers", "2", "--clusters", "3"],
    ],
)
def test_more_clusters_than_providers_are_refused_before_anything_starts(
    given: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text("job = None")
    assert cli.main(given) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    told = capsys.readouterr().err
    assert "3 clusters cannot be made of 2 providers" in told and "--providers 3 or more, or --clusters 2" in told


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8_000_000_000),
        ("512MiB", 512 * 1024**2),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        ("2 kB", 2000),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8XB", "0", "1e9", "8 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        memory_bytes(text)


def test_addresses_are_read_with_their_port() -> None:
    assert host_and_port("127.0.0.1:0") == ("127.0.0.1", 0)
    assert host_and_port("[::1]:7000") == ("::1", 7000)


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:port", "host:70000", "::1:80", "[]:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not an address"):
        host_and_port(text)


def test_the_public_names_are_all_there() -> None:
    for name in ravnest.__all__:
        assert getattr(ravnest, name) is not None
        assert name in dir(ravnest)
    with pytest.raises(AttributeError, match="no attribute 'Jobb'"):
        ravnest.Jobb  # noqa: B018


def test_a_rate_may_be_of_bytes_or_of_bits() -> None:
    assert byte_rate("2MB/s") == byte_rate("16Mbit/s") == 2e6
    assert byte_rate("500 KiB/s") == 512_000 and byte_rate("1gbit/s") == 125e6
