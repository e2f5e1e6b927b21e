"""Turns proto/ravnest/v1/*.proto into ravnest/net/v1/*_pb2.py and *_pb2.pyi.

The one way generated code comes to be: `make proto` runs this file and the wheel build (setup.py) calls
`generate`. The protos import one another as `ravnest/v1/name.proto`, which protoc spells in Python as the
package `ravnest.v1`; the messages live in the transport's room, so that one name is rewritten on the way.
"""

import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(root: Path = ROOT) -> list[Path]:
    """Write the generated modules and return their paths; raises RuntimeError when protoc refuses a file."""
    # Imported here because grpc_tools is a build dependency: importing this module must not need it.
    from grpc_tools import protoc

    target = root / "ravnest" / "net" / "v1"
    sources = sorted((root / "proto" / "ravnest" / "v1").glob("*.proto"))
    if not sources:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"--proto_path={root / 'proto'}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            f"--python_out={scratch}",
            f"--pyi_out={scratch}",
            *(str(source) for source in sources),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused the files under proto/ravnest/v1; its message is above")
        written = []
        for made in sorted(Path(scratch, "ravnest", "v1").iterdir()):
            text = made.read_text().replace("from ravnest.v1 import", "from ravnest.net.v1 import")
            path = target / made.name
            path.write_text(text)
            written.append(path)
    return written


if __name__ == "__main__":
    paths = generate()
    sys.stdout.write(f"proto: wrote {len(paths)} files in ravnest/net/v1\n")
