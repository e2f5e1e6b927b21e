"""On a terminal a run shows itself: a progress bar, the numbers that matter, a line per stage; and gives it back."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

from tests.e2e.command import COMMAND, environment
from tests.e2e.jobs import a_job_file

WIDTH, HEIGHT = 80, 24
SLOWLY = """
class Slowly:
    # Half a second in all: enough for some pictures of it.
    def __len__(self):
        return len(batches)

    def __iter__(self):
        for batch in batches:
            time.sleep(0.08)
            yield batch
"""


def on_a_terminal(*words: str, folder: Path) -> tuple[int, str]:
    """Runs the command on a terminal of 80 columns; its exit code and all it wrote there."""
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        env=environment(TERM="xterm-256color", COLUMNS=str(WIDTH), LINES=str(HEIGHT)),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    written = b""
    try:
        while chunk := os.read(control, 65536):
            written += chunk
    except OSError:
        pass  # What Linux says when the last one has closed a terminal.
    finally:
        os.close(control)
    return process.wait(60), written.decode()


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    a_job_file(tmp_path, before=SLOWLY, data="Slowly()", eval_data="batches", epochs="2")
    code, written = on_a_terminal("train", "job.py", "--providers", "2", "--run", "run", folder=tmp_path)
    assert code == 0, written
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    # While it goes on: how far, how well, how fast, how long still, and each stage.
    assert "starting 2 providers" in text
    assert re.search(r"training {2}epoch 1/2 .* left {2}\d+(\.\d)? s elapsed", text)
    assert re.search(r"━+.*\d+/128 samples", text)
    assert re.search(r"loss \d\.\d+ .* samples/s .* updates", text)
    for row in (
        r"stage +provider +device +params +busy +staleness +memory",
        r"0 root +provider-\d",
        r"1 leaf +provider-\d",
    ):
        assert re.search(row, text), row
    # At the end: what came of it.
    end = text[text.rindex("Finished in") :]
    assert "evaluation" in end and "128 samples, 2 epochs, 16 updates" in end and "run/model.safetensors" in end
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") > 0, "the cursor comes back"
    lines = text.replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= WIDTH
