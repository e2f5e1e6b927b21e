"""JOB on the command line: three ways to name a job, and every way to get it wrong."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ravnest import JobError
from ravnest.jobfile import JobFileFailed, load_job

GOOD = """
from functools import partial
import torch
import ravnest

def make(**changes):
    return ravnest.Job(**{
        "model": torch.nn.Linear(2, 1),
        "loss": torch.nn.functional.mse_loss,
        "train_data": [(torch.zeros(1, 2), torch.zeros(1, 1))],
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        **changes,
    })
"""


@pytest.fixture(autouse=True)
def _imports_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def refused(reference: str) -> str:
    with pytest.raises(JobError) as caught:
        load_job(reference)
    message = str(caught.value)
    assert "\n" not in message
    return message


def failed(reference: str) -> JobFileFailed:
    with pytest.raises(JobFileFailed) as caught:
        load_job(reference)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_file_gives_its_job() -> None:
    write("folder/first.py", GOOD + "job = make(epochs=3)")
    assert load_job("folder/first.py").epochs == 3


def test_a_file_and_a_name_give_that_job() -> None:
    write("second.py", GOOD + "job = make(epochs=3)\nlong = make(epochs=9)")
    assert load_job("second.py:long").epochs == 9
    assert load_job(f"{Path.cwd()}/second.py:long").epochs == 9


def test_a_module_and_a_name_give_that_job() -> None:
    write("somewhere/__init__.py", "")
    write("somewhere/deep.py", GOOD + "mine = make(epochs=4)")
    assert load_job("somewhere.deep:mine").epochs == 4


def test_a_job_file_imports_its_neighbours_at_once_and_later() -> None:
    write("folder/neighbour_now.py", "EPOCHS = 6")
    write("folder/neighbour_later.py", "BATCHES = [1, 2]")
    write(
        "folder/third.py",
        GOOD
        + "import neighbour_now\n"
        + "def data():\n    import neighbour_later\n    return neighbour_later.BATCHES\n"
        + "job = make(epochs=neighbour_now.EPOCHS, train_data=data)",
    )
    job = load_job("folder/third.py")
    assert job.epochs == 6
    assert list(job.train_batches()) == [1, 2]
    assert sys.path[0] != str(Path("folder").resolve())


def test_a_job_file_named_like_a_library_module_does_not_replace_it() -> None:
    import json

    write("json.py", GOOD + "job = make(epochs=2)")
    write("fractions.py", GOOD + "job = make(epochs=3)")
    assert load_job("json.py").epochs == 2
    assert load_job("fractions.py").epochs == 3
    assert sys.modules["json"] is json
    assert getattr(sys.modules.get("fractions"), "make", None) is None


def test_a_file_is_read_afresh_each_time() -> None:
    write("again.py", GOOD + "job = make(epochs=2)")
    assert load_job("again.py") is not load_job("again.py")


def test_a_missing_file_is_named_with_its_near_ones() -> None:
    write("folder/digits.py", "")
    write("folder/other.py", "")
    message = refused("folder/digit.py")
    assert message.startswith("folder/digit.py does not exist") and message.endswith(": folder/digits.py")
    assert "nowhere does not exist either" in refused("nowhere/job.py")


@pytest.mark.parametrize("reference", ["job", "folder/job", "a b", "", ":job", "job.txt"])
def test_what_is_no_job_reference_gets_the_three_forms(reference: str) -> None:
    assert "path/to/file.py, file.py:name or package.module:name" in refused(reference)


def test_a_file_that_is_not_python_is_refused() -> None:
    write("notes.txt", "hello")
    assert refused("notes.txt").startswith("notes.txt is not a Python file")
    assert refused("notes.txt:job").startswith("notes.txt is not a Python file")
    Path("folder.py").mkdir()
    assert refused("folder.py").startswith("folder.py is a folder")


def test_a_file_without_a_job_says_which_jobs_it_has() -> None:
    write("none.py", "x = 1")
    message = refused("none.py")
    assert message.startswith("none.py has no job") and message.endswith("job = ravnest.Job(...)")
    write("others.py", GOOD + "small = make()\nlarge = make()")
    assert refused("others.py") == "others.py has no job, but it has large, small: give others.py:large"
    assert "has no medium" in refused("others.py:medium")


def test_a_name_that_is_not_a_job_says_what_it_is() -> None:
    write("wrong.py", GOOD + "job = {'epochs': 3}\nreal = make()")
    message = refused("wrong.py")
    assert message.startswith("job in wrong.py is a dict") and message.endswith("it has real")


def test_a_missing_module_is_named() -> None:
    assert "there is no module nowhere_at_all" in refused("nowhere_at_all.jobs:job")


def test_an_exception_in_the_file_is_told_with_the_users_frames_alone() -> None:
    write("broken_neighbour.py", "def divide(number):\n    return number / 0\n")
    write("broken.py", "import broken_neighbour\n\nbroken_neighbour.divide(3)\n")
    error = failed("broken.py")
    assert str(error) == "broken.py failed with ZeroDivisionError: division by zero"
    told = error.user_traceback
    assert told.count("File ") == 2
    assert 'broken.py", line 3' in told
    assert 'broken_neighbour.py", line 2, in divide' in told
    assert "ravnest/" not in told
    assert "importlib" not in told
    assert told.endswith("ZeroDivisionError: division by zero\n")


def test_frames_of_libraries_are_left_out_of_the_users_traceback() -> None:
    write("deep.py", "import torch\n\ntorch.nn.Linear(2, 2)(torch.zeros(3, 3))\n")
    told = failed("deep.py").user_traceback
    assert told.count("File ") == 1
    assert 'deep.py", line 3' in told
    assert "mat1 and mat2" in told


def test_a_chain_of_exceptions_keeps_the_users_frames_of_each() -> None:
    write(
        "chained.py",
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no a') from error\n",
    )
    told = failed("chained.py").user_traceback
    assert 'chained.py", line 2' in told
    assert 'chained.py", line 4' in told
    assert "ravnest/" not in told


def test_a_missing_import_of_the_file_is_the_users_failure() -> None:
    write("imports.py", "import surely_not_installed\n")
    assert "No module named 'surely_not_installed'" in str(failed("imports.py"))
    write("packaged.py", "import surely_not_installed\n")
    assert "No module named 'surely_not_installed'" in str(failed("packaged:job"))


def test_a_syntax_error_shows_file_and_line() -> None:
    write("syntax.py", "x = 1\ndef broken(:\n")
    error = failed("syntax.py")
    assert str(error).startswith("syntax.py:2 is not valid Python, ")
    assert 'syntax.py", line 2' in error.user_traceback
    assert "ravnest/" not in error.user_traceback


def test_a_file_that_exits_is_an_error_and_not_an_exit() -> None:
    write("exits.py", "import sys\nsys.exit(0)\n")
    assert "exits.py exited before its job was read" in str(failed("exits.py"))


def test_a_failed_file_leaves_no_module_behind() -> None:
    write("leaves_nothing.py", "1 / 0")
    failed("leaves_nothing.py")
    assert "leaves_nothing" not in sys.modules


def test_a_mistake_in_a_job_shows_where_the_user_made_it() -> None:
    path = write("mistake.py", GOOD + "\njob = make(\n    epochs=0,\n)\n")
    line = path.read_text().splitlines().index("    return ravnest.Job(**{") + 1
    message = refused("mistake.py")
    assert message == f"epochs is 0: give a whole number of at least 1 (mistake.py:{line})"
