"""Console of a provider: lines for the user on the terminal, between those of a download's progress."""

from typing import TextIO

from ravnest.errors import printable
from ravnest.provider.fetch.progress import FetchLine


class Console:
    """Prints lines for the user. Without a stream, as in an embedded provider, it prints nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.fetch_line = None if stream is None else FetchLine(stream)
        """Shows the progress of a download."""

    def say(self, text: str) -> None:
        """Print one line. Parts of it may come from the coordinator, so control characters are removed."""
        if self._stream is not None and self.fetch_line is not None:
            self.fetch_line.interrupt()
            print(printable(text), file=self._stream, flush=True)
