"""Processes that begin with their imports done are what cold ones are, to whoever looks at them (tests/warm.py)."""

from pathlib import Path

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
