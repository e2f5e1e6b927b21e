"""Processes that begin with their imports done are what cold ones are, to whoever looks at them (tests/warm.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.command import Running
from tests.e2e.jobs import a_job_file


def test_the_providers_of_a_warm_run_are_its_children_by_name_and_end_with_it(tmp_path: Path) -> None:
    a_job_file(tmp_path, epochs="1_000_000")
    with Running("train", "job.py", "--providers", "2", "--run", "run", folder=tmp_path, warm=True) as running:
        running.until("training")
        providers = running.providers()
        assert {provider.ppid() for provider in providers} == {running.process.pid}
        named = [words[words.index("--name") + 1] for words in (provider.cmdline() for provider in providers)]
        assert sorted(named) == ["provider-0", "provider-1"]
        running.process.kill()
        running.process.wait()
        assert not running.left_behind(10.0)


def test_a_machine_on_which_imports_start_threads_starts_processes_cold_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As CUDA does on some machines when torch looks for a GPU.
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.raises(warm.NotWarmError, match="its imports have started 1 more thread") as reason:
        warm.Mother(tmp_path)
    monkeypatch.setitem(warm.mothers, os.getpid(), reason.value)
    command = [sys.executable, "-m", "ravnest", "--version"]
    started = warm.started(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    assert isinstance(started, subprocess.Popen)
    assert started.communicate()[0].startswith(b"ravnest ") and started.returncode == 0
