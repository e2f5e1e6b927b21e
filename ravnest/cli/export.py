"""`ravnest export RUN --out model.safetensors`: the model of a run's newest intact checkpoint."""

import argparse
import sys
import time
from pathlib import Path

from ravnest import units
from ravnest.cli.arguments import Subparsers
from ravnest.errors import RunError
from ravnest.monitor.run_directory import RunPaths, existing_run, lock_holder
from ravnest.monitor.summary import Summary


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "export",
        help="write the trained model of a run to a file",
        description="Write the model of a run's newest checkpoint as one safetensors file, under the names of the "
        "model's own state_dict.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--checkpoint", metavar="N", type=int, help="export the checkpoint after N updates (default: the newest)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the model and prints the path; raises RunError without an intact checkpoint, or if the disk fails."""
    paths = existing_run(args.path)
    out: Path = args.out
    if out.is_dir():
        raise RunError(f"{out} is a folder; give --out a file name, such as {out / 'model.safetensors'}")
    if out.exists() and not args.force:
        raise RunError(f"{out} already exists; choose another --out or overwrite it with --force")

    # Imported late, because these modules import torch.
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ravnest.coordinator.checkpoints.reader import find_checkpoint, load_checkpoint, newest_good
    from ravnest.monitor.export import fuse, write_model

    if args.checkpoint is not None:
        info = find_checkpoint(paths.checkpoints_path, args.checkpoint)
    else:
        newest, damaged = newest_good(paths.checkpoints_path)
        for item in damaged:
            print(f"skipped checkpoint {int(item.folder.name)}: {item.reason}", file=sys.stderr)
        if newest is None:
            raise RunError(f"{paths.path} has no intact checkpoint to export; wait until the run has written one")
        info = newest
    try:
        extra = load_file(paths.static_path) if paths.static_path.exists() else {}
    except (SafetensorError, OSError) as error:
        raise RunError(f"{paths.static_path} cannot be read: {error}") from error
    contents = load_checkpoint(info)
    tensors = fuse(contents, info.state.get("aliases", {}), extra, info.state.get("non_persistent", ()))
    write_model(out, tensors, {"updates": str(info.updates), "samples": str(info.samples)})
    print(
        f"wrote {out}: {len(tensors)} tensors, {units.byte_size(out.stat().st_size)}, "
        f"after {units.count(info.updates)} updates and {units.count(info.samples)} samples"
    )
    if age := _age(paths, info.updates, info.recorded_at):
        print(age)
    return 0


def _age(paths: RunPaths, updates: int, recorded_at: float | None) -> str:
    """How much newer the run was than the exported checkpoint, and what newer state there is; empty if it has all."""
    if not paths.summary_path.exists():
        return ""
    summary = Summary.read(paths.summary_path)
    if summary.updates <= updates:
        return ""
    is_running = lock_holder(paths) is not None
    now = time.time() if is_running else paths.summary_path.stat().st_mtime
    text = f"the run {'is' if is_running else 'had come'} {units.counted(summary.updates - updates, 'update')} further"
    if recorded_at is not None:
        text += f"; this checkpoint {'is' if is_running else 'was'} {units.duration(max(0.0, now - recorded_at))} old"
    replica = summary.state.replica
    if replica is not None and replica.updates > updates:
        age = units.duration(max(0.0, now - replica.at))
        text += f"; the providers hold the state after {units.count(replica.updates)} updates, {age} old"
        text += ", which the next checkpoint collects" if is_running else ": continue the run with --resume to get it"
    return text
